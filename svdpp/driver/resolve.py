"""Owns the resolution of a request against its model: defaults become numbers."""

from __future__ import annotations

from dataclasses import replace

from svdpp.config import PipelineConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint, find_checkpoint


def resolve(
    config: PipelineConfig, *, weights: bool = True
) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with the model's own values in place of None, and the model's checkpoint.

    Args:
        config: of the run.
        weights: whether the weights must be present; if not, the model's configs are enough.

    Raises:
        ModelError: the model is missing or incomplete.
        RequestError: the model cannot run these sampling parameters.
    """
    is_dummy = config.model.is_dummy
    checkpoint = None if is_dummy else find_checkpoint(config.model, weights=weights)
    return resolved(config, checkpoint), checkpoint


def resolved(config: PipelineConfig, checkpoint: Checkpoint | None) -> PipelineConfig:
    """`config` with the model's own values in place of None.

    Args:
        config: of a run.
        checkpoint: of its model; None for the dummy model.

    Raises:
        RequestError: the model cannot run these sampling parameters.
    """
    sampling, boundary = _resolved(config, config.sampling, checkpoint)
    if config.draft is not None and checkpoint is not None and not checkpoint.can_draft:
        raise RequestError(
            f"{checkpoint.label} cannot be drafted: a draft needs the derivative of Euler's "
            "method, and diffusers' loop for this family does not give it",
            "leave --draft out",
        )
    return replace(config, sampling=sampling, expert_boundary=boundary)


def resolved_for(
    sampling: SamplingConfig, config: PipelineConfig, checkpoint: Checkpoint | None
) -> PipelineConfig:
    """The configuration of a clip with its own sampling parameters, in a pipeline of `config`.

    Args:
        sampling: of the clip.
        config: of the pipeline.
        checkpoint: of its model; None for the dummy model.

    Raises:
        RequestError: the model cannot run these sampling parameters.
    """
    return config.with_sampling(*_resolved(config, sampling, checkpoint))


def _resolved(
    config: PipelineConfig, sampling: SamplingConfig, checkpoint: Checkpoint | None
) -> tuple[SamplingConfig, int | None]:
    """`sampling` with numbers in place of None, and the step at which the expert changes."""
    if checkpoint is None:
        frames = config.model.dummy_latent.shape[2]
        return sampling.resolved(model_frames=frames), config.expert_boundary
    sampling = checkpoint.resolve(sampling)
    boundary, num_steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps
    if boundary is not None and not 0 < boundary < num_steps:
        raise RequestError(
            f"the model has two experts, and one of them would do all {num_steps} steps",
            "use more --steps, or another --flow-shift",
        )
    return sampling, boundary
