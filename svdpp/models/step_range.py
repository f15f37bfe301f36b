"""Owns running a range of steps through diffusers' own, unmodified `__call__`.

A rank gives its pipeline a scheduler whose class is a subclass of the real one. The pipeline sees
the timesteps of the range only; the scheduler keeps the full list, as multistep solvers need it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from svdpp.config import TensorSpec
from svdpp.errors import ModelError
from svdpp.models.base import LATENTS, STATE_PREFIX, AfterStep, Tensors
from svdpp.models.family_config import check_scheduler
from svdpp.models.safetensors_header import JsonFile

# 1. What the supported schedulers carry from step to step.


class _State(NamedTuple):
    """State of one class of scheduler, as named tensors. Before the first step there is none."""

    spec: Callable[[Mapping[str, Any], int, TensorSpec], dict[str, TensorSpec]]
    """From the config, the number of steps that have run (1 or more) and the spec of a sample."""
    read: Callable[[Any], Tensors]
    write: Callable[[Any, Tensors], None]


def _no_spec(config: Mapping[str, Any], steps: int, sample: TensorSpec) -> dict[str, TensorSpec]:
    del config, steps, sample
    return {}


def _unipc_spec(config: Mapping[str, Any], steps: int, sample: TensorSpec) -> dict[str, TensorSpec]:
    order = solver_order(config)
    outputs = range(order - min(steps, order), order)
    return {
        **{f"model_outputs.{index}": sample for index in outputs},
        "last_sample": sample,
        "timestep_list": TensorSpec((len(outputs),), "int64"),
        "lower_order_nums": TensorSpec((1,), "int64"),
        "this_order": TensorSpec((1,), "int64"),
    }


def _read_unipc(scheduler: Any) -> Tensors:
    outputs = scheduler.model_outputs
    known = [index for index, output in enumerate(outputs) if output is not None]
    device = scheduler.last_sample.device
    return {
        **{f"model_outputs.{index}": outputs[index] for index in known},
        "last_sample": scheduler.last_sample,
        "timestep_list": torch.stack([scheduler.timestep_list[index] for index in known]),
        "lower_order_nums": torch.tensor([scheduler.lower_order_nums], device=device),
        "this_order": torch.tensor([scheduler.this_order], device=device),
    }


def _write_unipc(scheduler: Any, state: Tensors) -> None:
    order = scheduler.config.solver_order
    outputs = [state.get(f"model_outputs.{index}") for index in range(order)]
    timesteps: list[torch.Tensor | None] = list(state["timestep_list"])
    scheduler.model_outputs = outputs
    scheduler.timestep_list = [None] * (order - len(timesteps)) + timesteps
    scheduler.last_sample = state["last_sample"]
    scheduler.lower_order_nums = int(state["lower_order_nums"].item())
    scheduler.this_order = int(state["this_order"].item())


_DECLARED: Mapping[str, _State] = {
    "FlowMatchEulerDiscreteScheduler": _State(_no_spec, lambda _: {}, lambda _, __: None),
    "UniPCMultistepScheduler": _State(_unipc_spec, _read_unipc, _write_unipc),
}
_CLASSES = {cls.__name__: cls for cls in (FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler)}


def solver_order(config: Mapping[str, Any]) -> int:
    """Number of model outputs that a UniPC scheduler combines; 2 if its config does not say."""
    return int(config.get("solver_order", 2))


def state_spec(
    name: str, config: Mapping[str, Any], next_step: int, sample: TensorSpec
) -> dict[str, TensorSpec]:
    """Name, shape and dtype of each tensor of a scheduler's state after `next_step` steps.

    Args:
        name: of the scheduler's class.
        config: of the scheduler.
        next_step: number of steps that have run.
        sample: the latent as the scheduler's `step` sees it.
    """
    if next_step == 0:
        return {}
    specs = _DECLARED[name].spec(config, next_step, sample)
    return {STATE_PREFIX + key: spec for key, spec in specs.items()}


def read_state(scheduler: Any) -> Tensors:
    """The state of a scheduler that has run one or more steps, as named tensors."""
    tensors = _DECLARED[type(scheduler).__name__].read(scheduler)
    return {STATE_PREFIX + name: tensor for name, tensor in tensors.items()}


def write_state(scheduler: Any, tensors: Tensors) -> None:
    """Restores the state that `read_state` returned; `tensors` may hold other tensors too."""
    state = {
        name.removeprefix(STATE_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE_PREFIX)
    }
    _DECLARED[type(scheduler).__name__].write(scheduler, state)


# 2. A scheduler that shows a range of its timesteps.


def range_scheduler(
    name: str, config: Mapping[str, Any], start: int, end: int, tensors: Tensors | None = None
) -> Any:
    """Creates the scheduler for steps `start` to `end` (exclusive) of one clip.

    Args:
        name: of the scheduler's class.
        config: of the scheduler.
        start: first step.
        end: equal to `start` for a call that only encodes or only decodes.
        tensors: hold the state after `start` steps; None for a call without steps.

    Raises:
        ModelError: the scheduler is not supported, or rejects the config.
    """
    check_scheduler(name, JsonFile("scheduler", config))
    ranged = _range_class(_CLASSES[name])
    try:
        scheduler = ranged.from_config(dict(config))
    except Exception as error:
        raise ModelError(f"the scheduler cannot be created: {error}") from error
    scheduler.first_step, scheduler.end_step = start, end
    scheduler.start_state = tensors if start > 0 and end > start else None
    return scheduler


@functools.cache
def _range_class(real: Any) -> Any:
    """A subclass of the scheduler class `real` that shows only a range of its timesteps."""

    class RangeScheduler(real):  # type: ignore[misc]
        first_step, end_step = 0, None
        start_state: Tensors | None = None
        _shows_all = False

        @property
        def timesteps(self) -> torch.Tensor:
            full: torch.Tensor = self._full_timesteps
            return full if self._shows_all else full[self.first_step : self.end_step]

        @timesteps.setter
        def timesteps(self, full: torch.Tensor) -> None:
            self._full_timesteps = full

        @contextmanager
        def _all_timesteps(self) -> Iterator[None]:
            self._shows_all = True
            try:
                yield
            finally:
                self._shows_all = False

        # Pipelines inspect this signature for `sigmas` and `mu`.
        @functools.wraps(real.set_timesteps)
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            with self._all_timesteps():
                super().set_timesteps(*args, **kwargs)
            self.set_begin_index(0)
            if self.start_state is not None:
                write_state(self, self.start_state)
                self.start_state = None  # frees the packet

        def set_begin_index(self, begin_index: int = 0) -> None:
            super().set_begin_index(self.first_step + begin_index)

        @functools.wraps(real.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            with self._all_timesteps():
                return super().step(*args, **kwargs)

    RangeScheduler.__name__ = real.__name__  # diffusers writes it into the config
    return RangeScheduler


# 3. A call of the pipeline.


def check_pipeline(pipe: Any) -> None:
    """Refuses a pipeline whose result depends on more than the latent and the scheduler's state.

    Raises:
        ModelError: the pipeline has no `callback_on_step_end`, or a component caches between steps
            or acts on a part of the steps.
    """
    name = type(pipe).__name__
    if "callback_on_step_end" not in inspect.signature(type(pipe).__call__).parameters:
        raise ModelError(f"{name} has no callback_on_step_end, so its steps cannot be split")
    for part, component in pipe.components.items():
        if getattr(component, "_cache_config", None) is not None:
            kind = type(component._cache_config).__name__
            raise ModelError(
                f"{part} has the cache {kind}, which keeps state from step to step",
                f"call {part}.disable_cache()",
            )
        if _acts_on_part(component):
            raise ModelError(
                f"{part} ({type(component).__name__}) acts on a part of the steps, which a rank "
                "that runs a range of them cannot tell"
            )


def _acts_on_part(component: Any) -> bool:
    """Whether `component` is a guider of diffusers with a start or stop."""
    is_guider = any(cls.__name__ == "BaseGuidance" for cls in type(component).__mro__)
    return is_guider and (component._start, component._stop) != (0.0, 1.0)


def call_range(
    pipe: Any,
    scheduler: Any,
    arguments: Mapping[str, Any],
    *,
    after_step: AfterStep | None = None,
    output_type: str = "latent",
) -> torch.Tensor:
    """Calls the pipeline for the range of `scheduler`.

    Args:
        pipe: its scheduler is replaced.
        scheduler: from `range_scheduler`.
        arguments: of `__call__`.
        after_step: an exception that it raises ends the call.
        output_type: of `__call__`.

    Returns:
        The latent after the last step as the callback sees it, or the result of the call if there
        is no step in the range.
    """
    pipe.scheduler = scheduler
    latent: torch.Tensor | None = None

    def at_step_end(_: Any, index: int, __: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal latent
        latent = values[LATENTS]
        if after_step is not None:
            after_step(scheduler.first_step + index, latent)
        return {}

    result: torch.Tensor = pipe(
        **arguments, callback_on_step_end=at_step_end, output_type=output_type, return_dict=False
    )[0]
    return result if latent is None else latent


@contextmanager
def replaced(target: Any, **methods: Any) -> Iterator[None]:
    """Replaces methods of this one object, a pipeline or a part of it, while the context lasts."""
    for name, method in methods.items():
        object.__setattr__(target, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(target, name)


def recorder(method: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """A method that calls `method` and appends its result to `results`."""

    @functools.wraps(method)
    def record(*args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    return record
