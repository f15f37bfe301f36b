"""A rank that sends another packet than its receiver expects is named in the error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, WanSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import MismatchError
from tests.faults.test_ranks import DEMO, DUMMY
from tests.support.damage import Damage
from tests.support.shell import PHOTO
from tests.support.tiny_families import save_tiny_wan

pytestmark = pytest.mark.slow

STEPS = 2
MODELS = ("dummy", "svd", "wan")
#: Length of the last axis of each model's latent.
SIDES = {"dummy": 8, "svd": 8, "wan": 4}
#: By kind of damage: index of the damaged clip, pattern of the message, and check of the error's
#: `details`.
FIRST, SECOND, THIRD = range(3)
CASES: dict[str, tuple[int, str, Callable[[dict[str, Any]], bool]]] = {
    "width": (
        FIRST,
        r"latents: sent \S+x(\d+) fp32, expected \S+x(\d+) fp32",
        lambda d: (
            d["sent_shape"][:-1] == d["expected_shape"][:-1]
            and d["sent_shape"][-1] == d["expected_shape"][-1] - 1
            and d["sent_bytes"] < d["expected_bytes"]
        ),
    ),
    "dtype": (
        FIRST,
        r"latents: sent \S+ bf16, expected \S+ fp32",
        lambda d: (d["sent_dtype"], d["expected_dtype"]) == ("bf16", "fp32"),
    ),
    "missing": (
        FIRST,
        r"tensors: sent \d+, expected (at least )?\d+: \S+ is missing",
        lambda d: len(d["missing"]) == 1 and not d["extra"],
    ),
    "extra": (
        FIRST,
        r"tensors: sent \d+, expected \d+: extra is not expected",
        lambda d: d["extra"] == ["extra"] and d["sent_tensors"] == d["expected_tensors"] + 1,
    ),
    "swapped": (
        SECOND,
        "clip: sent 2, expected 1",
        lambda d: (d["sent_clip"], d["expected_clip"]) == (THIRD, SECOND),
    ),
    "skipped": (
        SECOND,
        "clip: sent 2, expected 1",
        lambda d: (d["sent_clip"], d["expected_clip"]) == (THIRD, SECOND),
    ),
    "twice": (
        FIRST,
        "clip: sent 0, expected 1",
        lambda d: (d["sent_clip"], d["expected_clip"]) == (FIRST, SECOND),
    ),
    "step": (
        FIRST,
        "next step: sent 2, expected 1",
        lambda d: (d["sent_next_step"], d["expected_next_step"]) == (2, 1),
    ),
}


#: Every kind of damage for each model. Most cases of SVD run only in the full test grids, because
#: its packets differ from Wan's only in the shape.
DAMAGED = [
    pytest.param(
        *(model, damage),
        marks=pytest.mark.full if model == "svd" and damage != "width" else (),
    )
    for model in MODELS
    for damage in CASES
]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PipelineConfig]:
    """Function that returns a configuration of a model for two ranks with one step each."""

    def config(model: str) -> PipelineConfig:
        if model == "wan":
            folder = tmp_path_factory.mktemp("wan")
            save_tiny_wan(folder)
            sizes = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 8}
            sampling = WanSampling(num_inference_steps=STEPS, guidance_scale=1.0, **sizes)
            named = ModelConfig(name=str(folder))
            return PipelineConfig(world_size=2, model=named, sampling=sampling)
        base = DUMMY if model == "dummy" else DEMO
        sampling = replace(base.sampling, num_inference_steps=STEPS)
        return replace(base, world_size=2, sampling=sampling)

    return config


@pytest.mark.parametrize(("model", "damage"), DAMAGED)
def test_the_rank_that_sent_is_named(
    config_of: Callable[[str], PipelineConfig], model: str, damage: str
) -> None:
    clip, words, has_details = CASES[damage]
    image = PHOTO if model == "svd" else None
    prompt = "a cat" if model == "wan" else None
    requests = [ClipRequest(seed=seed, image=image, prompt=prompt) for seed in range(3)]
    pipeline = Pipeline(config_of(model), fault=Damage("packet", 0, clip, field=damage))
    with pytest.raises(MismatchError) as caught, pipeline:
        pipeline.run(requests)
    error = caught.value
    print(error)
    assert error.exit_code == 6
    assert re.match(r"rank 0 \(cpu of .*\) sent rank 1 a wrong packet at clip ", error.message)
    assert re.search(f"rank [01]: {words}$", error.message), error.message
    details = error.details
    refused = SECOND if damage == "twice" else clip
    ends = {"rank": 0, "from_rank": 0, "to_rank": 1, "clip": refused, "step": 1}
    assert ends.items() <= details.items(), details
    assert has_details(details), details
    assert "<-- rank 0 sent it" in error.grid


@pytest.mark.parametrize(("damage", "sent", "planned"), [("skipped", None, 2), ("twice", 2, None)])
def test_the_last_packet_is_missed(
    config_of: Callable[[str], PipelineConfig], damage: str, sent: int | None, planned: int | None
) -> None:
    """A missing or additional last packet is reported, although no later packet reveals it."""
    pipeline = Pipeline(config_of("dummy"), fault=Damage("packet", 0, THIRD, field=damage))
    with pytest.raises(MismatchError) as caught, pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    words = f"packets from rank 0 to rank 1: clip: sent {sent}, expected {planned}"
    assert words in caught.value.message
    ends = {"from_rank": 0, "to_rank": 1, "clip": THIRD, "step": 1}
    both = {"sent_clip": sent, "expected_clip": planned}
    assert {**ends, **both}.items() <= caught.value.details.items()
