"""Stages 1 to 8 of diffusers' SVD `__call__`: from an image and a seed to the first latent.

The order of operations, including the two random draws, is that of
`StableVideoDiffusionPipeline.__call__` (diffusers, pipeline_stable_video_diffusion.py). This module
calls its private methods; `tests/test_exactness.py` compares the result with `__call__`.
"""

from __future__ import annotations

import torch
from diffusers import StableVideoDiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from svdpp.config import SvdSampling
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.engine.resize import resize_for_clip

IMAGE_LATENTS = "image_latents"
IMAGE_EMBEDDING = "image_embedding"
ADDED_TIME_IDS = "added_time_ids"

# Tensors that `prepare_image` returns.
_CLIP_PIXELS = "clip_pixels"
_VAE_PIXELS = "vae_pixels"


@torch.no_grad()
def prepare_image(
    pipe: StableVideoDiffusionPipeline, image: Image.Image, sampling: SvdSampling
) -> Tensors:
    """Resizes the image for CLIP and for the VAE: the CPU part of diffusers' stages 3 and 4.

    Args:
        pipe: any pipeline; only its `video_processor` is used.
        image: RGB, upright, any size; stretched for the VAE.
        sampling: gives the height and width for the VAE.

    Returns:
        `clip_pixels` (1, 3, 224, 224) in [0, 1] and `vae_pixels` (1, 3, H, W) in [-1, 1], both
        float32 on the CPU.
    """
    return {
        # As in `_encode_image`: from [-1, 1], in which it is resized, to [0, 1].
        _CLIP_PIXELS: (resize_for_clip(image) + 1.0) / 2.0,
        _VAE_PIXELS: pipe.video_processor.preprocess(
            image, height=sampling.height, width=sampling.width
        ),
    }


@torch.no_grad()
def encode_image(
    pipe: StableVideoDiffusionPipeline,
    prepared: Tensors,
    *,
    seed: int,
    sampling: SvdSampling,
    latent_channels: int,
    device: torch.device,
) -> Tensors:
    """Encodes the image and draws the noise, in diffusers' order of operations.

    Args:
        pipe: with image encoder, feature extractor, VAE encoder and scheduler.
        prepared: the result of `prepare_image`.
        seed: of a CPU generator, because only that draws the same numbers for every device.
        sampling: resolved, so that the number of frames is known.
        latent_channels: channels of the UNet's output, 4 for SVD.
        device: of the returned tensors.

    Returns:
        `latents` (1, F, C, h, w), scaled to the first noise level; `image_latents` (1, C, h, w) and
        `image_embedding` (1, 1, D), both without their unconditional halves, which are zeros; and
        `added_time_ids` (1, 3). All have the image encoder's dtype.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    # Without the unconditional halves of guidance: `SvdDenoiser` adds them.
    embedding = pipe._encode_image(prepared[_CLIP_PIXELS], device, 1, False)
    pixels = prepared[_VAE_PIXELS].to(device)
    # First draw: the augmentation noise, in the pixels' float32.
    noise = randn_tensor(pixels.shape, generator=generator, device=device, dtype=pixels.dtype)
    pixels = pixels + sampling.noise_aug_strength * noise
    image_latents = _encode_vae(pipe, pixels, device).to(embedding.dtype)
    # SVD was conditioned on fps - 1 (Stability-AI/generative-models, simple_video_sample.py).
    added_time_ids = torch.tensor(
        [[sampling.fps - 1, sampling.motion_bucket_id, sampling.noise_aug_strength]],
        dtype=embedding.dtype,
    ).to(device)
    # prepare_latents scales by init_noise_sigma, which depends on the timesteps.
    pipe.scheduler.set_timesteps(sampling.num_inference_steps, device=device)
    # Second draw: the latents, in the image encoder's dtype. `prepare_latents` takes the number of
    # the UNet's input channels, which is twice the latent's.
    latents = pipe.prepare_latents(
        1,
        sampling.frames,
        2 * latent_channels,
        sampling.height,
        sampling.width,
        embedding.dtype,
        device,
        generator,
    )
    return {
        LATENTS: latents,
        IMAGE_LATENTS: image_latents,
        IMAGE_EMBEDDING: embedding,
        ADDED_TIME_IDS: added_time_ids,
    }


def _encode_vae(
    pipe: StableVideoDiffusionPipeline, pixels: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """VAE latents (1, C, h, w) of `pixels`; in float32 if the VAE would overflow in float16."""
    upcast = pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast
    if upcast:
        pipe.vae.to(dtype=torch.float32)
    latents: torch.Tensor = pipe._encode_vae_image(pixels, device, 1, False)
    if upcast:
        pipe.vae.to(dtype=torch.float16)
    return latents
