"""Owns the resolution of a request against its model: defaults become numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.models.checkpoint import Checkpoint, find_checkpoint


def resolve(
    config: PipelineConfig, *, weights: bool = True
) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with its frame count and decode chunk as numbers, and the model's checkpoint.

    Args:
        config: of the run.
        weights: whether the weights must be present; if not, the model's configs are enough.

    Raises:
        ModelError: the model is missing or incomplete.
    """
    is_dummy = config.model.is_dummy
    checkpoint = None if is_dummy else find_checkpoint(config.model, weights=weights)
    sampling = resolver(config.model, checkpoint)(config.sampling)
    return replace(config, sampling=sampling), checkpoint


def resolver(
    model: ModelConfig, checkpoint: Checkpoint | None
) -> Callable[[SamplingConfig], SamplingConfig]:
    """A function that puts the model's own values in place of None in sampling parameters.

    Args:
        model: whose latent shape gives the frame count of the dummy model.
        checkpoint: None for the dummy model.
    """
    if checkpoint is not None:
        return checkpoint.resolve
    frames = model.dummy_latent.shape[2]
    return lambda sampling: sampling.resolved(model_frames=frames)
