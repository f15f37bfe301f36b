"""Owns LTX-Video's sampling parameters: diffusers' defaults, and a checkpoint's rules."""

from __future__ import annotations

from dataclasses import dataclass

from svdpp.config.limits import require
from svdpp.config.sampling import Fit
from svdpp.models.family_sampling import check_frames, check_mode, check_multiple
from svdpp.models.ltx.checkpoint import LtxCheckpoint


@dataclass(frozen=True, kw_only=True)
class LtxSampling:
    """The parameters of diffusers' `LTXPipeline.__call__`, with its defaults."""

    num_inference_steps: int = 50
    height: int = 512
    width: int = 704
    num_frames: int = 161
    fps: int = 25
    """Of the file, and the `frame_rate` on which the model is conditioned."""
    fit: Fit = "stretch"
    decode_chunk_size: None = None
    guidance_scale: float = 3.0
    guidance_rescale: float = 0.0
    decode_timestep: float = 0.0
    """Of the VAE's decoder, if it takes one."""
    decode_noise_scale: float | None = None
    """Share of noise in the decoder's input; None: as `decode_timestep`."""
    max_sequence_length: int = 128


def check_ltx(sampling: LtxSampling, checkpoint: LtxCheckpoint, *, has_image: bool) -> None:
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
    if not checkpoint.timestep_conditioning:
        for name, given in (
            ("--decode-timestep", sampling.decode_timestep != 0.0),
            ("--decode-noise-scale", sampling.decode_noise_scale is not None),
        ):
            require(not given, f"{name} has no effect: the model's VAE takes no timestep")
    require(
        sampling.guidance_rescale == 0.0 or sampling.guidance_scale > 1,
        "--guidance-rescale has no effect: --guidance-scale of 1 or less turns guidance off",
    )
