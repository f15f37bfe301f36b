"""Small pipelines of real ranks with the dummy model, shared by the tests of the API."""

from __future__ import annotations

from typing import Any

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline

#: Far longer than any of these tests takes; a wait of this length is a hang.
HANG_SECONDS = 300


def config(world_size: int = 2, *, steps: int = 4, **changes: Any) -> PipelineConfig:
    """The dummy model over `world_size` ranks, a millisecond a step."""
    model = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8))
    sampling = SvdSampling(num_inference_steps=steps)
    return PipelineConfig(
        **{"world_size": world_size, "model": model, "sampling": sampling, **changes}
    )


def clips(*seeds: int) -> list[ClipRequest]:
    """One clip for each seed."""
    return [ClipRequest(seed=seed) for seed in seeds]


def pids(pipeline: Pipeline) -> list[int]:
    """Process ids of the ranks, by rank."""
    found: list[int] = pipeline._session.supervisor._group.pids  # type: ignore[union-attr]
    return found
