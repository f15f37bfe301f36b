"""What is special about Wan: its image inputs, and which of two experts runs a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from svdpp.config import WanSampling
from svdpp.config.limits import require
from svdpp.errors import RequestError
from svdpp.models.engine.configs import Configs, Facts, JsonFile, short_repr
from svdpp.models.engine.others import all_steps, check_strength


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its inputs, sizes and experts."""
    vae = configs.of("vae", z_dim=16, scale_factor_spatial=8)
    transformer = configs.of("transformer", patch_size=[1, 2, 2], in_channels=16)
    transformer.refuse({"pos_embed_seq_len": "is for a first and a last image"})
    JsonFile("scheduler/scheduler_config.json", configs.scheduler.values).refuse(_UNSUPPORTED)
    expand = bool(configs.index.values.get("expand_timesteps"))
    takes_image = _takes_image(transformer, vae.count("z_dim", 1024), expand)
    transformer.require("patch_size", [1, 2, 2], "as in the published Wan")
    unit, boundary_ratio = 2 * vae.count("scale_factor_spatial", 64), _boundary_ratio(configs)
    return {
        "boundary_ratio": boundary_ratio,
        "size_multiple": (unit, unit),
        "image_use": "optional" if expand else "needed" if takes_image else "refused",
        "unused_parameters": () if boundary_ratio is not None else ("guidance_scale_2",),
    }


def vace_facts(configs: Configs) -> Facts:
    """As `facts`; the image is a reference, not a part of the latent."""
    return {**facts(configs), "image_use": "optional"}


def video_facts(configs: Configs) -> Facts:
    """As `facts`, of a model that the pipeline for videos can run."""
    found = facts(configs)
    if found["image_use"] != "refused" or found["boundary_ratio"] is not None:
        raise configs.index.error("only Wan 2.1 for text makes clips from a video")
    return {**found, "image_use": "needed"}


def animate_facts(configs: Configs) -> Facts:
    """Of Wan Animate, whose transformer also has an encoder of faces."""
    transformer = configs.of("transformer", patch_size=[1, 2, 2], in_channels=36)
    transformer.require("patch_size", [1, 2, 2], "as in the published Wan")
    return {"unused_parameters": ("guidance_scale_2",)}


def check_animate(checkpoint: Any, sampling: WanSampling) -> None:
    """Refuses more frames than one segment has.

    The pipeline decodes a segment to begin the next one, which no rank with steps alone can do.
    """
    _check_second_scale(checkpoint, sampling)
    frames = sampling.num_frames
    require(5 <= frames <= 77, f"--frames must be 5 to 77, one segment of the model, got {frames}")


def check_video(checkpoint: Any, sampling: Any) -> None:
    """As `check`, of the steps that run."""
    check_strength(checkpoint, sampling)
    _check_second_scale(checkpoint, sampling)
    every = checkpoint.timesteps(replace(sampling, **all_steps(sampling))).tolist()
    _check_first_timesteps(every[-sampling.num_inference_steps :])


def check(checkpoint: Any, sampling: WanSampling) -> None:
    """Refuses parameters that have no effect, or that diffusers cannot run."""
    _check_second_scale(checkpoint, sampling)
    if sampling.from_image:
        _check_first_timesteps(checkpoint.timesteps(sampling).tolist())


def _check_second_scale(checkpoint: Any, sampling: WanSampling) -> None:
    if sampling.guidance_scale_2 is not None:
        require(
            checkpoint.boundary_ratio is not None,
            "--param guidance_scale_2 is for models with two experts, such as Wan 2.2 A14B",
        )
        require(
            sampling.guided,
            "--param guidance_scale_2 has no effect: --guidance-scale of 1 or less turns it off",
        )


def _check_first_timesteps(timesteps: list[float]) -> None:
    """Some are whole numbers: of two equal ones, the pipeline takes the second for the first."""
    if len(timesteps) > 1 and timesteps[0] == timesteps[1]:
        raise RequestError(
            f"the first two of {len(timesteps)} steps have the same timestep, "
            f"{timesteps[0]}: diffusers cannot run that",
            "use fewer --steps or a lower --param flow_shift",
        )


def _boundary_ratio(configs: Configs) -> float | None:
    """The ratio, checked against the experts that the checkpoint lists."""
    ratio, has_second = configs.index.values.get("boundary_ratio"), configs.has("transformer_2")
    if has_second != (ratio is not None):
        state = "there" if has_second else "missing"
        message = f"boundary_ratio is {short_repr(ratio)}, but the expert transformer_2 is {state}"
        raise configs.index.error(message)
    if ratio is not None and not (isinstance(ratio, float) and 0 < ratio < 1):
        message = f"boundary_ratio is {short_repr(ratio)}, not a number between 0 and 1"
        raise configs.index.error(message)
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


_UNSUPPORTED = {
    "use_dynamic_shifting": "needs a value that Wan's pipeline does not give",
    "invert_sigmas": "reverses the order of the noise levels",
}
