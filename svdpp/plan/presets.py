"""Owns the cost presets: published measurements, by name, each with its source."""

from __future__ import annotations

from pathlib import Path

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs

_STABILITY = (
    "https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt-1-1-tensorrt, table "
    "'SVD-XT 1.1 (25 frames, 25 steps)': TensorRT, 576x1024; step: UNet x 25 / 25, encode: CLIP + "
    "VAE encoder, decode: VAE decoder; the table does not give transfers, writing or memory"
)
# In fp16: latents 25x4x72x128, image latents 4x72x128, image embedding 1024, three time ids.
_XT_PACKET_BYTES = 2 * (25 * 4 * 72 * 128 + 4 * 72 * 128 + 1024 + 3)


def _published(
    device: str, unet_ms: float, clip_ms: float, vae_encoder_ms: float, vae_decoder_ms: float
) -> Costs:
    """Costs from a column of the table: milliseconds of 25 UNet calls and of each other part."""
    return Costs(
        step_seconds=unet_ms / 25 / 1000,
        encode_seconds=(clip_ms + vae_encoder_ms) / 1000,
        decode_seconds=vae_decoder_ms / 1000,
        packet_bytes=_XT_PACKET_BYTES,
        name="SVD-XT 1.1",
        source=_STABILITY,
        device=device,
    )


PRESETS = {
    "svd-xt-a100": _published("A100 80GB SXM", 27_489.88, 53.20, 65.68, 4_544.12),
    "svd-xt-a100-pcie": _published("A100 80GB PCIe", 30_367.73, 105.41, 66.70, 4_663.63),
    "svd-xt-h100-pcie": _published("H100 80GB PCIe", 19_102.98, 91.32, 49.07, 3_382.62),
}


def find_costs(name_or_path: str) -> Costs:
    """The preset of that name, else the costs file at that path."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).exists():
        raise RequestError(
            f"--costs {name_or_path!r} is neither a file nor a preset",
            f"presets: {', '.join(PRESETS)}",
        )
    return Costs.load(name_or_path)
