"""Owns the reference of tests in one process: diffusers' pipeline as it ships."""

from __future__ import annotations

import torch

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, Audio, Source
from svdpp.models.checkpoint import find_checkpoint
from svdpp.verification.whole_call import Reference


def latents_and_frames(
    model: ModelConfig, sampling: SamplingConfig, request: ClipRequest, image: Source | None
) -> tuple[list[torch.Tensor], Frames]:
    """Latents after each step, and frames, of the pipeline as it ships."""
    return whole_clip(model, sampling, request, image)[:2]


def whole_clip(
    model: ModelConfig, sampling: SamplingConfig, request: ClipRequest, image: Source | None
) -> tuple[list[torch.Tensor], Frames, Audio | None]:
    """The same and the sound."""
    checkpoint = find_checkpoint(model)
    reference = Reference(checkpoint, model, "cpu")
    return run_reference(reference, checkpoint.resolve(sampling), request, image)


def run_reference(
    reference: Reference,
    sampling: SamplingConfig,
    request: ClipRequest,
    image: Source | None = None,
) -> tuple[list[torch.Tensor], Frames, Audio | None]:
    """Latents after each step, frames and sound."""
    latents: list[torch.Tensor] = []
    _, frames, audio = reference.run(
        request,
        image,
        sampling,
        before_steps=lambda: None,
        after_step=lambda _, tensors: latents.append(tensors[LATENTS].clone()),
    )
    return latents, frames, audio
