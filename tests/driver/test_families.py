"""Two experts on real ranks: the bits of diffusers' unmodified pipeline, whoever holds which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    PipelineConfig,
    WanSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import ClipWork, resolve
from svdpp.errors import RequestError
from svdpp.media.video import frames_sha256
from svdpp.verification.verify import verify
from svdpp.worker.tensor_store import tensor_sha256
from tests.faults.damage import Damage
from tests.models.diffusers_pipeline import latents_and_frames
from tests.models.tiny_families import save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = [
    ClipRequest(seed=1, prompt="the sea at night"),
    ClipRequest(seed=2, prompt="a cat", negative_prompt="blurred"),
    ClipRequest(seed=3, prompt="the sea at night"),
]


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, its clips, and what diffusers makes of them."""

    config: PipelineConfig
    expected: list[tuple[str, str]]
    """Hashes of the final latent and of the frames, by clip."""


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = save_tiny_wan(tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)
    sampling = WanSampling(
        num_inference_steps=6, height=32, width=32, num_frames=5, max_sequence_length=8
    )
    model = ModelConfig(name=str(folder))
    made = (latents_and_frames(model, sampling, request, None) for request in REQUESTS)
    expected = [(tensor_sha256(latents[-1]), frames_sha256(frames)) for latents, frames in made]
    config = PipelineConfig(world_size=1, model=model, sampling=sampling)
    return Family(config=config, expected=expected)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"split": "uniform", "share_experts": True}),
        (3, {"split": "alternating"}),
    ],
)
def test_ranks_give_the_bits_of_diffusers(
    wan: Family, world_size: int, layout: dict[str, Any]
) -> None:
    with Pipeline(replace(wan.config, world_size=world_size, **layout)) as pipeline:
        results = pipeline.run(REQUESTS)
    found = [(each.metadata["latents_sha256"], each.metadata["frames_sha256"]) for each in results]
    assert found == wan.expected


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "what"), [("ulp", "the latent"), ("state", "the solver's history")]
)
def test_the_proof_names_what_differs_first(wan: Family, fault: Any, what: str) -> None:
    config = replace(wan.config, world_size=3, split="balanced")
    first = verify(config, REQUESTS[:1], fault=Damage(fault, 0, 0)).first_difference
    assert first is not None
    assert (first.rank, first.max_ulp) == (0, 1)
    assert what in str(first)


def test_ranks_without_an_encoder_of_images_refuse_photographs(wan: Family) -> None:
    config, checkpoint = resolve(wan.config)
    assert isinstance(config.sampling, WanSampling)
    asked = replace(REQUESTS[0], sampling=replace(config.sampling, from_image=True))
    with pytest.raises(RequestError, match="started for clips from text alone"):
        ClipWork(config, checkpoint).resolved(asked)
