"""What is special about Wan: its image inputs, and which of two experts runs a step."""

from __future__ import annotations

from typing import Any

from svdpp.config import WanSampling
from svdpp.config.limits import require
from svdpp.models.engine.configs import Configs, Facts, short_repr
from svdpp.models.engine.others import check_strength


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its inputs, sizes and experts."""
    reason = "is for a first and a last image"
    configs.of("transformer").refuse({"pos_embed_seq_len": reason})
    unit = 2 * configs.of("vae", scale_factor_spatial=8).count("scale_factor_spatial", 64)
    boundary_ratio = _boundary_ratio(configs)
    return {
        "boundary_ratio": boundary_ratio,
        "size_multiple": (unit, unit),
        "unused_parameters": () if boundary_ratio is not None else ("guidance_scale_2",),
        **({"image_use": "optional"} if configs.index.values.get("expand_timesteps") else {}),
    }


def video_facts(configs: Configs) -> Facts:
    """As `facts`, of a model that the pipeline for videos can run."""
    found = facts(configs)
    if "image_use" in found or found["boundary_ratio"] is not None:
        raise configs.index.error("only Wan 2.1 for text makes clips from a video")
    return found


def check_video(checkpoint: Any, sampling: Any) -> None:
    """As `check`, of the steps that run."""
    check_strength(checkpoint, sampling)
    check(checkpoint, sampling)


def check(checkpoint: Any, sampling: WanSampling) -> None:
    """Refuses a scale without effect, and timesteps that diffusers cannot run."""
    require(
        sampling.guidance_scale_2 is None or sampling.guided,
        "--param guidance_scale_2 has no effect: --guidance-scale of 1 or less turns it off",
    )
    if not sampling.from_image:
        return
    # Some are whole numbers: of two equal ones, the pipeline takes the second for the first.
    timesteps = checkpoint.timesteps(sampling).tolist()
    require(
        len(timesteps) == 1 or timesteps[0] != timesteps[1],
        f"the first two of {len(timesteps)} steps have the same timestep, {timesteps[0]}: "
        "diffusers cannot run that",
        "use fewer --steps or a lower --param flow_shift",
    )


def _boundary_ratio(configs: Configs) -> float | None:
    """The ratio, checked against the experts that the checkpoint lists."""
    ratio, has_second = configs.index.values.get("boundary_ratio"), configs.has("transformer_2")
    is_ratio = isinstance(ratio, float) and 0 < ratio < 1
    if is_ratio if has_second else ratio is None:
        return ratio
    state = "there" if has_second else "missing"
    message = f"boundary_ratio is {short_repr(ratio)}, and the expert transformer_2 is {state}"
    raise configs.index.error(message)
