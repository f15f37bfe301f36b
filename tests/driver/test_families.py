"""Wan and LTX-Video on real ranks: the bits of diffusers' unmodified pipelines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from svdpp.config import (
    ClipRequest,
    LtxSampling,
    ModelConfig,
    PipelineConfig,
    WanSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.driver.work import ClipWork
from svdpp.errors import RequestError
from svdpp.media.examples import example_photos
from svdpp.media.image import fit_photo, read_photo
from svdpp.media.video import frames_sha256
from svdpp.verification.verify import compare, run_pipelined, run_sequential
from svdpp.worker.tensor_store import tensor_sha256
from tests.faults.damage import Damage
from tests.models.diffusers_pipeline import latents_and_frames
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
PHOTO = str(example_photos()[0])
WAN = {"num_inference_steps": STEPS, "height": 32, "width": 32, "num_frames": 5}
LTX = {"num_inference_steps": STEPS, "height": 64, "width": 96, "num_frames": 9}
REQUESTS = [
    ClipRequest(seed=1, prompt="the sea at night"),
    ClipRequest(seed=2, prompt="a cat", negative_prompt="blurred"),
    ClipRequest(seed=3, prompt="the sea at night"),
]


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, its clips, and what diffusers makes of them."""

    config: PipelineConfig
    requests: list[ClipRequest]
    expected: list[tuple[str, str]]
    """Hashes of the final latent and of the frames, by clip."""


def _family(folder: Path, sampling: WanSampling | LtxSampling, dtype: Any = "fp32") -> Family:
    photo = PHOTO if sampling.from_image else None
    requests = [replace(request, image=photo) for request in REQUESTS]
    image = _fitted(sampling) if photo else None
    model = ModelConfig(name=str(folder), dtype=dtype)
    expected = []
    for request in requests:
        latents, frames = latents_and_frames(model, sampling, request, image)
        expected.append((tensor_sha256(latents[-1]), frames_sha256(frames)))
    config = PipelineConfig(world_size=1, model=model, sampling=sampling)
    return Family(config=config, requests=requests, expected=expected)


def _fitted(sampling: WanSampling | LtxSampling) -> Image.Image:
    return fit_photo(read_photo(Path(PHOTO))[0], sampling.width, sampling.height, sampling.fit)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = save_tiny_wan(tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)
    return _family(folder, WanSampling(**WAN, max_sequence_length=8))


@pytest.fixture(scope="module")
def wan_from_image(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = save_tiny_wan(
        tmp_path_factory.mktemp("wan"),
        boundary_ratio=0.9,
        image_to_video=True,
        dtype=torch.bfloat16,
    )
    sampling = WanSampling(**WAN, max_sequence_length=8, from_image=True)
    return _family(folder, sampling, "bf16")


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = save_tiny_ltx(tmp_path_factory.mktemp("ltx"))
    return _family(folder, LtxSampling(**LTX, max_sequence_length=8, from_image=True))


MORE = [pytest.mark.long, pytest.mark.full]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        ("wan", 2, {"split": "uniform", "share_experts": True}),
        ("wan", 3, {"split": "dithered"}),
        ("wan_from_image", 4, {"split": "balanced", "replicas": 2}),
        ("ltx", 3, {"split": "dithered"}),
        pytest.param("wan", 1, {}, marks=MORE),
        pytest.param("wan", 2, {"split": "balanced", "replicas": 2}, marks=MORE),
        pytest.param("wan", 4, {"split": "balanced"}, marks=MORE),
        pytest.param("wan_from_image", 3, {"split": "dithered"}, marks=MORE),
        pytest.param("ltx", 2, {"split": "uniform"}, marks=MORE),
    ],
)
def test_ranks_give_the_bits_of_diffusers(
    name: str, world_size: int, layout: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    family: Family = request.getfixturevalue(name)
    with Pipeline(replace(family.config, world_size=world_size, **layout)) as pipeline:
        results = pipeline.run(family.requests)
    found = [(each.metadata["latents_sha256"], each.metadata["frames_sha256"]) for each in results]
    assert found == family.expected


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "what"), [("ulp", "the latent"), ("state", "the solver's history")]
)
def test_the_proof_names_what_differs_first(
    wan: Family, tmp_path: Path, fault: Any, what: str
) -> None:
    config, requests = replace(wan.config, world_size=3, split="balanced"), wan.requests[:1]
    run_pipelined(config, requests, tmp_path, fault=Damage(fault, 0, 0))
    run_sequential(config, requests, tmp_path)
    first = compare(config, len(requests), tmp_path).first_difference
    assert first is not None
    assert (first.rank, first.max_ulp) == (0, 1)
    assert what in str(first)


def test_ranks_hold_one_expert_each(wan: Family) -> None:
    config, _ = resolve(replace(wan.config, world_size=3, split="balanced"))
    assert config.expert_boundary is not None
    held = [sorted(roles.experts) for roles in config.layout.roles]
    assert held[0] == [0]
    assert held[-1] in ([1], [])
    assert all(len(experts) <= 1 for experts in held)
    shared, _ = resolve(replace(wan.config, world_size=2, share_experts=True))
    assert {0, 1} in [set(roles.experts) for roles in shared.layout.roles]


def test_ranks_without_an_encoder_of_images_refuse_photographs(wan: Family) -> None:
    config, checkpoint = resolve(wan.config)
    assert isinstance(config.sampling, WanSampling)
    asked = replace(wan.requests[0], sampling=replace(config.sampling, from_image=True))
    with pytest.raises(RequestError, match="started for clips from text alone"):
        ClipWork(config, checkpoint).resolved(asked)
