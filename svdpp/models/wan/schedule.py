"""Owns which of Wan's two experts runs a step, by arithmetic alone; knows no torch.

The numbers are those of diffusers' schedulers, in the same precision (tests/models/test_wan.py
compares them), so that `svdpp plan` needs no libraries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from svdpp.config import WanSampling
from svdpp.errors import ModelError, RequestError
from svdpp.models.family_config import SchedulerConfig
from svdpp.models.wan.checkpoint import WanCheckpoint


def scheduler_config(checkpoint: WanCheckpoint, sampling: WanSampling) -> SchedulerConfig:
    """The checkpoint's scheduler, with the shift that the user asked for."""
    scheduler = checkpoint.scheduler
    if sampling.flow_shift is None:
        return scheduler
    key = "flow_shift" if scheduler.name == _UNIPC else "shift"
    return SchedulerConfig(
        name=scheduler.name, values={**scheduler.values, key: sampling.flow_shift}
    )


def boundary_step(checkpoint: WanCheckpoint, sampling: WanSampling) -> int | None:
    """Number of steps that the first expert runs; None for a model with one expert.

    A step belongs to the first expert if its timestep is at least `boundary_ratio` of the training
    timesteps (`WanPipeline.__call__`, stage 6).

    Raises:
        ModelError: the scheduler's config has another kind of noise levels.
    """
    if checkpoint.boundary_ratio is None:
        return None
    scheduler = scheduler_config(checkpoint, sampling)
    count = int(scheduler.values.get("num_train_timesteps", 1000))
    timesteps: Callable[[Mapping[str, Any], int, int], Sequence[float]]
    timesteps = _unipc_timesteps if scheduler.name == _UNIPC else _euler_timesteps
    special = _special(scheduler)
    if special is not None:
        raise ModelError(
            f"scheduler/scheduler_config.json: {special} is {scheduler.values.get(special)}, which "
            "is not supported for a model with two experts"
        )
    boundary = _float32(checkpoint.boundary_ratio * count)
    steps = timesteps(scheduler.values, count, sampling.num_inference_steps)
    return sum(step >= boundary for step in steps)


def check_first_timesteps(checkpoint: WanCheckpoint, sampling: WanSampling) -> None:
    """Refuses parameters for which diffusers' image-to-video pipeline fails.

    UniPC's timesteps are whole numbers. If the first two are equal, the pipeline, which does not
    say where it begins, takes the second for the first.

    Raises:
        RequestError: the first two timesteps are equal.
    """
    scheduler = scheduler_config(checkpoint, sampling)
    if not sampling.from_image or scheduler.name != _UNIPC or _special(scheduler) is not None:
        return
    count = int(scheduler.values.get("num_train_timesteps", 1000))
    first, *others = _unipc_timesteps(scheduler.values, count, sampling.num_inference_steps)
    if others and others[0] == first:
        raise RequestError(
            f"the first two of {sampling.num_inference_steps} steps have the same timestep, "
            f"{first}: diffusers cannot run that",
            "use fewer --steps or a lower --flow-shift",
        )


def _special(scheduler: SchedulerConfig) -> str | None:
    """The key of the config that gives the scheduler another kind of noise levels."""
    if scheduler.name == _UNIPC and not scheduler.values.get("use_flow_sigmas"):
        return "use_flow_sigmas"
    return next((key for key in _SPECIAL if scheduler.values.get(key)), None)


def _unipc_timesteps(config: Mapping[str, Any], count: int, steps: int) -> list[int]:
    """As `UniPCMultistepScheduler.set_timesteps` with flow sigmas: float64, cut to integers."""
    shift = config.get("flow_shift", 1.0)
    sigmas = [_shifted(sigma, shift) for sigma in _linspace(1, 1 / count, steps + 1)[:-1]]
    if abs(sigmas[0] - 1) < _EPSILON:
        sigmas[0] -= _EPSILON
    return [int(sigma * count) for sigma in sigmas]


def _euler_timesteps(config: Mapping[str, Any], count: int, steps: int) -> list[float]:
    """As `FlowMatchEulerDiscreteScheduler`, whose constructor computes in float32."""
    shift = config.get("shift", 1.0)
    first, last = (_shifted32(_float32(each / count), shift) for each in (count, 1))
    sigmas = [_shifted(t / count, shift) for t in _linspace(first * count, last * count, steps)]
    return [_float32(_float32(sigma) * count) for sigma in sigmas]


def _linspace(start: float, stop: float, num: int) -> list[float]:
    """As `numpy.linspace`."""
    if num == 1:
        return [start]
    step = (stop - start) / (num - 1)
    return [index * step + start for index in range(num - 1)] + [stop]


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _shifted32(sigma: float, shift: float) -> float:
    above = _float32(_float32(shift) * sigma)
    below = _float32(1 + _float32(_float32(shift - 1) * sigma))
    return _float32(above / below)


def _float32(value: float) -> float:
    """`value` rounded to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


_UNIPC = "UniPCMultistepScheduler"
_EPSILON = 1e-6
_SPECIAL = ("use_karras_sigmas", "use_exponential_sigmas", "shift_terminal")
