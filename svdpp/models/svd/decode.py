"""Owns stage 10 of diffusers' SVD `__call__`: from the final latent to frames."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.config import SamplingConfig
from svdpp.errors import NotFiniteError
from svdpp.models.base import Frames


@torch.no_grad()
def decode_latent(
    pipe: StableVideoDiffusionPipeline, latent: torch.Tensor, sampling: SamplingConfig
) -> Frames:
    """Frames of `latent` (1, F, C, h, w), decoded in the VAE's dtype, a chunk of frames at a time.

    The chunk size is part of the result: another one changes bits, and chunks never cross clips.
    """
    frames = pipe.decode_latents(latent, sampling.frames, sampling.decode_chunk_size)
    if not bool(torch.isfinite(frames).all()):  # as colours they would be black, without a word
        raise NotFiniteError("the VAE decoded numbers that are not finite")
    images = pipe.video_processor.postprocess_video(video=frames, output_type="pil")[0]
    return stack_frames(images)


def stack_frames(images: list[Image.Image]) -> Frames:
    """diffusers' list of PIL images as one array, (F, H, W, 3) uint8."""
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
