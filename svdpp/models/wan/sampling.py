"""Owns Wan's sampling parameters: diffusers' defaults, and the rules that a checkpoint adds."""

from __future__ import annotations

from dataclasses import dataclass

from svdpp.config.limits import require
from svdpp.config.sampling import Fit
from svdpp.models.family_sampling import check_frames, check_mode, check_multiple
from svdpp.models.wan.checkpoint import WanCheckpoint


@dataclass(frozen=True, kw_only=True)
class WanSampling:
    """The parameters of diffusers' `WanPipeline.__call__`, with its defaults."""

    num_inference_steps: int = 50
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: int = 16
    """Of the file; the model does not know it."""
    fit: Fit = "stretch"
    decode_chunk_size: None = None
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    """Of the second expert; None: as `guidance_scale`."""
    flow_shift: float | None = None
    """Shift of the noise levels; None: the scheduler config's."""
    max_sequence_length: int = 512


def check_wan(sampling: WanSampling, checkpoint: WanCheckpoint, *, has_image: bool) -> None:
    """Checks what diffusers would round, ignore or refuse late.

    Raises:
        RequestError: it names the nearest values.
    """
    check_mode(checkpoint, has_image=has_image)
    check_frames(sampling.num_frames, checkpoint.vae_scale_factor_temporal)
    for name, value, multiple in zip(
        ("--height", "--width"),
        (sampling.height, sampling.width),
        checkpoint.size_multiple,
        strict=True,
    ):
        check_multiple(name, value, multiple)
    if sampling.guidance_scale_2 is not None:
        require(
            checkpoint.num_experts == 2,
            "--guidance-scale-2 is for models with two experts, such as Wan 2.2 A14B",
        )
        require(
            sampling.guidance_scale > 1,
            "--guidance-scale-2 has no effect: --guidance-scale of 1 or less turns guidance off",
        )
