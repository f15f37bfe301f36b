"""The figures of a run: sums of its events, and parts of time that add up to the wall time."""

from __future__ import annotations

import json

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.figures import (
    RankFigures,
    RunFigures,
    figures_of_run,
    measured_figures,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.plan.costs import Costs
from svdpp.worker.messages import ActionDone, ClipDone, Joined, StepDone, TransferDone
from tests.faults.processes import allowing_for_others


def _parts(trace: Trace) -> list[RankFigures]:
    """The time of each rank; only its trace is recorded."""
    config = PipelineConfig(
        world_size=trace.world_size,
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=6, num_frames=2),
    )
    figures = measured_figures(trace, config)
    assert figures is not None
    return list(figures.ranks)


def _run(*clips: int, of: int, last_clips: int = 1000) -> RunFigures | None:
    """The figures after `clips` of a run `of` so many: each waits, and computes for 0.5 s."""
    config = PipelineConfig(
        world_size=1,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=2, num_frames=2),
    )
    pipeline = Pipeline(config, trace_clips=last_clips)
    trace = pipeline.trace
    trace(0, Joined(device="cpu", load_seconds=0.5))
    for clip in clips:
        for step in range(2):
            trace(0, StepDone(clip=clip, step=step, seconds=0.25))
        times = {"start": clip + 0.2, "end": clip + 0.7, "waited": 0.2}
        trace(0, ActionDone(action=f"DENOISE c{clip} 0:2", waits={"image": 0.2}, **times))
        trace(0, ClipDone(clip=clip, metadata={}, write_seconds=0.1 * (clip + 1)))
    return figures_of_run(pipeline, [ClipRequest(seed=seed) for seed in range(of)])


def test_figures_are_sums_of_the_events() -> None:
    figures = _run(0, 1, 2, of=3)
    assert figures is not None
    (rank,) = figures.ranks
    assert (rank.device, rank.load_seconds) == ("cpu", 0.5)
    assert (figures.clips, rank.step.count, rank.step.mean_seconds) == (3, 6, 0.25)
    assert rank.compute == pytest.approx(1.5)
    assert rank.image_wait == pytest.approx(0.6)
    assert (rank.write.count, rank.write.mean_seconds) == (3, pytest.approx(0.2))
    assert figures.forecast_seconds == pytest.approx(1.5)


def test_a_long_run_leaves_the_figures_of_its_last_clips() -> None:
    figures = _run(*range(20), of=20, last_clips=5)
    assert figures is not None
    assert (figures.clips, figures.ranks[0].step.count) == (5, 10)
    assert figures.ranks[0].image_wait == pytest.approx(1.0)  # of the same clips
    assert figures.forecast_seconds == pytest.approx(2.5)
    assert len(json.dumps(figures.to_json())) < 10_000


def test_a_run_that_fails_has_figures_if_it_made_a_step() -> None:
    assert _run(of=3) is None
    figures = _run(0, of=3)
    assert figures is not None
    assert (figures.clips, figures.forecast_seconds) == (1, None)  # not all clips were made


def _trace() -> Trace:
    """Rank 0 works from 0 to 4; rank 1 waits from 1 to 5, and a packet arrives from 4 to 5."""
    trace = Trace(2)
    trace(0, ActionDone(action="ENCODE c0 @0", start=100.0, end=101.0, waited=0.0))
    trace(0, ActionDone(action="DENOISE c0 0:2", start=101.0, end=104.0, waited=0.0))
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8}
    trace(0, TransferDone(direction="send", peer=1, seconds=1.0, end=105.0, **transfer))
    trace(1, TransferDone(direction="recv", peer=0, seconds=1.0, end=105.0, **transfer))
    trace(1, ActionDone(action="DENOISE c0 2:4", start=105.0, end=108.0, waited=4.0))
    trace(1, ActionDone(action="DECODE c0 @4", start=108.5, end=110.0, waited=0.0))
    return trace


def test_every_part_is_measured_for_itself() -> None:
    first, second = _parts(_trace())
    assert (first.wall, first.compute, first.wait, first.transfer) == (10.0, 4.0, 0.0, 0.0)
    assert (first.idle, first.unaccounted) == (6.0, 0.0)
    assert (second.compute, second.wait, second.transfer, second.idle) == (4.5, 3.0, 1.0, 1.0)
    assert second.unaccounted == 0.5  # between the last step and the decode


def test_what_was_not_measured_is_missed() -> None:
    trace = _trace()
    del trace.spans[1]
    assert [each.unaccounted for each in _parts(trace)] == [0.0, 0.5]
    trace.waits.clear()
    trace.spans.append(trace.spans[0]._replace(start=109.0, end=109.5))
    assert _parts(trace)[0].unaccounted == pytest.approx(8.0)


def test_hops_beneath_the_denoising_cost_nothing_and_two_at_once_count_once() -> None:
    trace = _trace()
    transfer = {"clip": 1, "next_step": 2, "num_bytes": 8, "peer": 0, "direction": "recv"}
    for end in (106.0, 105.0, 104.5):  # during the denoise, the same second twice, half of one
        trace(1, TransferDone(seconds=1.0, end=end, **transfer))
    assert (_parts(trace)[1].wait, _parts(trace)[1].transfer) == (2.5, 1.5)


def test_a_rank_that_did_nothing_was_idle() -> None:
    trace = Trace(2)
    trace(0, ActionDone(action="ENCODE c0 @0", start=1.0, end=3.0, waited=0.0))
    assert [each.idle for each in _parts(trace)] == [0.0, 2.0]


@pytest.mark.timing
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"replicas": 3}, marks=pytest.mark.long)], ids=("replica", "apart")
)
def test_the_parts_of_real_ranks_add_up(layout: dict[str, int]) -> None:
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8), dummy_sleeps=True),
        sampling=SvdSampling(num_inference_steps=6),
        costs=Costs(step_seconds=0.1, encode_seconds=0.1, decode_seconds=0.2),
        **layout,  # type: ignore[arg-type]
    )
    requests = [ClipRequest(seed=seed) for seed in range(6)]
    pipeline = Pipeline(config)
    with pipeline:
        pipeline.run(requests)
    _check_figures(figures_of_run(pipeline, requests), pipeline)
    for account in _parts(pipeline.trace):
        parts = account.compute + account.wait + account.transfer + account.idle
        assert parts == pytest.approx(account.wall, rel=allowing_for_others(0.01)), account
        assert min(account.compute, account.wait, account.transfer, account.idle) >= 0


def _check_figures(figures: RunFigures | None, pipeline: Pipeline) -> None:
    """The figures of the same ranks, for `svdpp report`."""
    assert figures is not None
    assert figures.clips == 6
    for rank in figures.ranks:
        causes = rank.image_wait + rank.packet_wait + rank.send_wait + rank.writer_wait
        assert causes == pytest.approx(rank.wait + rank.transfer, abs=1e-6)
        assert rank.peak_bytes
    counts = [(rank.encode.count, rank.decode.count) for rank in figures.ranks]
    assert counts == ([(2, 2)] * 3 if pipeline.config.replicas == 3 else [(6, 0), (0, 0), (0, 6)])
    assert figures.forecast_seconds == pytest.approx(figures.makespan, rel=0.3)
