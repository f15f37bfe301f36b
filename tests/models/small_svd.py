"""Owns a small configuration of the demo model, for tests of real clips."""

from __future__ import annotations

from typing import Any

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults


def small_svd(world_size: int, *, steps: int = 6, **changes: Any) -> PipelineConfig:
    """The demo model over `world_size` ranks, with two frames of 64 x 64."""
    values = {**sampling_defaults("demo"), "height": 64, "width": 64, "num_frames": 2}
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=steps, **values),
        **changes,
    )
