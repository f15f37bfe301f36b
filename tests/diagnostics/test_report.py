"""Metrics of a run, which add up; bottleneck and advice of its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.config.cost_files import read_costs
from svdpp.diagnostics.report import read_report
from svdpp.diagnostics.run_metrics import (
    RankRunMetrics,
    RunMetrics,
    WorkMetrics,
    collect_run_metrics,
    metrics_of_pipeline,
    parse_run_metrics,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.errors import InputError, RequestError
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import forecast_layout
from svdpp.plan.layout import Layout
from svdpp.worker.messages import ActionDone, ClipDone, Joined, StepDone, TransferDone
from tests.support.made_up_runs import EVEN, delayed, leave, replayed, with_rank
from tests.support.processes import allowing_for_others
from tests.support.shell import parsed


def _rank_metrics(trace: Trace) -> tuple[RankRunMetrics, ...]:
    """Return the metrics of each rank in a run, computed only from a trace."""
    config = PipelineConfig(
        world_size=trace.world_size,
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=6, num_frames=2),
    )
    metrics = collect_run_metrics(trace, config)
    assert metrics is not None
    return metrics.ranks


def _unfinished_run(*clips: int, of: int, last_clips: int = 1000) -> RunMetrics | None:
    """Return the metrics of a run on one rank, when `clips` of its `of` clips are made.

    For each clip, the rank waits for 0.2 s and computes for 0.5 s. `last_clips` is how many clips
    the trace keeps.
    """
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
    return metrics_of_pipeline(pipeline, [ClipRequest(seed=seed) for seed in range(of)])


def test_figures_are_sums_of_the_events() -> None:
    metrics = _unfinished_run(0, 1, 2, of=3)
    assert metrics is not None
    (rank,) = metrics.ranks
    assert (rank.device, rank.load_seconds) == ("cpu", 0.5)
    assert (metrics.clips, rank.step.count, rank.step.mean_seconds) == (3, 6, 0.25)
    assert rank.compute == pytest.approx(1.5)
    assert rank.image_wait == pytest.approx(0.6)
    assert (rank.write.count, rank.write.mean_seconds) == (3, pytest.approx(0.2))
    assert metrics.forecast_seconds == pytest.approx(1.5)


def test_a_long_run_leaves_the_figures_of_its_last_clips() -> None:
    metrics = _unfinished_run(*range(20), of=20, last_clips=5)
    assert metrics is not None
    assert (metrics.clips, metrics.ranks[0].step.count) == (5, 10)
    assert metrics.ranks[0].image_wait == pytest.approx(1.0)  # 0.2 s for each of five clips
    assert metrics.forecast_seconds == pytest.approx(2.5)
    assert len(json.dumps(metrics.to_json())) < 10_000


def test_a_run_that_fails_has_figures_if_it_made_a_step() -> None:
    assert _unfinished_run(of=3) is None
    metrics = _unfinished_run(0, of=3)
    assert metrics is not None
    assert (metrics.clips, metrics.forecast_seconds) == (1, None)  # clips are missing


def _trace() -> Trace:
    """Return a trace of one clip on two ranks, from time 100 s.

    Rank 0 works from 0 s to 4 s after the start. Rank 1 waits from 1 s to 5 s; a packet arrives
    from 4 s to 5 s.
    """
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
    first, second = _rank_metrics(_trace())
    assert (first.wall, first.compute, first.wait, first.transfer) == (10.0, 4.0, 0.0, 0.0)
    assert (first.idle, first.unaccounted) == (6.0, 0.0)
    assert (second.compute, second.wait, second.transfer, second.idle) == (4.5, 3.0, 1.0, 1.0)
    assert second.unaccounted == 0.5  # the time between the last step and the decode


def test_hops_beneath_the_denoising_cost_nothing_and_two_at_once_count_once() -> None:
    trace = _trace()
    transfer = {"clip": 1, "next_step": 2, "num_bytes": 8, "peer": 0, "direction": "recv"}
    # The three transfers take place during the denoise, together with the transfer of `_trace`, and
    # half a second before the latter.
    for end in (106.0, 105.0, 104.5):
        trace(1, TransferDone(seconds=1.0, end=end, **transfer))
    assert (_rank_metrics(trace)[1].wait, _rank_metrics(trace)[1].transfer) == (2.5, 1.5)


@pytest.mark.timing
@pytest.mark.slow
def test_the_parts_of_real_ranks_add_up() -> None:
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8), dummy_sleeps=True),
        sampling=SvdSampling(num_inference_steps=6),
        costs=CostModel(step_seconds=0.1, encode_seconds=0.1, decode_seconds=0.2),
    )
    requests = [ClipRequest(seed=seed) for seed in range(6)]
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    metrics = metrics_of_pipeline(pipeline, requests)
    assert metrics is not None
    assert metrics.clips == 6
    assert metrics.forecast_seconds == pytest.approx(metrics.makespan, rel=0.3)
    counts = [(rank.encode.count, rank.decode.count) for rank in metrics.ranks]
    assert counts == [(6, 0), (0, 0), (0, 6)]
    for rank in metrics.ranks:
        assert rank.peak_bytes
        causes = sum(pipeline.trace.rank_metrics[rank.rank].waits.values())
        assert causes == pytest.approx(rank.wait + rank.transfer, abs=1e-6)
        parts = rank.compute, rank.wait, rank.transfer, rank.idle
        assert sum(parts) == pytest.approx(rank.wall, rel=allowing_for_others(0.01)), rank
        assert min(parts) >= 0


# --- the report ----------------------------------------------------------------------------------

_DECODE = replace(EVEN, decode_seconds=1.0)


def _transfers() -> RunMetrics:
    metrics = replace(delayed(replayed(), 1, 30.0), transfer_seconds=0.8)
    return with_rank(metrics, 1, transfer=30.0, wait=0.5, packet_wait=30.5)


def _uneven_steps() -> RunMetrics:
    """Return the metrics of a run split by wrong costs: rank 0 does three of four steps."""
    metrics = replayed()
    wall = metrics.makespan * 1.5
    metrics = with_rank(
        metrics, 0, compute=wall, wait=0.0, packet_wait=0.0, idle=0.0,
        step=WorkMetrics(count=300, mean_seconds=0.1),
    )  # fmt: skip
    return with_rank(
        metrics, 1, compute=wall / 3, packet_wait=wall * 2 / 3,
        step=WorkMetrics(count=100, mean_seconds=0.1),
    )  # fmt: skip


def _disk() -> RunMetrics:
    metrics = replace(delayed(replayed(), 1, 20.0, writer_wait=20.0), write_tail=2.0)
    return with_rank(metrics, 1, write=WorkMetrics(count=40, mean_seconds=1.2))


_FOUR: dict[str, Any] = {"world_size": 4, "num_steps": 12}
#: Synthetic runs by their bottleneck: metrics, the rank that limits the run, and words of the
#: report.
BOTTLENECKS: dict[str, tuple[RunMetrics, int | None, str]] = {
    "balanced": (replayed(), None, "no single rank: each computes"),
    "decode": (replayed(_DECODE), 1, "its decodes take 67% of its work"),
    "encode": (replayed(replace(EVEN, encode_seconds=0.8)), 0, "its encodes"),
    "steps": (_uneven_steps(), 0, "it does 300 steps, the others 100"),
    "slow_device": (
        *(replayed(replace(EVEN, step_seconds=(0.1, 0.18, 0.1, 0.1)), **_FOUR), 1),
        "a step takes 0.18 s, on the others 0.1 s",
    ),
    "transfers": (_transfers(), 1, "waits 30.0 s while packets arrive, 0.8 s each"),
    "images": (delayed(replayed(), 0, 15.0, image_wait=15.0), 0, "waits 15.0 s for images"),
    "disk": (_disk(), 1, "rank 1 writes a clip in 1.2 s"),
    "few_clips": (replayed(clips=2, **_FOUR), None, "2 clips cannot fill 4 ranks"),
}


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_the_known_bottleneck_comes_first_and_its_advice_holds(kind: str, tmp_path: Path) -> None:
    metrics, rank, words = BOTTLENECKS[kind]
    _, diagnosis = read_report(leave(tmp_path, metrics))
    assert diagnosis is not None
    first, advice = diagnosis.findings[0], diagnosis.advice
    assert (first.kind, first.rank) == (kind, rank)
    assert words in first.text
    lines = diagnosis.lines
    assert len(lines) == (3 if advice else 1)
    assert all(len(line) <= 80 for line in lines[:2])
    if advice is None:
        return
    asked = parsed(f"svdpp run photo.jpg {advice.options}")["options"]
    names: dict[str, Any] = {"data_parallel_size": metrics.world_size}
    if asked.layout is None:
        names = asked.parallel_fields
    counts = {"num_steps": metrics.num_steps, "world_size": metrics.world_size}
    layout = Layout(**counts, **names, costs=metrics.costs)
    assert (layout.split, layout.data_parallel_size) != ("uniform", 1), (
        "the layout of each made-up run"
    )
    assert metrics.forecast_seconds is not None
    times = metrics.forecast_seconds / forecast_layout(layout, metrics.clips).makespan
    assert times == pytest.approx(advice.times_as_fast, rel=0.05), advice


def test_a_slow_rank_gets_costs_of_its_own(tmp_path: Path) -> None:
    path = leave(tmp_path, replayed(replace(EVEN, step_seconds=(0.1, 0.2))))
    costs = read_costs(path)
    assert costs.step_seconds == (0.1, 0.2)
    assert costs.encode_seconds == (0.01, 0.02)
    even = read_costs(leave(tmp_path / "even", replayed()))
    assert (even.step_seconds, even.decode_seconds) == (0.1, 0.01)
    with pytest.raises(RequestError, match="the run has measured no costs"):
        read_costs(leave(tmp_path / "none", None))


def test_the_json_holds_what_the_report_says(tmp_path: Path) -> None:
    metrics = replace(replayed(), forecast_seconds=replayed().makespan / 2)
    content = json.loads(json.dumps(read_report(leave(tmp_path, metrics))[0]))
    assert content["clips"] == {"done": 1, "failed": 1}
    assert content["lost"] == [{"output": "a_1.mp4", "why": "a latent is not finite"}]
    assert content["findings"][0]["kind"] == "balanced"
    assert content["forecast_error"] == pytest.approx(1.0)
    content, _ = read_report(leave(tmp_path, None))
    assert (content["clips"]["done"], content["findings"]) == (1, [])
    assert content["headline"] == "the run has recorded no measurements"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"makespan": 0.0}, "makespan must be above 0"),
        ({"makespan": float("nan")}, "makespan must be a finite number"),
        ({"ranks": []}, "ranks"),
        ({"schema_version": 2}, "schema_version must be 1"),
        ({"clips": 0}, "clips must be 1 or more"),
        (None, "damaged"),
    ],
)
def test_damaged_figures_are_refused(changes: dict[str, Any] | None, words: str) -> None:
    measured: Any = [] if changes is None else {**replayed().to_json(), **changes}
    with pytest.raises(InputError, match=words):
        parse_run_metrics({"measured": measured}, "'run.json'")


def test_figures_read_back_are_the_same_and_small() -> None:
    metrics = replayed(clips=100, world_size=8, num_steps=16)
    content = json.dumps({"measured": metrics.to_json()})
    found = parse_run_metrics(json.loads(content), "")
    assert found is not None
    assert found.to_json() == metrics.to_json()
    assert len(content) < 100_000
