"""Stage 10 of diffusers' SVD `__call__`: from the final latent to frames."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.config import SvdSampling
from svdpp.errors import NotFiniteError
from svdpp.models.base import Frames


@torch.no_grad()
def decode_latent(
    pipe: StableVideoDiffusionPipeline, latent: torch.Tensor, sampling: SvdSampling
) -> torch.Tensor:
    """Decodes `latent` (1, F, C, h, w) to frames (F, H, W, 3) uint8 on the same device.

    Decodes in the VAE's dtype, a chunk of frames at a time. Another chunk size gives other bits.
    Chunks never cross clips. The conversion to uint8 is that of diffusers' `VaeImageProcessor`, but
    runs on the device: a quarter of the bytes are copied to the host.

    Raises:
        NotFiniteError: the VAE returned NaN or infinite values.
    """
    # (1, 3, F, H, W), float32
    frames = pipe.decode_latents(latent, sampling.frames, sampling.decode_chunk_size)
    if not bool(torch.isfinite(frames).all()):  # as colours they would silently become black
        raise NotFiniteError("the VAE returned values that are not finite")
    # (F, 3, H, W), 0 to 1
    video = pipe.video_processor.postprocess_video(video=frames, output_type="pt")
    return to_bytes(video[0])


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """(F, 3, H, W) float32 in [0, 1] to (F, H, W, 3) uint8: times 255, rounded half to even."""
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def stack_frames(images: list[Image.Image]) -> Frames:
    """Stacks diffusers' list of PIL images to one array (F, H, W, 3) uint8."""
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
