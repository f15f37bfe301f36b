"""Small pipelines of the dummy model with real ranks, for tests of the Python API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from svdpp.config import ClipRequest, LatentSpec, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.clips import ClipResult
from svdpp.driver.pipeline import Pipeline
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.worker.tensor_files import tensor_sha256

SHAPE = (1, 4, 2, 8, 8)

#: Timeout in seconds, much longer than any test takes.
HANG_SECONDS = 300


def config(world_size: int = 2, *, steps: int = 4, **changes: Any) -> PipelineConfig:
    """Return a configuration of the dummy model, with steps of a millisecond."""
    model = ModelConfig(name="dummy", dummy_latent_shape=SHAPE)
    sampling = SvdSampling(num_inference_steps=steps)
    return PipelineConfig(
        **{"world_size": world_size, "model": model, "sampling": sampling, **changes}
    )


def plain_latent(seed: int, steps: int, total: int) -> torch.Tensor:
    """Return the dummy model's latent after `steps` of `total` steps, computed in this process."""
    model = DummyModel(LatentSpec(shape=SHAPE), total, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        latent = model.encode({}, ClipRequest(seed=seed))[LATENTS]
        latent = model.denoise({LATENTS: latent}, 0, steps, lambda *_: None)[LATENTS]
    torch.set_num_threads(threads)
    return latent


def plain_hashes(steps: int, *seeds: int) -> list[str]:
    """Return the hash of the dummy model's last latent for each seed, computed in this process."""
    return [tensor_sha256(plain_latent(seed, steps, steps)) for seed in seeds]


def hashes(results: Iterable[ClipResult]) -> list[str]:
    """Return the hash of each clip result's last latent."""
    return [result.metadata["latents_sha256"] for result in results]


def clips(*seeds: int) -> list[ClipRequest]:
    """Return a request for a clip of the dummy model for each seed."""
    return [ClipRequest(seed=seed) for seed in seeds]


def pids(pipeline: Pipeline) -> list[int]:
    """Return the process ids of a pipeline's ranks, by rank."""
    return pipeline.rank_pids
