"""Call of a modular pipeline that runs only the encode, some denoising steps, or the decode.

diffusers' modular pipelines are trees of blocks. Blocks share one `PipelineState`; the denoising
loop is a block whose sub-blocks share a `BlockState` in each iteration. Every rank calls the whole
unmodified pipeline. Hooks at the blocks skip what other ranks do:

  call          blocks before   denoising loop                                     blocks after
                the loop        iteration 0  iteration 1  iteration 2  iteration 3  the loop
  encode        run             -
  steps [0, 2)  skipped         runs         runs         -
  steps [2, 4)  skipped         skipped      skipped      runs         runs -
  decode        skipped         skipped      skipped      skipped      skipped      run

`-` marks where the call ends. Skipped blocks cost no time. In their place, the packet that one rank
sends to the next has the values that later blocks declare as inputs, and the BlockState. It also
has what steps change elsewhere: attributes of schedulers, guiders and denoisers, states of random
generators, and the chosen branches of conditional blocks.

A step is one or more calls of denoisers, followed by `scheduler.step`, whose first call ends the
step. If a pipeline has no scheduler, each iteration is one step, and the new latent is the value
`latents` of the BlockState.

Some pipelines make a clip in chunks: an iteration makes one chunk, and one of its sub-blocks runs
all steps of the chunk in its own loop. If a call begins between two of these steps, it runs the
whole sub-block, but the steps of earlier ranks are phantom steps: denoisers return zeros, and
`scheduler.step` returns the last result of the earlier rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
)
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from svdpp.config import LatentSpec
from svdpp.config.families.spec import FamilySpec
from svdpp.errors import ModelError, pluralize
from svdpp.models.base import DTYPES, LATENTS, AfterStep, Tensors
from svdpp.models.engine.call import DRAWS_GLOBALLY, GuidanceBranches, global_states
from svdpp.models.engine.component_attributes import (
    Attributes,
    attributes_of,
    modules_of,
    pack_changed_attributes,
    set_back_component,
    snapshot_component,
)
from svdpp.models.engine.hooks import hook
from svdpp.models.engine.modular_blocks import (
    SubBlockEntry,
    generators_in,
    is_denoising_loop,
    names_read,
    same_in,
    traced_block_state,
    uses_denoisers,
    values_of,
)
from svdpp.models.engine.modular_state import StatePacker, StateUnpacker
from svdpp.models.engine.records import (
    Node,
    patch_methods,
    step_latent,
    tensors_differ,
)
from svdpp.models.engine.shared_calls import LEAVE_OUT, SharedCalls


class _Stop(BaseException):
    """Exception that ends a modular pipeline's call after this rank's steps.

    The base class is not `Exception`, because diffusers logs the traceback of each `Exception`.
    """


@dataclass(kw_only=True, eq=False)
class ModularCall:
    """Partial call of a modular pipeline, which runs a range of the steps.

    The call continues from the state in a packet, and ends before the step `end`.
    """

    pipe: Any
    """Modular pipeline of diffusers. While the call lasts, its blocks and components are hooked."""
    spec: FamilySpec
    given: Node | None
    """Structure (JSON) of the packet from an earlier rank. None: this call encodes."""
    received: Tensors
    """Tensors of the packet from an earlier rank, by name."""
    end: int | None
    """Index after the last step of the call. None: the call runs to the end of the pipeline."""
    blank: LatentSpec | None = None
    """Shape and dtype that the packet's latent must have after the encode. If the pipeline has no
    latent yet, the packet contains zeros of this shape. If the pipeline's latent begins with the
    tokens of images, the packet contains only the tokens after them, because no step changes the
    tokens of images. None: this call does not encode."""
    after_step: AfterStep | None = None
    """Callback after each step of the call. If it raises an exception, the call ends."""
    branches: GuidanceBranches | None = None
    """Division of the denoiser calls between two ranks, one guidance branch each, for families
    whose `FamilySpec.branches` is `calls`. None: this rank evaluates both branches, or `shared` is
    used."""
    shared: SharedCalls | None = None
    """Division of the denoiser calls between two ranks, which take turns, for families whose
    `FamilySpec.branches` is `replay`. None: this rank makes all calls, or `branches` is used."""

    def __post_init__(self) -> None:
        self._device = self.pipe._execution_device
        self._structure: Node = {}
        self._packer = StatePacker({})
        self._steps: int = self.given["steps"] if self.given else 0
        self._evaluations = 0  # number of denoiser calls in the current step
        self._latents: torch.Tensor | None = None
        # Branches of conditional blocks outside of loops, in the order in which they were chosen.
        self._selected: list[Any] = list(self.given["selected"]) if self.given else []
        self._num_selects = 0
        # Top-level blocks: how many have begun, and the current one.
        self._num_begun = 0
        self._block: Any = None
        self._state: Any = None
        # The denoising loop: its block, its BlockState, and the number of iterations begun.
        self._loop: Any = None
        self._block_state: Any = None
        self._iteration = 0
        self._first_uses: dict[str, str] = {}
        # Sub-blocks of the current iteration: how many have begun, and how many are skipped.
        self._sub_block = 0
        self._skipped = 0
        self._resume: Node | None = None
        # The current sub-block: number of finished steps; number of phantom steps left (steps that
        # an earlier rank has run, so that denoisers return zeros); results of the denoisers in this
        # step; and the last result of each series of steps (each `scheduler.set_timesteps` begins a
        # series).
        self._inner_steps = 0
        self._phantom_steps = 0
        self._outputs: list[Node | None] = []
        self._series: list[Any] = []
        self._ran_step = False
        # Attributes of components after the last step of the call, by the name of the component.
        self._after_last_step: dict[str, Attributes] = {}
        self._entry: SubBlockEntry | None = None
        # Whether the current sub-block's calls of denoisers are divided between two ranks.
        self._is_shared_block = False

    def packet(self) -> Tensors:
        """Return the packet for the next rank: the clip's state where this modular call ended."""
        return self._packer.packet(self._structure)

    def __deepcopy__(self, memo: Any) -> ModularCall:
        # A pipeline may copy its scheduler. The hook of the copy must call this object, too, and
        # not a copy of it.
        return self

    @torch.no_grad()
    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call a modular pipeline, which runs only the encode, a range of steps, or the decode.

        Args:
            arguments: Inputs of the pipeline; empty if this call continues from a packet.

        Returns:
            `PipelineState` at the end of the pipeline; None if the call ends at the step `end`.

        Raises:
            ModelError: The pipeline draws from torch's global generator, does not run the requested
                number of steps, or has a value that cannot be sent to another rank.
        """
        before, result, problem = global_states(self._device), None, ""
        with self._hooked(), suppress(_Stop):
            result = self.pipe(**arguments)
        if tensors_differ(before, global_states(self._device)):
            problem = DRAWS_GLOBALLY
        elif self.end is not None and not self._structure:
            problem = f"ends before step {self.end}: it does not run the requested number of steps"
        if problem:
            raise self._error(problem)
        return result

    def _error(self, problem: str, hint: str = "") -> ModelError:
        name = type(self.pipe).__name__
        return ModelError(f"{name} {problem}", hint, details={"pipeline": name, "step": self.end})

    # 1. Top-level blocks.

    def select(self, _: Any, real: Callable[..., Any], **inputs: Any) -> Any:
        """Choose a branch of a pipeline's conditional block, or return an earlier rank's choice.

        Args:
            real: Method `select_block` of the conditional block.
            inputs: Values by which the block chooses.
        """
        if self._loop is not None:
            return real(**inputs)
        self._num_selects += 1
        if self._num_selects > len(self._selected):
            self._selected.append(real(**inputs))
        return self._selected[self._num_selects - 1]

    def run_block(
        self, block: Any, real: Callable[..., Any], components: Any, state: Any, **kwargs: Any
    ) -> Any:
        """Run a block that has no branches to choose, or skip it if an earlier rank has run it.

        Args:
            block: Top-level block, or sub-block of the denoising loop.
            real: Method `__call__` of the block.
            components: The pipeline.
            state: `PipelineState` of a top-level block, `BlockState` of a sub-block.
            kwargs: Further arguments of a sub-block.
        """
        if isinstance(state, BlockState):
            return self._run_sub_block(block, real, components, state, **kwargs)
        index, self._num_begun = self._num_begun, self._num_begun + 1
        self._resume = None
        if self.given is not None and index <= self.given["block"]:
            # Set the state before each skipped block, and not only once, because the blocks that
            # contain the skipped block run their own code, which changes values of the state.
            self._set_state(state)
            if index < self.given["block"]:
                return components, state
            self._resume = self.given["loop"]
        self._block, self._state, self._iteration = block, state, 0
        if is_denoising_loop(block, self._denoisers):
            self._loop = block
            if self._steps == self.end and self._resume is None:
                self._latents = self._first_latent(state.values.get(LATENTS))
                self._pack(None)
        result = real(components, state)
        self._loop = None
        return result

    def _first_latent(self, latents: torch.Tensor | None) -> torch.Tensor:
        """Return a clip's latent for the packet before the first step.

        Args:
            latents: Latent in the pipeline's state; None: the pipeline has no latent yet, because
                each chunk draws its own noise.
        """
        assert self.blank is not None
        shape = self.blank.shape
        if latents is None:
            return torch.zeros(shape, dtype=DTYPES[self.blank.dtype], device=self._device)
        if "N" not in self.blank.dims:
            return latents
        axis = self.blank.dims.index("N")
        return latents.narrow(axis, latents.shape[axis] - shape[axis], shape[axis])

    def _set_state(self, state: Any) -> None:
        """Set the values of a `PipelineState` to those in the received packet."""
        assert self.given is not None
        state.values.clear()
        state.values.update(self._values)
        state.kwargs_mapping.clear()
        state.kwargs_mapping.update(copy.deepcopy(self.given["kwargs_mapping"]))

    # 2. The denoising loop.

    def run_iteration(
        self, _: Any, real: Callable[..., Any], components: Any, block_state: Any, **kwargs: Any
    ) -> Any:
        """Run an iteration of a modular denoising loop, or skip it if an earlier rank has run it.

        Args:
            real: Method `loop_step` of the loop.
            components: The pipeline.
            block_state: `BlockState` of the loop.
            kwargs: Further arguments of the sub-blocks.
        """
        index, self._iteration = self._iteration, self._iteration + 1
        self._sub_block, self._skipped, self._block_state = 0, 0, block_state
        if self._resume is not None:
            values = values_of(block_state)
            # Replace all values by the received ones, also in a skipped iteration: after the last
            # iteration, these values go to the blocks after the loop.
            values.clear()
            values.update(self._received_block_state)
            if index < self._resume["iteration"]:
                return components, block_state
            self._skipped, self._resume = self._resume["sub_block"], None
        self._first_uses = {}
        block_state.__class__ = traced_block_state(self._first_uses)
        result = real(components, block_state, **kwargs)
        block_state.__class__ = BlockState
        if self._evaluations and not self.spec.schedulers:
            self._inner_steps += 1
            self._end_step(values_of(block_state)[LATENTS])
            if self._steps == self.end:
                self._pack({"iteration": index, "sub_block": self._sub_block})
        return result

    def _run_sub_block(
        self,
        block: Any,
        real: Callable[..., Any],
        components: Any,
        block_state: Any,
        **kwargs: Any,
    ) -> Any:
        index, self._sub_block = self._sub_block, self._sub_block + 1
        if index < self._skipped:
            return components, block_state
        self._series, self._inner_steps, self._outputs = [], 0, []
        if self.given is not None and self.given["inner"] and not self._ran_step:
            self._phantom_steps = self.given["inner"]["steps"]
            self._set_generators(self.given["inner"]["generators"])
        self._entry = SubBlockEntry(values_of(block_state))
        run = functools.partial(real, components, block_state, **kwargs)
        if self.shared is not None and uses_denoisers(block, self._denoisers):
            result = self._run_shared(self.shared, self._entry, run)
        else:
            result = run()
        if self._loop is not None and self.end is not None and self._steps == self.end:
            self._pack({"iteration": self._iteration - 1, "sub_block": self._sub_block})
        return result

    def _run_shared(self, shared: SharedCalls, entry: SubBlockEntry, run: Callable[[], Any]) -> Any:
        """Run a sub-block whose calls of denoisers are divided between two ranks.

        `SharedCalls` runs the sub-block twice if it calls a denoiser, and restores the state in
        between.
        """
        schedulers = (each for each in entry.values.values() if isinstance(each, SchedulerMixin))
        before = [(part, snapshot_component(part)) for part in (*self._parts.values(), *schedulers)]

        def set_back() -> None:
            if name := entry.changed_in_place():
                problem = f"changes {name} in place in a block that has to run twice"
                raise self._error(problem, LEAVE_OUT)
            values = values_of(self._block_state)
            values.clear()
            values.update(entry.values)
            for generator, state in zip(generators_in(entry.values), entry.generators, strict=True):
                generator.set_state(state)
            for part, attributes in before:
                set_back_component(part, attributes)
            self._evaluations, self._outputs = 0, []

        if self._evaluations:
            raise self._error("calls the denoiser in two blocks of one step", LEAVE_OUT)
        self._is_shared_block = True
        result = shared.run(self._steps, run, set_back)
        self._is_shared_block = False
        return result

    # 3. A step.

    def evaluate(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a denoiser, or return zeros of its result's shape in a step of an earlier rank.

        Args:
            real: Method `forward` of the denoiser.
            args: Positional arguments of the pipeline's call.
            kwargs: Keyword arguments of the pipeline's call.

        Raises:
            ModelError: A block calls the denoiser outside of a loop of blocks, or in a step that
                the clip does not have.
        """
        if self._phantom_steps:
            known = self._received_series()["outputs"]
            self._outputs.append(None)
            node = known[min(len(self._outputs), len(known)) - 1]
            return self._zeros.get(node)
        if self._loop is None:
            block = type(self._block).__name__
            raise self._error(f"calls a denoiser in {block}, which is not a loop of blocks")
        if self.end is None:
            raise self._error(f"runs more than the requested {pluralize(self._steps, 'step')}")
        if self._steps == self.end:
            self._pack(
                {"iteration": self._iteration - 1, "sub_block": self._sub_block - 1},
                is_inside=True,
            )
        self._evaluations += 1
        if self.branches is not None:
            result = self.branches.evaluate(self._steps, real, args, kwargs)
        elif self.shared is None:
            result = real(*args, **kwargs)
        elif self._is_shared_block:
            result = self.shared.evaluate(self._steps, real, args, kwargs)
        else:
            raise self._error("calls a denoiser in a block that does not declare it", LEAVE_OUT)
        self._outputs.append(self._packer.describe(result))
        return result

    def set_timesteps(self, _: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `scheduler.set_timesteps`, which begins a new series of steps in a sub-block.

        Args:
            real: Method `set_timesteps` of a scheduler.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        if self._loop is not None:
            self._series.append(None)
        return real(*args, **kwargs)

    def step(self, _: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `scheduler.step`, or return the packet's result in a step of an earlier rank.

        Args:
            real: Method `step` of a scheduler.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        if self._is_shared_block:
            problem = "runs whole denoising steps inside one block, which two ranks cannot share"
            raise self._error(problem, LEAVE_OUT)
        is_phantom = self._phantom_steps > 0
        if is_phantom:
            series = self._received_series()
            self._phantom_steps -= 1
            result = self._unpacker.get(series["result"])
            self._set_generators(series["generators"])
            if self._phantom_steps == 0:
                self._set_attributes()
            outputs = series["outputs"]
        else:
            if self.branches is not None:
                self.branches.end_step(self._steps)
            result = real(*args, **kwargs)
            outputs = self._outputs
        # A step may use several schedulers. The first `scheduler.step` after a call of a denoiser
        # ends the step, and later ones do not count.
        if self._evaluations or (is_phantom and self._outputs):
            states = [each.get_state() for each in generators_in(values_of(self._block_state))]
            made = {"result": result, "outputs": outputs, "generators": states}
            self._series[-1:] = [made]
            self._inner_steps += 1
            self._outputs = []
        if self._evaluations:
            self._end_step(result)
        return result

    def _end_step(self, result: Any) -> None:
        """Count a finished step of a modular pipeline, store its latent, and call `after_step`.

        Args:
            result: Result of `scheduler.step`; without a scheduler, the latent.
        """
        self._latents = step_latent(result)
        self._ran_step = True
        self._evaluations = 0
        self._steps += 1
        if self._steps == self.end:
            self._after_last_step = {
                name: attributes_of(component) for name, component in self._parts.items()
            }
        if self.after_step is not None:
            self.after_step(self._steps - 1, self._latents)

    def _received_series(self) -> Node:
        """Return the node of the received packet for the current series of steps.

        A series begins with `scheduler.set_timesteps`. The node describes the last step that the
        sending rank ran in the series: the result of `scheduler.step`, the structures of the
        denoisers' results, and the states of the generators.
        """
        assert self.given is not None
        series: list[Node] = self.given["inner"]["series"]
        return series[max(len(self._series) - 1, 0)]

    # 4. The packet.

    def _pack(self, place: Node | None, *, is_inside: bool = False) -> None:
        """Pack the state of a modular pipeline at the end of this rank's steps, and end the call.

        Args:
            place: Place where the call ends: index of the iteration, and number of finished
                sub-blocks in it. None: the call ends before the loop.
            is_inside: Whether the call ends in the middle of the sub-block after `place`. The
                packet then has the BlockState at the start of this sub-block, which the next rank
                runs again.
        """
        packer = self._packer = StatePacker(self.pipe.components)
        values: dict[str, Any] = {}
        if place is not None:
            values = values_of(self._block_state)
            if is_inside:
                assert self._entry is not None
                values = self._entry.values
                if name := self._entry.changed_in_place():
                    raise self._error(f"changes {name} in place in a block that has to run again")
        assert self._latents is not None
        latents = packer.pack(same_in(values, self._latents), LATENTS)
        # The packet does not need tensors that each iteration writes before it reads them. Which
        # tensors these are is known only after a whole iteration. If an iteration has several
        # steps, all tensors are sent, because a packet must not depend on the step at which the
        # call began.
        written = set()
        is_whole = place is not None and self._sub_block == len(self._loop.sub_blocks)
        if is_whole and self._inner_steps == 1 and not (is_inside or self._skipped):
            written = {name for name, use in self._first_uses.items() if use == "written"}
        assert self.spec.modular is not None
        rewritten = frozenset() if is_inside else self.spec.modular.rewritten
        block_state = []
        for name, value in values.items():
            if name in rewritten:
                node = packer.absent(f"block.{name}", value)
            elif name in written and isinstance(value, torch.Tensor):
                node = packer.describe(value)
            else:
                node = packer.pack(value, f"block.{name}")
            block_state.append([name, node])
        # Between the last step and this point, the pipeline may have begun another series of steps
        # and changed attributes. So the packet gets the attributes from the end of the last step.
        after = self._after_last_step if is_inside else {}
        attributes = {
            name: after.get(name) or attributes_of(part) for name, part in self._parts.items()
        }
        self._structure = {
            "steps": self._steps,
            "latents": latents,  # separate, because the latent may not be in the state
            "block": self._num_begun - 1,
            "selected": self._selected[: self._num_selects],
            "state": self._packed_state(values),
            "kwargs_mapping": {
                kind: list(dict.fromkeys(names))
                for kind, names in self._state.kwargs_mapping.items()
            },
            "loop": None if place is None else {**place, "block_state": block_state},
            "attributes": pack_changed_attributes(
                packer, attributes, self._before, denoisers=self._denoisers
            ),
            "inner": self._packed_inner() if is_inside else None,
        }
        raise _Stop

    def _packed_state(self, block_state: Mapping[str, Any]) -> list[Any]:
        """Pack the values that blocks of later ranks read; return [name, structure] pairs.

        Tensors whose data no later block reads are packed without data, with only their shape and
        dtype. There are two kinds: tensors that the denoising loop has replaced by newer ones, and
        tensors of which conditional blocks only check whether they are None.
        """
        packer, packed = self._packer, []
        replaced = {each.name for each in (*self._loop.inputs, *self._loop.intermediate_outputs)}
        read, triggers = names_read(self.pipe._blocks, self._block, self._state.kwargs_mapping)
        for name, value in self._state.values.items():
            if name not in read | triggers:
                continue
            is_replaced = name in replaced & block_state.keys() and block_state[name] is not value
            if (is_replaced or name not in read) and isinstance(value, torch.Tensor):
                packed.append([name, packer.describe(value)])
            else:
                packed.append([name, packer.pack(value, f"state.{name}", may_be_absent=True)])
        return packed

    def _packed_inner(self) -> Node:
        """Return the part of a packet's structure that is needed between two steps of a sub-block.

        It has the number of finished steps of the sub-block, the states of the generators at the
        start of the sub-block, and the last result of each series of steps.
        """
        assert self._entry is not None
        packer = self._packer
        series = [
            {
                "result": packer.pack(each["result"], f"result.{place}"),
                "outputs": each["outputs"],
                "generators": packer.pack(each["generators"], f"generators.{place}"),
            }
            for place, each in enumerate(filter(None, self._series))
        ]
        generators = packer.pack(self._entry.generators, "generators")
        return {"steps": self._inner_steps, "generators": generators, "series": series}

    def _restore(self) -> None:
        """Unpack an earlier rank's packet, and set the attributes of the components from it."""
        assert self.given is not None
        components = self.pipe.components
        self._unpacker = StateUnpacker(self.received, components, self._device)
        self._zeros = StateUnpacker({}, components, self._device, zeros=True)
        loop, get = self.given["loop"], self._unpacker.get
        self._received_block_state = {
            name: get(node) for name, node in (loop["block_state"] if loop else ())
        }
        self._values = {name: get(node) for name, node in self.given["state"]}
        for value in (*self._values.values(), *self._received_block_state.values()):
            if isinstance(value, SchedulerMixin):
                self._hook_scheduler(value)
        self._set_attributes()

    def _set_attributes(self) -> None:
        assert self.given is not None
        for part, modules in self.given["attributes"].items():
            known = modules_of(self._parts[part])
            for module, attributes in modules.items():
                values = {name: self._unpacker.get(node) for name, node in attributes.items()}
                vars(known[module]).update(values)

    def _set_generators(self, node: Node) -> None:
        for generator, state in zip(
            self._unpacker.generators, self._unpacker.get(node), strict=True
        ):
            generator.set_state(state)

    # 5. Changes to the pipeline, its blocks and its components during the call.

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        pipe = self.pipe
        blocks, components = pipe._blocks, dict(pipe.components)
        own = {
            name: each
            for name, each in components.items()
            if each is not None
            and (
                name in self.spec.denoisers
                or (isinstance(each, ConfigMixin) and not isinstance(each, torch.nn.Module))
            )
        }
        self._denoisers = {name: own[name] for name in self.spec.denoisers if name in own}
        # Use copies of the schedulers and guiders in this call, because steps change them.
        # Denoisers are not copied: their attributes are reset after the call.
        self._parts = {
            name: each if name in self._denoisers else copy.deepcopy(each)
            for name, each in own.items()
        }
        self._before = {name: snapshot_component(each) for name, each in self._parts.items()}
        with ExitStack() as stack:
            for name, part in self._parts.items():
                setattr(pipe, name, part)
                stack.callback(setattr, pipe, name, own[name])
                if isinstance(part, SchedulerMixin):
                    self._hook_scheduler(part)
            for name, denoiser in self._denoisers.items():
                stack.callback(set_back_component, denoiser, self._before[name])
                forward = self._denoiser(name, denoiser)
                stack.enter_context(patch_methods(denoiser, forward=forward))
            # Hook a copy of the blocks, because all pipelines of a process may share them.
            pipe._blocks = copy.deepcopy(blocks)
            stack.callback(setattr, pipe, "_blocks", blocks)
            self._hook_tree(pipe._blocks)
            if self.given is not None:
                self._restore()
            yield

    def _denoiser(self, name: str, module: Any) -> Callable[..., Any]:
        real = module.forward

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if getattr(module, "is_skeleton", False) and not (
                self._phantom_steps or self._steps == self.end
            ):
                raise ValueError(f"step {self._steps} needs {name}, which is not loaded")
            return self.evaluate(real, *args, **kwargs)

        return forward

    def _hook_tree(self, block: Any) -> None:
        if isinstance(block, ConditionalPipelineBlocks):
            hook(block, self, {"select_block": "select"})
        elif isinstance(block, LoopSequentialPipelineBlocks):
            hook(block, self, {"__call__": "run_block", "loop_step": "run_iteration"})
        elif not block.sub_blocks:
            hook(block, self, {"__call__": "run_block"})
        for each in block.sub_blocks.values():
            self._hook_tree(each)

    def _hook_scheduler(self, scheduler: Any) -> None:
        hook(scheduler, self, {"step": "step", "set_timesteps": "set_timesteps"})
