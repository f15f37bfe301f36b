"""One branch of the guidance on each of two ranks: whose evaluation a denoiser's call gives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from svdpp.errors import ModelError
from svdpp.models.base import PREDICTION, Partner, Tensors
from svdpp.models.engine.values import Node, Packer, tensors_in, unpack, zeros


class Branches:
    """The evaluations of one call's steps, of which this rank computes one in two.

    The rule `calls` is for pipelines that call the denoiser twice and use the results after that.
    The second rank cannot know the arguments of its call, the second one, when the first one is
    made: it returns a tensor for that, and fills it later. The rule `batch` is for pipelines that
    call it once, with a batch of two.
    """

    def __init__(
        self, rule: str, partner: Partner, device: torch.device, outputs: list[Node]
    ) -> None:
        self._rule, self._partner, self._device = rule, partner, device
        # The structure of a call's result; empty until the first step of a process.
        self._outputs = outputs
        self._calls = 0
        self._first: Any = None

    def evaluate(self, step: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call of the denoiser `real` returns on both ranks."""
        self._calls += 1
        branch, is_first = self._partner.branch, self._calls == 1
        if self._rule == "batch":
            args, kwargs = half(branch, real, args, kwargs)
            both = self._exchange(step, lambda: real(*args, **kwargs))
            return tree_map(joined, *(reversed(both) if branch else both))
        if self._calls > 2:
            raise ModelError(f"step {step} evaluates the denoiser more than twice")
        if branch == 0 and not is_first:
            return self._first
        if branch == 1 and is_first:
            known = self._outputs
            self._first = zeros(known[0], self._device) if known else real(*args, **kwargs)
            return self._first
        own, other = self._exchange(step, lambda: real(*args, **kwargs))
        if is_first:
            self._first = other
        else:
            for ours, theirs in zip(tensors_in(self._first), tensors_in(other), strict=True):
                ours.copy_(theirs)
        return own

    def end_step(self, step: int) -> None:
        """Checks that both branches of a step are evaluated; called before the scheduler's step."""
        if self._rule == "calls" and self._calls == 1:
            raise ModelError(
                f"step {step} evaluates one branch of the guidance only",
                "leave --cfg-parallel out",
            )
        self._calls, self._first = 0, None

    def _exchange(self, step: int, evaluate: Callable[[], Any]) -> tuple[Any, Any]:
        """This rank's result and the other one's."""
        packer, own = Packer(), []

        def prediction() -> Tensors:
            own.append((output := evaluate(), packer.pack(output, PREDICTION)))
            return packer.tensors

        received = self._partner.exchange(step, prediction)
        output, node = own[0]
        if not self._outputs:
            self._outputs.append(node)
        return output, unpack(node, received, self._device)


#: Arguments of denoisers that have a batch as their first axis, and those that both halves share.
_BATCHED = {
    *("sample", "hidden_states", "encoder_hidden_states", "encoder_attention_mask"),
    *("timestep", "added_time_ids", "video_coords"),
}
_SHARED = {"image_rotary_emb", "ofs"}


def half(
    branch: int, real: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a denoiser `real` for one branch of a batch of two."""
    bound = inspect.signature(real).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        lengths = {len(leaf) for leaf in tree_leaves(value) if _has_axes(leaf)}
        if name in _BATCHED:
            if lengths - {2}:
                raise ModelError(f"a batch of {max(lengths)} is not one for each branch: {name}")
            bound.arguments[name] = tree_map(functools.partial(_part, branch), value)
        elif name not in _SHARED and 2 in lengths:
            raise ModelError(f"it is not known how to divide {name} between two branches")
    return bound.args, bound.kwargs


def _has_axes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _part(branch: int, leaf: Any) -> Any:
    return leaf[branch : branch + 1] if _has_axes(leaf) else leaf


def joined(first: Any, second: Any) -> Any:
    """A batch of two from two of one; see `half`."""
    return torch.cat((first, second)) if isinstance(first, torch.Tensor) else first
