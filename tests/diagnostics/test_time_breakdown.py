"""The breakdown of a rank's time: separately measured parts that add up to the wall time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.figures import RunFigures
from svdpp.diagnostics.run_recorder import RunRecorder
from svdpp.diagnostics.time_breakdown import overrun, time_breakdown
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, Latency
from svdpp.worker.messages import ActionDone, TransferDone
from tests.faults.processes import allowing_for_others


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
    first, second = time_breakdown(_trace())
    assert (first.wall, first.compute, first.wait, first.transfer) == (10.0, 4.0, 0.0, 0.0)
    assert (first.idle, first.unaccounted) == (6.0, 0.0)
    assert (second.compute, second.wait, second.transfer, second.idle) == (4.5, 3.0, 1.0, 1.0)
    assert second.unaccounted == 0.5  # between the last step and the decode


def test_what_was_not_measured_is_missed() -> None:
    trace = _trace()
    del trace.spans[1]
    assert [each.unaccounted for each in time_breakdown(trace)] == [0.0, 0.5]
    trace.waits.clear()
    trace.spans.append(trace.spans[0]._replace(start=109.0, end=109.5))
    assert time_breakdown(trace)[0].unaccounted == pytest.approx(8.0)


def test_hops_beneath_the_denoising_cost_nothing_and_two_at_once_count_once() -> None:
    trace = _trace()
    transfer = {"clip": 1, "next_step": 2, "num_bytes": 8, "peer": 0, "direction": "recv"}
    for end in (106.0, 105.0, 104.5):  # during the denoise, the same second twice, half of one
        trace.add(1, TransferDone(seconds=1.0, end=end, **transfer))
    assert (time_breakdown(trace)[1].wait, time_breakdown(trace)[1].transfer) == (2.5, 1.5)


def test_a_rank_that_did_nothing_was_idle() -> None:
    trace = Trace(2)
    trace.add(0, ActionDone(action="ENCODE c0 @0", start=1.0, end=3.0, waited=0.0))
    assert [each.idle for each in time_breakdown(trace)] == [0.0, 2.0]
    with pytest.raises(ValueError, match="the trace has no actions"):
        time_breakdown(Trace(1))


def _forecast(makespan: float) -> Forecast:
    return Forecast(
        clips=1,
        makespan=makespan,
        first_clip=makespan,
        seconds_per_clip=makespan,
        jitter=0.0,
        latency=Latency(makespan, makespan, makespan, makespan),
        bubble=0.0,
    )


def test_a_run_near_its_forecast_needs_no_explanation() -> None:
    costs = Costs(step_seconds=0.1)
    assert overrun(_trace(), _forecast(8.4), costs) == ""
    assert overrun(_trace(), _forecast(8.3), costs) != ""


def test_an_overrun_is_explained_by_the_work_that_took_longest() -> None:
    costs = Costs(step_seconds=0.125, encode_seconds=1.0, decode_seconds=1.5)
    assert overrun(_trace(), _forecast(5.0), costs) == (
        "the run took 10.00 s, 2.0 times the forecast: "
        "a step takes 1.5 s on rank 0, and the forecast assumes 0.125 s"
    )
    costs = Costs(step_seconds=1.5, encode_seconds=1.0)
    assert "a decode takes 1.5 s on rank 1" in overrun(_trace(), _forecast(8.0), costs)


def test_an_overrun_without_slower_work_is_waiting() -> None:
    costs = Costs(step_seconds=1.5, encode_seconds=1.0, decode_seconds=1.5)
    assert "2.0 times the forecast: the ranks waited" in overrun(_trace(), _forecast(5.0), costs)


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
    recorder = RunRecorder(pipeline, requests, config.costs)
    pipeline.observe(recorder)
    with pipeline:
        pipeline.run(requests)
    _check_figures(recorder.figures(), pipeline)
    for account in time_breakdown(pipeline.trace):
        parts = account.compute + account.wait + account.transfer + account.idle
        assert parts == pytest.approx(account.wall, rel=allowing_for_others(0.01)), account
        assert min(account.compute, account.wait, account.transfer, account.idle) >= 0


def _check_figures(figures: RunFigures | None, pipeline: Pipeline) -> None:
    """The figures of the same ranks, for `svdpp report`."""
    assert figures is not None
    assert figures.layout == replace(pipeline.config.layout, costs=figures.costs)
    assert figures.clips == 6
    for rank in figures.ranks:
        causes = rank.photograph_wait + rank.packet_wait + rank.send_wait + rank.writer_wait
        assert causes == pytest.approx(rank.wait + rank.transfer, abs=1e-6)
        assert rank.peak_bytes
        assert rank.cpu_seconds is not None
    counts = [(rank.encode.count, rank.decode.count) for rank in figures.ranks]
    assert counts == ([(2, 2)] * 3 if figures.replicas == 3 else [(6, 0), (0, 0), (0, 6)])
    forecast = figures.forecast
    assert forecast.before == pytest.approx(forecast.afterwards, rel=0.3)
    assert forecast.after_first_clip == pytest.approx(figures.makespan, rel=0.3)
