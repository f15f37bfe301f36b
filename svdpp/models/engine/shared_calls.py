"""Division of the denoiser calls in one block of a modular pipeline between a pair of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from svdpp.errors import ModelError
from svdpp.models.base import PREDICTION, Partner, Tensors
from svdpp.models.engine.records import Node, Packer, clone_tensors, unpack, zeros_for

#: Integer dtypes by size in bytes. As integers, tensors can be compared bit by bit.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Hint of errors that occur only if two ranks share the steps.
LEAVE_OUT = "leave `cfg_parallel` out"


@dataclass(eq=False)
class SharedCalls:
    """Division of a step's denoiser calls: the two ranks of a pair take turns.

    A block of a modular pipeline calls the denoiser in a loop over the branches of the guidance,
    and combines the results after the last call. Both ranks of pair u, ranks 2u and 2u + 1, run the
    block twice. The table shows a block with three calls:

        run      call    rank 2u                       rank 2u + 1
        first    0       evaluates                     returns zeros
                 1       returns zeros                 evaluates
                 2       evaluates                     returns zeros
                         the ranks exchange their results; the state is restored
        second   0 to 2  returns the known results     returns the known results

    If no call depends on the result of another call, the second run has the same arguments and
    results as on one rank. If a call did depend on another result, its arguments would be different
    in the two runs, because the first run has zeros in place of some results. So different
    arguments are an error.

    In the first step of a process, rank 2u + 1 also evaluates call 0, to learn the shape of the
    zeros.
    """

    partner: Partner
    device: torch.device
    outputs: list[Node]
    """List with one element: the structure (shapes and dtypes) of the denoiser's result, which is
    the same for all calls. The list is empty until this process has called the denoiser once."""
    _calls: list[_Call] = field(default_factory=list)
    _own: list[Any] = field(default_factory=list)
    # Results of all calls, which the second run of the block returns. None during the first run.
    _results: list[Any] | None = None
    _repeated: int = 0

    def run(self, step: int, run: Callable[[], Any], set_back: Callable[[], None]) -> Any:
        """Run a block of a modular pipeline, and divide its denoiser calls between two ranks.

        The block runs twice. In the first run, each rank computes its half of the denoiser calls.
        Then the ranks exchange the results, and the second run gets the results of all calls. If
        the block calls no denoiser, it runs only once.

        Args:
            step: Index of the current step.
            run: Function that runs the block.
            set_back: Function that restores all state from before the block.

        Returns:
            Result of the block.

        Raises:
            ModelError: A call depends on the result of another call, or two calls have results of
                different shapes.
        """
        self._calls, self._own, self._results, self._repeated = [], [], None, 0
        result = run()
        if not self._calls:
            return result
        self._results = self._exchange(step)
        set_back()
        result = run()
        if self._repeated != len(self._calls):
            raise _depends(step, self._repeated)
        self._calls, self._own, self._results = [], [], None
        return result

    def evaluate(self, step: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a denoiser call in a block that the method `run` runs.

        In the first run of the block, this rank computes the result of every other call, and
        returns zeros for the calls of the other rank. The second run returns the results of both
        ranks.

        Args:
            step: Index of the current step.
            real: Method `forward` of the denoiser.
            args: Positional arguments of the pipeline's call.
            kwargs: Keyword arguments of the pipeline's call.
        """
        call = _Call(real, args, kwargs)
        if self._results is not None:
            place, self._repeated = self._repeated, self._repeated + 1
            if place >= len(self._calls) or not call.repeats(self._calls[place]):
                raise _depends(step, place)
            return self._results[place]
        place = len(self._calls)
        self._calls.append(call)
        is_own = place % 2 == self.partner.branch
        if not is_own and self.outputs:
            return zeros_for(self.outputs[0], self.device)
        result = real(*args, **kwargs)
        self._check_shape(step, result)
        if not is_own:
            return result
        self._own.append(result)
        return clone_tensors(result)  # the block may change this result, but `_own` must not change

    def _check_shape(self, step: int, result: Any) -> None:
        """Store the shapes of a denoiser's first result; check that later results have the same."""
        node = Packer().pack(result, PREDICTION)
        if not self.outputs:
            self.outputs.append(node)
        elif node != self.outputs[0]:
            raise ModelError(
                f"two calls of the denoiser have results of different shapes in step {step}",
                LEAVE_OUT,
                details={"step": step},
            )

    def _exchange(self, step: int) -> list[Any]:
        """Exchange all denoiser results with the pair's other rank; return them in order.

        Both ranks send the same number of results. If the number of calls is odd, the second rank
        of the pair has one result fewer, and adds zeros.
        """
        count = len(self._calls)
        rounds = (count + 1) // 2
        padding = [zeros_for(self.outputs[0], self.device) for _ in range(rounds - len(self._own))]
        packer = Packer()
        nodes = [
            packer.pack(result, f"{PREDICTION}.{place}")
            for place, result in enumerate([*self._own, *padding])
        ]

        def predictions() -> Tensors:
            return packer.tensors

        received = self.partner.exchange(step, predictions)
        own = iter(self._own)
        other = iter([unpack(node, received, self.device) for node in nodes])
        return [next(own if place % 2 == self.partner.branch else other) for place in range(count)]


class _Call:
    """Denoiser and arguments of one denoiser call, to be compared with those of a later call.

    The arguments are stored and not hashed. They are latents and embeddings, which are small
    compared with the denoiser's activations, and most of them are the same objects in both runs.
    """

    def __init__(self, real: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._real = real
        self._leaves, self._tree = tree_flatten((args, kwargs))
        self._versions = [_version(leaf) for leaf in self._leaves]

    def repeats(self, earlier: _Call) -> bool:
        """Whether a call has the same denoiser and bitwise the same arguments as an earlier one.

        An argument of the earlier call that has been changed in place since counts as different.
        """
        return (
            self._real == earlier._real
            and self._tree == earlier._tree
            and [_version(leaf) for leaf in earlier._leaves] == earlier._versions
            and all(map(_is_same, self._leaves, earlier._leaves))
        )


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) else None


def _is_same(ours: Any, theirs: Any) -> bool:
    """Whether two calls' arguments are the same object, equal values, or bitwise equal tensors."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if not isinstance(ours, torch.Tensor):
        return isinstance(ours, (int, float, str, torch.dtype, torch.device)) and ours == theirs
    layout = (ours.shape, ours.stride(), ours.dtype)
    if layout != (theirs.shape, theirs.stride(), theirs.dtype):
        return False
    as_bits = _INTEGERS[ours.dtype.itemsize]  # compare as integers, because NaN != NaN
    return torch.equal(ours.view(as_bits), theirs.view(as_bits))


def _depends(step: int, call: int) -> ModelError:
    return ModelError(
        f"call {call} of the denoiser in step {step} depends on the result of another call",
        LEAVE_OUT,
        details={"step": step, "call": call},
    )
