"""What is special about Wan: its image inputs, and which of two experts runs a step.

The experts' boundary is arithmetic alone, so that `svdpp plan` needs no libraries. Its numbers are
those of diffusers' schedulers, in the same precision (tests/models/test_wan.py compares them).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from svdpp.config import WanSampling
from svdpp.config.limits import require
from svdpp.errors import ModelError, RequestError
from svdpp.models.engine.configs import Configs, Facts, SchedulerConfig
from svdpp.models.json_file import JsonFile, short_repr


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its inputs, sizes and experts.

    Raises:
        ModelError: a config has unsupported values, or does not fit the others.
    """
    vae = configs.of("vae", z_dim=16, scale_factor_spatial=8)
    transformer = configs.of("transformer", **_TRANSFORMER)
    text_dim = configs.of("text_encoder").count("d_model", 2**18)
    transformer.require("text_dim", text_dim, "the text encoder's d_model")
    transformer.refuse({"pos_embed_seq_len": "is for a first and a last image"})
    scheduler = JsonFile("scheduler/scheduler_config.json", configs.scheduler.values)
    scheduler.refuse(_UNSUPPORTED)
    expand = bool(configs.index.values.get("expand_timesteps"))
    takes_image = _takes_image(transformer, vae.count("z_dim", 1024), expand)
    if configs.has("image_encoder") != (transformer.values["image_dim"] is not None):
        message = "the transformer's image_dim and the image encoder do not fit"
        raise configs.index.error(message)
    patch = transformer.counts("patch_size", 16)
    if len(patch) != 3:
        raise transformer.error(f"patch_size is {patch}, not three integers")
    factor = vae.count("scale_factor_spatial", 64)
    boundary_ratio = _boundary_ratio(configs)
    if boundary_ratio is not None:
        second = configs.of("transformer_2", **_TRANSFORMER)
        for key in ("in_channels", "out_channels", "patch_size", "text_dim", "image_dim"):
            second.require(key, transformer.values[key], "as in the transformer")
    return {
        "boundary_ratio": boundary_ratio,
        "size_multiple": (factor * patch[1], factor * patch[2]),
        "image_use": "optional" if expand else "needed" if takes_image else "refused",
        "unused_parameters": () if boundary_ratio is not None else ("guidance_scale_2",),
    }


def vace_facts(configs: Configs) -> Facts:
    """As `facts`; the image is a reference, not a part of the latent."""
    return {**facts(configs), "image_use": "optional"}


def check(checkpoint: Any, sampling: WanSampling) -> None:
    """Refuses parameters that have no effect, or that diffusers cannot run."""
    if sampling.guidance_scale_2 is not None:
        require(
            checkpoint.boundary_ratio is not None,
            "--param guidance_scale_2 is for models with two experts, such as Wan 2.2 A14B",
        )
        require(
            sampling.guided,
            "--param guidance_scale_2 has no effect: --guidance-scale of 1 or less turns it off",
        )
    check_first_timesteps(checkpoint.scheduler, sampling)


def _boundary_ratio(configs: Configs) -> float | None:
    """The ratio, checked against the experts that the checkpoint lists."""
    index = configs.index
    ratio, has_second = index.values.get("boundary_ratio"), configs.has("transformer_2")
    if ratio is None and not has_second:
        return None
    if ratio is None:
        raise index.error("there is an expert transformer_2, but no boundary_ratio")
    if not (isinstance(ratio, float) and 0 < ratio < 1):
        raise index.error(f"boundary_ratio is {short_repr(ratio)}, not a number between 0 and 1")
    if not has_second:
        raise index.error(f"boundary_ratio is {ratio}, but the expert transformer_2 is missing")
    return ratio


def _takes_image(transformer: JsonFile, z_dim: int, expand_timesteps: bool) -> bool:
    """Whether the transformer's input holds an image and its mask beside the latent."""
    channels = transformer.count("in_channels", 65536)
    # One mask per frame of a latent frame, 4, and the image's latents (`prepare_latents`).
    with_image = 2 * z_dim + 4
    if channels == z_dim or (channels == with_image and not expand_timesteps):
        return channels == with_image
    expected = f"{z_dim}" if expand_timesteps else f"{z_dim} or {with_image}"
    raise transformer.error(f"in_channels is {channels}, not {expected}")


def boundary_step(scheduler: SchedulerConfig, boundary_ratio: float, num_steps: int) -> int:
    """Number of steps that the first expert runs.

    A step belongs to the first expert if its timestep is at least `boundary_ratio` of the training
    timesteps (`WanPipeline.__call__`, stage 6).

    Raises:
        ModelError: the scheduler's config has another kind of noise levels.
    """
    count = int(scheduler.values.get("num_train_timesteps", 1000))
    timesteps: Callable[[Mapping[str, Any], int, int], Sequence[float]]
    timesteps = _unipc_timesteps if scheduler.name == _UNIPC else _euler_timesteps
    special = _special(scheduler)
    if special is not None:
        raise ModelError(
            f"scheduler/scheduler_config.json: {special} is {scheduler.values.get(special)}, which "
            "is not supported for a model with two experts"
        )
    boundary = _float32(boundary_ratio * count)
    steps = timesteps(scheduler.values, count, num_steps)
    return sum(step >= boundary for step in steps)


def check_first_timesteps(scheduler: SchedulerConfig, sampling: WanSampling) -> None:
    """Refuses parameters for which diffusers' image-to-video pipeline fails.

    UniPC's timesteps are whole numbers. If the first two are equal, the pipeline, which does not
    say where it begins, takes the second for the first.

    Raises:
        RequestError: the first two timesteps are equal.
    """
    scheduler = scheduler.shifted(sampling.flow_shift)
    if not sampling.from_image or scheduler.name != _UNIPC or _special(scheduler) is not None:
        return
    count = int(scheduler.values.get("num_train_timesteps", 1000))
    first, *others = _unipc_timesteps(scheduler.values, count, sampling.num_inference_steps)
    if others and others[0] == first:
        raise RequestError(
            f"the first two of {sampling.num_inference_steps} steps have the same timestep, "
            f"{first}: diffusers cannot run that",
            "use fewer --steps or a lower --param flow_shift",
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
_UNSUPPORTED = {
    "use_dynamic_shifting": "needs a value that Wan's pipeline does not give",
    "invert_sigmas": "reverses the order of the noise levels",
}
# Defaults of diffusers' class, for keys that older files lack.
_TRANSFORMER: Mapping[str, Any] = {
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "image_dim": None,
}
