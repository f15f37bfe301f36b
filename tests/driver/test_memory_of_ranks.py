"""The estimate of each rank's memory."""

from __future__ import annotations

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver import memory
from svdpp.driver.memory import estimate_ranks


@pytest.mark.long
def test_ranks_hold_what_their_actions_need() -> None:
    sampling = SvdSampling(num_inference_steps=3, height=32, width=32, num_frames=2)
    config = PipelineConfig(world_size=3, model=ModelConfig(name="demo"), sampling=sampling)

    first, between, last = estimate_ranks(config)

    assert memory._RANK_BYTES < between < min(first, last)
