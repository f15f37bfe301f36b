"""Computation of the shape and dtype that the latent in a packet must have.

Before a packet (the state of a clip) arrives from another rank, the receiving rank computes the
latent's shape and dtype from the pipeline and the sampling parameters. The formulas are
those of `prepare_latents` in each diffusers pipeline. `FamilySpec` has the differences between
families.
"""

from __future__ import annotations

from typing import Any

from svdpp.config import LatentSpec
from svdpp.config.families.spec import FamilySpec
from svdpp.config.pipeline import Dtype
from svdpp.models.checkpoint import Checkpoint

# Names of the attributes in which pipelines store the VAE's compression factors; the first one that
# a pipeline has is used. The spatial factor is the number of pixels for each latent position along
# height and width, such as 8. The temporal factor is the number of frames for each latent position
# along time, such as 4.
_SPATIAL = (
    "canvas_multiple",
    *("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor"),
    "vae_scale_factor",
)
_TEMPORAL = (
    *("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor"),
)
# The only scheduler whose `step` returns the latent in the dtype of the denoiser's output. With
# other schedulers, the latent's dtype does not change.
_CASTING = "FlowMatchEulerDiscreteScheduler"


def latent_spec(
    pipe: Any, checkpoint: Checkpoint, sampling: Any, dtype: Dtype, step: int
) -> LatentSpec:
    """Return shape and dtype that a clip's latent has after a number of steps.

    Args:
        pipe: Loaded pipeline. The components' weights are not needed.
        checkpoint: Checkpoint of the pipeline.
        sampling: Resolved parameters of the clip.
        dtype: Dtype of the denoiser.
        step: Number of finished steps; 0: the latent before the first step.
    """
    spec = checkpoint.spec
    kind = spec.latent_dtype
    if callable(kind):
        kind = kind(sampling, step)
    is_stepped = step > 0 and checkpoint.scheduler_class == _CASTING
    is_cast = {
        "fp32": False,
        "model": True,
        "stepped": is_stepped,
        "stepped from text": is_stepped and not sampling.from_image,
    }
    axes = sampling.latent_axes if step == 0 else sampling.step_axes
    return LatentSpec(
        shape=_shape(pipe, spec, sampling, step, axes),
        dtype=dtype if is_cast[kind] else "fp32",
        dims=axes,
    )


def _shape(pipe: Any, spec: FamilySpec, sampling: Any, step: int, axes: str) -> tuple[int, ...]:
    side, unit = _first(pipe, _SPATIAL), _first(pipe, _TEMPORAL)
    sizes = {
        "B": 1,
        "C": spec.latent_channels(pipe),
        "F": spec.latent_frames(pipe, sampling, (sampling.frames - 1) // unit + 1),
        "H": sampling.height // side,
        "W": sampling.width // side,
    }
    if spec.modular is not None:
        divisor = spec.modular.latent_divisor(sampling, step)
        sizes |= {side: sizes[side] // divisor for side in ("H", "W")}
    if step == 0:
        sizes["F"] += spec.first_frames(sampling)
    appended = spec.appended_positions(pipe, sampling)
    sizes["N"] = sizes["F"] * sizes["H"] * sizes["W"] + appended
    return tuple(sizes[axis] for axis in axes)


def _first(pipe: Any, names: tuple[str, ...]) -> int:
    """Return the value of the first attribute in `names` that a pipeline has; 1 if it has none."""
    return next((int(getattr(pipe, name)) for name in names if hasattr(pipe, name)), 1)
