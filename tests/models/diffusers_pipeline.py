"""Owns the reference of tests in one process: diffusers' pipeline as it ships."""

from __future__ import annotations

import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.models.base import LATENTS, Frames
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.families import family_of


def latents_and_frames(
    model: ModelConfig, sampling: SamplingConfig, request: ClipRequest, image: Image.Image | None
) -> tuple[list[torch.Tensor], Frames]:
    """Latents after each step, and frames, of the pipeline as it ships."""
    checkpoint = find_checkpoint(model)
    latents: list[torch.Tensor] = []
    _, frames = (
        family_of(checkpoint)
        .load_reference(checkpoint, model, "cpu")
        .run(
            request,
            image,
            checkpoint.resolve(sampling),
            before_steps=lambda: None,
            after_step=lambda _, tensors: latents.append(tensors[LATENTS].clone()),
        )
    )
    return latents, frames
