"""Call of a pipeline's unmodified `__call__` that runs only a range of the denoising steps.

The pipeline always loops over all timesteps. The call that encodes records the results of the
pipeline's methods and components until the denoiser's first call, and all later calls, on any rank,
replay these results. Steps before the range are phantom steps: denoisers return zeros, and
`scheduler.step` returns a result that an earlier rank has sent. So the pipeline's own code rebuilds
the variables of its loop. Ranks send only those attributes of a scheduler that `step` has changed.

A step consists of calls of denoisers, followed by calls of `scheduler.step`. Pipelines that make a
clip in chunks have one loop for each chunk, and the step index counts through all loops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch.utils._pytree import tree_leaves, tree_map

from svdpp.config.families.spec import FamilySpec
from svdpp.errors import ModelError
from svdpp.models.base import GENERATOR, LATENTS, PREDICTION, STATE, AfterStep, Partner, Tensors
from svdpp.models.engine import records
from svdpp.models.engine.hooks import hooked
from svdpp.models.engine.records import Node, Packer, patch_methods, tensors_in, unpack

# The table shows a clip of 6 steps on two ranks. The first rank encodes and runs steps [0, 3). The
# second rank runs steps [3, 6) and decodes. Each line is one call of the pipeline's `__call__`.
# Where a line ends, the exception `_Stop` ends the call: before the denoiser's first call, or after
# the last step of the range.
#
#   call          encoding  step 0   step 1   step 2   step 3   step 4   step 5   decoding
#   encode        records
#   steps [0, 3)  replays   runs     runs     runs
#   steps [3, 6)  replays   phantom  phantom  phantom  runs     runs     runs
#   decode        replays   phantom  phantom  phantom  phantom  phantom  phantom  runs
# A phantom step needs no forward pass. The denoiser returns zeros, and the pipeline computes with
# these zeros. `scheduler.step` discards its input and returns the result of the last finished step,
# which is in the packet. Before the first real step, the schedulers' `__dict__` and the generator
# are set to the states in the packet. So every local variable of `__call__` that depends on the
# number of finished steps (indices, chunks, the latent) has the same value as on one device.

#: Error message without its subject, the name of the pipeline.
DRAWS_GLOBALLY = "draws random numbers from torch's global generator: clips are not reproducible"


class _Stop(Exception):
    """Exception that ends a pipeline's `__call__` at the end of the range of steps."""


@dataclass(kw_only=True, eq=False)
class RangeCall:
    """Call of a pipeline's `__call__` that runs only steps `start` to `end` (exclusive)."""

    pipe: Any
    """Pipeline of diffusers. No other call uses the same scheduler object."""
    spec: FamilySpec
    given: Node | None
    """Structure (JSON) of the received packet, which has the clip's state after `start` steps.
    None: this call encodes, so it receives no packet."""
    received: Tensors
    """Tensors of the received packet, by name."""
    start: int
    end: int | None
    """Index after the last step. None: the call runs all steps from `start` on, and decodes."""
    generator: torch.Generator
    """Random generator of the clip."""
    after_step: AfterStep | None = None
    """Callback after each step of the range. If it raises an exception, the call ends."""
    branches: GuidanceBranches | None = None
    """Division of the guidance between two ranks, one branch each. None: this rank evaluates both
    branches."""

    def __post_init__(self) -> None:
        self._structure: Node = {}
        self._device = self.pipe._execution_device
        # A bound method would refer to this `RangeCall`, and so keep the packet's memory alive
        # after the call. `functools.partial` holds only the arguments that it gets here.
        self._unpacked = functools.partial(unpack, tensors=self.received, device=self._device)
        given = self.given["records"] if self.given else None
        self._records = records.Records(self.spec, self._unpacked, self.generator, given)
        self._index, self._stepped, self._ran = 0, False, False
        self._latents: Any = None
        # A (scheduler, attributes before its first `step`) pair for each scheduler, in the order of
        # the schedulers' first `step` calls.
        self._schedulers: list[tuple[Any, dict[str, Any]]] = []
        self._states: list[dict[str, Any]] = []
        # One entry for each `scheduler.step` call of the current step: index of the scheduler,
        # return value, and a copy of the return value. The copy is needed because the pipeline may
        # change the return value before `_packed_results` packs it. None instead of the copy: only
        # the shapes of the return value go into the packet.
        self._results: list[tuple[int, Any, Any]] = []
        self._outputs: list[Any] = []
        self._zeros: dict[int, Any] = {}
        # For each finished chunk of the clip: what `scheduler.step` returned in the chunk's last
        # step, as structures, in one list for each scheduler.
        self._chunk, self._chunks = 0, list[list[list[Node]]]()
        self._packer = Packer()

    def packet(self, inputs: Node | None = None) -> Tensors:
        """Return the clip's packet for the next rank, after the range's last step or the encode.

        Args:
            inputs: Facts about the clip's inputs that later calls need, such as
                `{"negative_prompt": True}`. Only the call that encodes has this argument. Later
                calls pass on the facts in their received packet.
        """
        known = self.given["given"] if self.given else inputs
        return self._packer.packet({**self._structure, "given": known})

    def __deepcopy__(self, memo: Any) -> RangeCall:
        # A pipeline may copy its scheduler. The hook of the copy must call this object, too, and
        # not a copy of it.
        return self

    @torch.no_grad()
    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call a pipeline's `__call__` so that it runs only the range's steps; return its result.

        Args:
            arguments: Arguments of the pipeline's `__call__`.

        Returns:
            Result of the pipeline; None if the call ends before the decode.

        Raises:
            ModelError: The pipeline draws random numbers from torch's global generator, or does not
                run the requested number of steps.
        """
        callback = step_callback(self.pipe, self._on_step_end)
        before, result, problem = global_states(self._device), None, ""
        with self._patched(), suppress(_Stop):
            result = self.pipe(**arguments, **callback, return_dict=False)
        if records.tensors_differ(before, global_states(self._device)):
            problem = DRAWS_GLOBALLY
        elif self.end is not None and not self._structure:
            problem = f"ends before step {self.end}: it does not run the requested number of steps"
        if problem:
            name = type(self.pipe).__name__
            raise ModelError(f"{name} {problem}", details={"pipeline": name, "step": self.end})
        return result

    # 1. Calls of one step: denoisers and `scheduler.step`.

    def _denoiser(self, name: str, module: Any) -> Callable[..., Any]:
        """Return the function that replaces a denoiser's `forward` while the pipeline runs."""
        real = module.forward

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._records.paused = True
            self._begin_step_or_stop()
            if self._index < self.start:
                return self._phantom_output()
            if getattr(module, "is_skeleton", False):
                raise ValueError(f"step {self._index} needs {name}, which this rank has not loaded")
            if self.branches is None:
                output = real(*args, **kwargs)
            else:
                output = self.branches.evaluate(self._index, real, args, kwargs)
            if self._is_last:
                self._outputs.append(output)
            return output

        return forward

    @property
    def _step(self) -> Node:
        """Part of the received packet's structure that describes the state after `start` steps."""
        assert self.given is not None
        step: Node = self.given["step"]
        return step

    @property
    def _is_last(self) -> bool:
        """Whether the current step is the last one that this call of a pipeline runs."""
        return self.end is not None and self._index == self.end - 1

    def _begin_step_or_stop(self) -> None:
        """Begin a pipeline's next step; if it is after the range, pack the state and end the call.

        The replacement of a denoiser's `forward` calls this method first. If the pipeline has
        called `scheduler.step` since the previous call of a denoiser, the previous step is finished
        and a new one begins. Otherwise this call of a denoiser belongs to the current step.

        Raises:
            _Stop: The new step is after the range.
        """
        self._finish_step()
        if self._stepped:
            self._index, self._stepped = self._index + 1, False
            self._outputs.clear()
            self._results.clear()
        if self._index == self.end:
            if not self._structure:
                self._pack()
            raise _Stop

    def _phantom_output(self) -> Any:
        """Return zeros in place of a denoiser's result, in a step before the range."""
        known = self._step["outputs"]
        place = min(len(self._outputs), len(known) - 1)
        self._outputs.append(None)
        if place not in self._zeros:
            self._zeros[place] = records.zeros_for(known[place], self._device)
        return self._zeros[place]

    def step(self, scheduler: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `scheduler.step`, or return the packet's result in a step before the range.

        Args:
            scheduler: One of the pipeline's schedulers.
            real: Bound method `step` of the scheduler.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        known = (place for place, (known, _) in enumerate(self._schedulers) if known is scheduler)
        if (place := next(known, None)) is None:
            place = len(self._schedulers)
            self._schedulers.append((scheduler, records.snapshot_attributes(scheduler)))
        self._stepped = True
        if self._index < self.start:
            result = self._phantom_step(scheduler, place)
        else:
            self._ran = True
            if self.branches is not None:
                self.branches.end_step(self._index)
            result = real(*args, **kwargs)
        travels = self.end is not None and place >= self.spec.num_results_equal_latents
        self._results.append((place, result, records.clone_tensors(result) if travels else None))
        return result

    def _phantom_step(self, scheduler: Any, place: int) -> Any:
        """Set a scheduler's attributes from the packet, and return the packet's result of `step`.

        Args:
            scheduler: Scheduler whose `step` the pipeline has called.
            place: Index of the scheduler, in the order of the schedulers' first steps.
        """
        step = self._step
        if place == len(self._states):
            self._states.append(self._unpacked(step["states"][place]))
        scheduler.__dict__.update(self._states[place])
        if self._index == self.start - 1:
            self._records.restore(step["generators"])
        # A memory estimate runs only some steps, so its packet can have fewer chunks than the clip.
        # The last chunk stands for the missing ones.
        chunks = step["chunks"]
        calls = sum(place == known for known, *_ in self._results)
        return self._unpacked(chunks[min(self._chunk, len(chunks) - 1)][place][calls])

    def _finish_step(self) -> None:
        """Call `after_step` if a step of the range has ended; pack the state after the last step.

        The method `step` does not pack the state, because a pipeline may change the scheduler after
        it has called `scheduler.step`.
        """
        if not self._ran:
            return
        self._ran = False
        if self._is_last:
            self._pack()
        if self.after_step is not None:
            self.after_step(self._index, self._reached())

    def _reached(self) -> torch.Tensor:
        """Return a clip's latent after the last finished step of this call."""
        latents = self._latents
        return tensors_in(self._results[0][1])[0] if latents is None else latents

    def _on_step_end(self, _: Any, __: int, ___: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        """Store the latent after a step; after the last phantom step, return the packet's latent.

        Phantom steps are those before the range, which run no denoiser. After the last of them, the
        pipeline replaces its latent by the returned one, and so begins the range with the latent
        that the earlier rank has sent.
        """
        self._latents = known[LATENTS]
        if self._index != self.start - 1:
            return {}
        return {LATENTS: self._unpacked(self._step["latents"])}

    # 2. Loop over the steps: the progress bar.

    @contextmanager
    def progress_bar(self, *_: Any, **__: Any) -> Iterator[RangeCall]:
        """Replace the progress bar of a pipeline's loop, to notice the ends of steps and chunks.

        The pipeline calls `update` after each step. The end of the `with` block ends the chunk.
        """
        yield self
        self.update()
        if self.end is not None:
            self._chunks.append(self._packed_results(f"chunk.{self._chunk}"))
        self._chunk += 1
        self._records.paused = False

    def update(self, *_: Any) -> None:
        """Finish a step, in place of a progress bar's `update`; end the call after the range.

        Pipelines call this method of a progress bar after each step.
        """
        self._finish_step()
        if self.end is not None and self._index + self._stepped >= self.end:
            raise _Stop

    # 3. Contents of the packet for the next rank.

    def _pack(self) -> None:
        """Pack the encode's records, and the state after the last step, for the next rank."""
        if self.given is None:
            recorded, step = self._records.packed(self._packer), None
        else:
            # Pack the latent first. `scheduler.step` often returns the same tensor, and a tensor
            # that is packed twice keeps its first name. The receiver expects the name `latents`.
            latents = self._packer.pack(self._reached(), LATENTS)
            step = {"latents": latents, **self._packed_step()}
            recorded = self._records.passed_on(self.received, self._packer.tensors)
        self._structure = {"records": recorded, "step": step}

    def _packed_results(self, name: str) -> list[list[Node]]:
        """Pack the results of `scheduler.step`; return a list of structures for each scheduler."""
        results: list[list[Node]] = [[] for _ in self._schedulers]
        for place, result, before in self._results:
            if before is None:
                results[place].append(records.pack_structure(result))
                continue
            is_changed = records.tensors_differ(tensors_in(before), tensors_in(result))
            place_name = f"{name}.{place}.{len(results[place])}"
            results[place].append(self._packer.pack(before if is_changed else result, place_name))
        return results

    def _packed_step(self) -> Node:
        """Pack all that later ranks need to skip the finished steps, except the latent.

        The tensors go into the packet, and their structure is returned.
        """
        chunks = [*self._chunks, self._packed_results("result")]
        states = []
        for place, (scheduler, before) in enumerate(self._schedulers):
            name = f"{STATE}.{place}" if place else STATE
            states.append(self._packer.pack(records.scheduler_changes(before, scheduler), name))
        return {
            "chunks": chunks,
            "states": states,
            "outputs": [records.pack_structure(each) for each in self._outputs],
            "generators": self._packer.pack([self.generator.get_state()], GENERATOR),
        }

    # 4. Replacement of methods of the pipeline, its components and its scheduler during the call.

    @contextmanager
    def _patched(self) -> Iterator[None]:
        pipe = self.pipe
        with ExitStack() as stack:
            stack.enter_context(patch_methods(pipe, progress_bar=self.progress_bar))
            for name in records.pipeline_methods(pipe.__class__):
                method = self._records.wrapped(name, getattr(pipe, name))
                stack.enter_context(patch_methods(pipe, **{name: method}))
            for part, component in pipe.components.items():
                if part in self.spec.denoisers and component is not None:
                    forward = self._denoiser(part, component)
                    stack.enter_context(patch_methods(component, forward=forward))
                elif isinstance(component, torch.nn.Module):
                    stack.enter_context(self._recording(part, component))
            for part, value in list(vars(pipe).items()):
                if isinstance(value, VaeImageProcessor):
                    stack.enter_context(self._recording(part, value))
            stack.enter_context(hooked(pipe.scheduler, self, {"step": "step"}))
            yield

    def _recording(self, part: str, component: Any) -> Any:
        methods = records.component_methods(component).items()
        recorded = {
            name: self._records.wrapped(f"{part}.{name}", method) for name, method in methods
        }
        # Pipelines cast components with `to` only to encode. Calls after the encode replay its
        # results, and do not run the component, so they need no cast: `to` becomes a no-op.
        if self.given is not None:
            recorded["to"] = lambda *_, **__: component
        return patch_methods(component, **recorded)


def global_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's global random generators on the CPU and on a CUDA device.

    Returns:
        One state, or two if `device` is CUDA: uint8 of shape (bytes,), in host memory.
    """
    states = [torch.default_generator.get_state()]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def step_callback(pipe: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments that make a pipeline's `__call__` call back after each step.

    The result is empty if the pipeline supports no such callback.

    Args:
        pipe: Pipeline of diffusers.
        function: Callback that gets the pipeline, the step's index, its timestep and a dict of
            tensors.
    """
    name = "callback_on_step_end"
    return {name: function} if name in inspect.signature(type(pipe).__call__).parameters else {}


# --- pairs: two ranks, each of which evaluates one branch of the guidance ---


@dataclass(eq=False)
class GuidanceBranches:
    """Guidance on a pair of ranks: in each step, each rank evaluates the denoiser for one branch.

    `FamilySpec.branches` is `batch` for pipelines that call the denoiser once in each step, with a
    batch of two. Each rank then evaluates half of the batch. The value `calls` is for pipelines
    that call the denoiser twice in each step, and use the two results only after both calls. The
    table shows a step with `calls`. Both ranks of pair u, ranks 2u and 2u + 1, run the pipeline's
    own code:

        the pipeline     rank 2u (branch 0)            rank 2u + 1 (branch 1)
        first call       evaluates, then exchanges     returns zeros for now
        second call      returns what rank 2u + 1      evaluates, then exchanges;
                         has sent                      the zeros become what rank 2u has sent
        scheduler.step   equal arguments, equal result on both ranks

    The pipeline makes the second call only after the first call has returned. So rank 2u + 1
    returns zeros from the first call, and both ranks evaluate at the same time. In the first step
    with a latent of a new shape, rank 2u + 1 also evaluates the first call, to learn the shape of
    the zeros.
    """

    spec: FamilySpec
    partner: Partner
    device: torch.device
    outputs: dict[torch.Size, Node]
    """Structure (shapes and dtypes) of the denoiser's result, by the shape of the latent (the first
    tensor among the denoiser's arguments). The second rank of the pair needs it to create zeros,
    and adds an entry in the first step with a latent of a new shape."""
    _calls: int = 0
    _first: Any = None

    def evaluate(self, step: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the denoiser for this rank's guidance branch, and exchange results with the partner.

        The partner rank calls the denoiser for its own branch.

        Args:
            step: Index of the step.
            real: Bound method `forward` of the denoiser.
            args: Positional arguments of the pipeline's call of the denoiser.
            kwargs: Keyword arguments of the pipeline's call of the denoiser.

        Returns:
            Result for the pipeline. If `FamilySpec.branches` is `calls`, the first call returns
            zeros on the second rank of the pair, and the second call overwrites the zeros with the
            true result. When the pipeline calls `scheduler.step`, both ranks have equal results.

        Raises:
            ModelError: The step calls the denoiser more often than `FamilySpec.branches`
                allows.
        """
        self._calls += 1
        branch, is_first = self.partner.branch, self._calls == 1
        if self.spec.branches == "batch":
            args, kwargs = split_batch(branch, self.spec, real, args, kwargs)
            both = self._exchange(step, lambda: real(*args, **kwargs))
            return tree_map(join_batch, *(reversed(both) if branch else both))
        if self._calls > 2:
            raise ModelError(
                f"step {step} evaluates the denoiser more than twice",
                "leave `cfg_parallel` out",
                details={"step": step, "evaluations": self._calls},
            )
        if branch == 0 and not is_first:
            return self._first
        if branch == 1 and is_first:
            shape = tensors_in((args, kwargs))[0].shape
            if shape in self.outputs:
                self._first = records.zeros_for(self.outputs[shape], self.device)
            else:
                self._first = real(*args, **kwargs)
                self.outputs[shape] = Packer().pack(self._first, PREDICTION)
            return self._first
        own, other = self._exchange(step, lambda: real(*args, **kwargs))
        if is_first:
            self._first = other
        else:
            for ours, theirs in zip(tensors_in(self._first), tensors_in(other), strict=True):
                ours.copy_(theirs)
        return own

    def end_step(self, step: int) -> None:
        """Raise a `ModelError` unless both guidance branches of the step have been evaluated.

        Raises:
            ModelError: Only one branch was evaluated.
        """
        if self.spec.branches == "calls" and self._calls == 1:
            raise ModelError(
                f"step {step} evaluates only one branch of the guidance",
                "leave `cfg_parallel` out",
                details={"step": step, "evaluations": self._calls},
            )
        self._calls, self._first = 0, None

    def _exchange(self, step: int, evaluate: Callable[[], Any]) -> tuple[Any, Any]:
        packer, own = Packer(), []

        def prediction() -> Tensors:
            own.append((output := evaluate(), packer.pack(output, PREDICTION)))
            return packer.tensors

        received = self.partner.exchange(step, prediction)
        output, node = own[0]
        return output, unpack(node, received, self.device)


def split_batch(
    branch: int, spec: FamilySpec, real: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one guidance branch's part of a denoiser's arguments, which have a batch of two.

    Args:
        branch: Position of the branch in the batch, 0 or 1.
        spec: Spec of the family, which names the arguments with a batch axis.
        real: Bound method `forward` of the denoiser, whose signature names the arguments.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ModelError: A batch axis does not have the length 2, or the spec does not say whether an
            argument has a batch axis.
    """
    bound = inspect.signature(real).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        lengths = {len(leaf) for leaf in tree_leaves(value) if _has_axes(leaf)}
        if name in spec.batched_arguments:
            if lengths - {2}:
                raise ModelError(
                    f"{name} has a batch of {max(lengths)}, but guidance has two branches",
                    details={"batch": max(lengths), "argument": name},
                )
            bound.arguments[name] = tree_map(functools.partial(_part, branch), value)
        elif name not in spec.shared_arguments and 2 in lengths:
            raise ModelError(
                f"the family's spec does not say how to divide {name} between two branches",
                details={"argument": name},
            )
    return bound.args, bound.kwargs


def _has_axes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _part(branch: int, leaf: Any) -> Any:
    return leaf[branch : branch + 1] if _has_axes(leaf) else leaf


def join_batch(first: Any, second: Any) -> Any:
    """Concatenate the results of two guidance branches along the batch axis.

    Args:
        first: Result of the first branch: a tensor of shape (B, ...), or another value, which is
            returned unchanged.
        second: Result of the second branch, with the same shape.
    """
    return torch.cat((first, second)) if isinstance(first, torch.Tensor) else first
