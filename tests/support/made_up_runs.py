"""Synthetic metrics of runs and benchmarks, from simulated schedules with a known bottleneck."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.bench.config import read_config
from svdpp.bench.runner import Bench, Round
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.run_metrics import RunMetrics, collect_run_metrics
from svdpp.driver.trace import Trace
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import simulate_schedule
from svdpp.worker.messages import ActionDone, Finished, Joined, StepDone

EVEN = CostModel(step_seconds=0.1, encode_seconds=0.01, decode_seconds=0.01)


def replayed(costs: CostModel = EVEN, **size: int) -> RunMetrics:
    """Return made-up metrics of a run that took exactly the times of its forecast."""
    return _replayed(costs, **size)[1]


def _replayed(
    costs: CostModel, *, world_size: int = 2, num_steps: int = 10, clips: int = 40
) -> tuple[Trace, RunMetrics]:
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=num_steps),
    )
    trace, ends = Trace(world_size), dict[int, float]()
    for rank in range(world_size):
        trace(rank, Joined(device="cpu", load_seconds=2.0))
        trace(rank, Finished(allocated_bytes=None, reserved_bytes=2**30))
    for rank, action, start, end in simulate_schedule(config.layout.schedule(clips), costs):
        for step in range(action.start, action.end):
            trace(rank, StepDone(clip=action.clip, step=step, seconds=costs.step_on(rank)))
        waited = start - ends.get(rank, start)
        done = {"action": str(action), "start": start, "end": end, "waited": waited}
        trace(rank, ActionDone.model_validate({**done, "waits": {"packet": waited}}))
        ends[rank] = end
    metrics = collect_run_metrics(trace, config, config.layout.schedule(clips))
    assert metrics is not None
    return trace, replace(metrics, start_seconds=3.0)


def with_rank(metrics: RunMetrics, rank: int, **changes: Any) -> RunMetrics:
    """Return a copy of a run's metrics with some fields of one rank changed."""
    ranks = list(metrics.ranks)
    ranks[rank] = replace(ranks[rank], **changes)
    return replace(metrics, ranks=tuple(ranks))


def delayed(metrics: RunMetrics, rank: int, seconds: float, **changes: Any) -> RunMetrics:
    """Return a copy of a run's metrics in which the run took longer, because one rank was blocked.

    All other ranks wait `seconds` longer for packets from this rank.
    """
    ranks = [
        replace(
            each,
            wall=each.wall + seconds,
            wait=each.wait + seconds,
            **(changes if each.rank == rank else {"packet_wait": each.packet_wait + seconds}),
        )
        for each in metrics.ranks
    ]
    return replace(metrics, ranks=tuple(ranks), makespan=metrics.makespan + seconds)


def leave(folder: Path, metrics: RunMetrics | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    clips = [
        {"output": "a_0.mp4", "input": "a.jpg", "seed": 0, "state": "done"},
        {"output": "a_1.mp4", "state": "failed", "error": {"message": "a latent is not finite"}},
    ]
    content = {"schema_version": 1, "model": "demo", "clips": clips}
    if metrics is not None:
        content["measured"] = metrics.to_json()
    path = folder / "run.json"
    path.write_text(json.dumps(content))
    return path


# --- benchmarks ----------------------------------------------------------------------------------


def config_of(name: str = "dummy", **layout: Any) -> PipelineConfig:
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=name),
        sampling=SvdSampling(num_inference_steps=2, num_frames=2, decode_chunk_size=2),
        **layout,
    )


def bench_of(name: str = "dummy", *overrides: str) -> Bench:
    point = read_config("smoke", [f"model.name={name}", *overrides])
    return Bench(point, config_of(name))


def round_of(case: str, number: int, *, seconds: float = 1.0, sha256: str = "aa") -> Round:
    """Return a made-up round of a benchmark: one clip of two steps on one rank."""
    costs = CostModel(step_seconds=seconds / 2)
    trace, metrics = _replayed(costs, world_size=1, num_steps=2, clips=1)
    hashes = [(sha256, None)]
    return Round(case=case, number=number, trace=trace, metrics=metrics, sha256=hashes)
