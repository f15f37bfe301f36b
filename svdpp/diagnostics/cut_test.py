"""The cut test: a tiny copy of a model on a rank for each step, against diffusers' whole call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from svdpp.config import ModelConfig, PipelineConfig
from svdpp.diagnostics.tiny_copy import NUM_STEPS, tiny_sampling, write_tiny_copy
from svdpp.driver.resolve import resolve
from svdpp.media.inputs import example_requests
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.verification.result import VerificationResult
from svdpp.verification.verify import verify


def cut_test(original: Checkpoint, folder: Path, config: PipelineConfig) -> VerificationResult:
    """Compares a tiny copy's clip, cut after every step, with the whole one.

    Args:
        folder: empty; gets the tiny copy.
        config: of one rank; its device, dtype and threads apply.
    """
    write_tiny_copy(original, folder)
    model = ModelConfig(name=str(folder), family=original.family, dtype=config.model.dtype)
    sampling = tiny_sampling(find_checkpoint(model, weights=False), config.sampling)
    config, _ = resolve(
        replace(
            config.alone(),
            world_size=NUM_STEPS,
            model=model,
            sampling=sampling,
            expert_boundary=None,  # of fewer steps
        )
    )
    return verify(config, example_requests(config, 1))
