"""Owns the reference of tests in one process: diffusers' pipeline as it ships."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.models.base import Frames
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.loading import torch_dtype
from svdpp.models.svd.decode import stack_frames


def latents_and_frames(
    model: ModelConfig, sampling: SamplingConfig, image: Image.Image, seed: int
) -> tuple[list[torch.Tensor], Frames]:
    """Latents after each step, and frames, of the pipeline as it ships."""
    checkpoint = find_checkpoint(model)
    sampling = sampling.resolved(model_frames=checkpoint.num_frames)
    pipe = StableVideoDiffusionPipeline.from_pretrained(
        checkpoint.folder, dtype=torch_dtype(model.dtype), variant=model.variant
    )
    pipe.set_progress_bar_config(disable=True)
    if model.memory_opt:
        pipe.unet.enable_forward_chunking()
    latents: list[torch.Tensor] = []

    def keep(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].clone())
        return {}

    images = pipe(
        image,
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        min_guidance_scale=sampling.min_guidance_scale,
        max_guidance_scale=sampling.max_guidance_scale,
        fps=sampling.fps,
        motion_bucket_id=sampling.motion_bucket_id,
        noise_aug_strength=sampling.noise_aug_strength,
        decode_chunk_size=sampling.decode_chunk_size,
        generator=torch.Generator("cpu").manual_seed(seed),
        callback_on_step_end=keep,
    ).frames[0]
    return latents, stack_frames(images)
