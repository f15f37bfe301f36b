"""Questions to real ranks: their answers, and the end of a rank that fails."""

from __future__ import annotations

from typing import Any

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import rank_probe
from svdpp.diagnostics.memory_estimate import estimate_ranks
from svdpp.driver.resolve import resolve
from svdpp.errors import InputError, RankError
from svdpp.launch.group import RankContext

pytestmark = pytest.mark.long


def _dummy(world_size: int) -> PipelineConfig:
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 8, 64, 64)),
        sampling=SvdSampling(num_inference_steps=world_size),
    )


def _who(context: RankContext, config: PipelineConfig, argument: Any) -> dict[str, Any]:
    return {"rank": context.world.rank, "of": config.world_size, "argument": argument}


def _refuse(context: RankContext, _: PipelineConfig, argument: Any) -> dict[str, Any]:
    if context.world.rank == argument:
        raise InputError("a bad file", "another one")
    return {}


def _break(*_: Any) -> dict[str, Any]:
    raise RuntimeError("a bug")


@pytest.mark.processes
def test_each_rank_answers_for_itself() -> None:
    answers = rank_probe.ask_ranks(_who, _dummy(3), "x")

    assert answers == [{"rank": rank, "of": 3, "argument": "x"} for rank in range(3)]


@pytest.mark.processes
def test_what_a_rank_cannot_do_is_said_in_its_words() -> None:
    with pytest.raises(InputError, match="a bad file") as caught:
        rank_probe.ask_ranks(_refuse, _dummy(2), 1)
    assert caught.value.hint == "another one"
    with pytest.raises(RankError, match="RuntimeError: a bug"):
        rank_probe.ask_ranks(_break, _dummy(1))


@pytest.mark.processes
def test_what_a_step_takes_is_seen_from_outside() -> None:
    config, checkpoint = resolve(_dummy(1))
    wide_bytes = 16 * 8 * 64 * 64 * 4

    seen = rank_probe.measure_work(config, checkpoint, "denoise")

    # At least two tensors of 16 channels are alive at once; the plain Conv3d unfolds one 27 times.
    assert 2 * wide_bytes <= seen < 60 * wide_bytes


@pytest.mark.processes
def test_a_step_done_twice_gives_the_same_bits() -> None:
    assert rank_probe.repeats_bits(*resolve(_dummy(1)))


def test_ranks_hold_what_their_actions_need() -> None:
    sampling = SvdSampling(num_inference_steps=3, height=32, width=32, num_frames=2)
    config = PipelineConfig(world_size=3, model=ModelConfig(name="demo"), sampling=sampling)

    first, between, last = estimate_ranks(config)

    assert between.weight_bytes < first.weight_bytes
    assert between.weight_bytes < last.weight_bytes
    assert between.process_bytes > 100 * 2**20
    assert last.total_bytes == last.weight_bytes + last.activation_bytes + last.process_bytes
