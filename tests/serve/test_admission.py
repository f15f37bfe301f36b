"""What the ranks cannot make is refused before it is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.driver import memory
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.plan.costs import PRESETS
from svdpp.serve.api_errors import as_api_error
from svdpp.serve.clips import Admission

DUMMY = ModelConfig(name="dummy", dummy_sleeps=True)
SAMPLING = SvdSampling(num_frames=2, decode_chunk_size=2)
COSTS = PRESETS["svd-xt-a100"]


@pytest.mark.parametrize(("world_size", "num_steps"), [(1, 1), (4, 2), (7, 25), (7, 1000)])
def test_alternating_ranks_make_clips_of_any_number_of_steps(
    world_size: int, num_steps: int
) -> None:
    config = PipelineConfig(
        world_size=world_size, model=DUMMY, sampling=SAMPLING, split="alternating", costs=COSTS
    )
    Admission(config, None).check(replace(SAMPLING, num_inference_steps=num_steps))


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_a_uniform_split_refuses_steps_that_it_cannot_split(num_steps: int) -> None:
    config = PipelineConfig(world_size=4, model=DUMMY, sampling=SAMPLING)
    with pytest.raises(RequestError):
        Admission(config, None).check(replace(SAMPLING, num_inference_steps=num_steps))


def test_steps_that_need_a_rank_without_weights() -> None:
    sampling = replace(SAMPLING, num_inference_steps=2)
    config = PipelineConfig(
        world_size=4, model=DUMMY, sampling=sampling, split="alternating", costs=COSTS
    )
    with pytest.raises(RequestError, match="started with --steps 2") as caught:
        Admission(config, None).check(replace(sampling, num_inference_steps=25))
    error = as_api_error(caught.value)
    assert error.hint == "use 2 steps"
    assert error.details == {"field": "steps"}
    config = config.with_sampling(replace(sampling, num_inference_steps=25))
    Admission(config, None).check(replace(sampling, num_inference_steps=25))


@pytest.mark.long
def test_a_clip_that_is_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint = resolve(
        PipelineConfig(
            world_size=2,
            model=ModelConfig(name="demo"),
            sampling=SvdSampling(**sampling_defaults("demo")),
            split="alternating",
            costs=COSTS,
        )
    )
    gate = Admission(config, checkpoint)
    large = replace(config.sampling, num_frames=1024, decode_chunk_size=1024)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    with pytest.raises(OutOfMemoryError, match="out of memory before the run"):
        gate.check(large)
    # The ranks hold their own size already, however little is left.
    gate.check(config.sampling)
    gate.check(replace(config.sampling, num_inference_steps=3, num_frames=2, decode_chunk_size=2))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**50)
    gate.check(large)
