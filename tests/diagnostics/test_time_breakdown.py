"""The breakdown of a rank's time: separately measured parts that add up to the wall time."""

from __future__ import annotations

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.figures import RankFigures, RunFigures
from svdpp.diagnostics.run_recorder import FigureRecorder, of_run
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.plan.costs import Costs
from svdpp.worker.messages import ActionDone, TransferDone
from tests.faults.processes import allowing_for_others


def _parts(trace: Trace) -> list[RankFigures]:
    """The time of each rank; only its trace is recorded."""
    config = PipelineConfig(
        world_size=trace.world_size,
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=6, num_frames=2),
    )
    figures = FigureRecorder(config, lambda _: None, trace=trace).figures()
    assert figures is not None
    return list(figures.ranks)


def _trace() -> Trace:
    """Rank 0 works from 0 to 4; rank 1 waits from 1 to 5, and a packet arrives from 4 to 5."""
    trace = Trace(2)
    trace.add(0, ActionDone(action="ENCODE c0 @0", start=100.0, end=101.0, waited=0.0))
    trace.add(0, ActionDone(action="DENOISE c0 0:2", start=101.0, end=104.0, waited=0.0))
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8}
    trace.add(0, TransferDone(direction="send", peer=1, seconds=1.0, end=105.0, **transfer))
    trace.add(1, TransferDone(direction="recv", peer=0, seconds=1.0, end=105.0, **transfer))
    trace.add(1, ActionDone(action="DENOISE c0 2:4", start=105.0, end=108.0, waited=4.0))
    trace.add(1, ActionDone(action="DECODE c0 @4", start=108.5, end=110.0, waited=0.0))
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
        trace.add(1, TransferDone(seconds=1.0, end=end, **transfer))
    assert (_parts(trace)[1].wait, _parts(trace)[1].transfer) == (2.5, 1.5)


def test_a_rank_that_did_nothing_was_idle() -> None:
    trace = Trace(2)
    trace.add(0, ActionDone(action="ENCODE c0 @0", start=1.0, end=3.0, waited=0.0))
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
    recorder = FigureRecorder(config, of_run(pipeline, requests))
    pipeline.observe(recorder)
    with pipeline:
        pipeline.run(requests)
    _check_figures(recorder.figures(), pipeline)
    for account in _parts(pipeline.trace):
        parts = account.compute + account.wait + account.transfer + account.idle
        assert parts == pytest.approx(account.wall, rel=allowing_for_others(0.01)), account
        assert min(account.compute, account.wait, account.transfer, account.idle) >= 0


def _check_figures(figures: RunFigures | None, pipeline: Pipeline) -> None:
    """The figures of the same ranks, for `svdpp report`."""
    assert figures is not None
    assert figures.clips == 6
    for rank in figures.ranks:
        causes = rank.photograph_wait + rank.packet_wait + rank.send_wait + rank.writer_wait
        assert causes == pytest.approx(rank.wait + rank.transfer, abs=1e-6)
        assert rank.peak_bytes
    counts = [(rank.encode.count, rank.decode.count) for rank in figures.ranks]
    assert counts == ([(2, 2)] * 3 if pipeline.config.replicas == 3 else [(6, 0), (0, 0), (0, 6)])
    assert figures.forecast_seconds == pytest.approx(figures.makespan, rel=0.3)
