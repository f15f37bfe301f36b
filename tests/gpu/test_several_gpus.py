"""Tests that need two GPUs or more: a GPU for each rank, NCCL between GPUs, and whole runs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ParallelConfig, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.plan.forecast import summarise
from svdpp.worker.messages import StepDone, TransferDone
from tests.gpu.machine import Machine, Report, seconds_until_named
from tests.support.processes import allowing_for_others

pytestmark = [
    pytest.mark.slow,
    pytest.mark.num_gpus(2),
    pytest.mark.timeout(900),
]


def _config(machine: Machine, **changes: Any) -> PipelineConfig:
    return machine.config(machine.world_size, device=machine.own_device, **changes)


def test_transfers_between_cards_are_measured(machine: Machine, report: Report) -> None:
    with Pipeline(_config(machine)) as pipeline:
        pipeline.run(machine.requests(3))
    packets = [packet for packet in pipeline.trace.transfers if packet.direction == "recv"]
    for packet in packets[-(machine.world_size - 1) :]:
        seconds = packet.end - packet.start
        report.add(
            f"transfer {packet.peer} -> {packet.rank}",
            milliseconds=seconds * 1000,
            gb_per_second=packet.num_bytes / seconds / 1e9,
        )
    assert len(packets) == 3 * (machine.world_size - 1)


@pytest.mark.no_rehearsal  # the rehearsal runs the full-size tests of one GPU
@pytest.mark.parametrize("layout", ["alternating", "uniform", "data parallel"])
def test_all_cards_at_full_size_are_exact(
    machine: Machine, report: Report, full_size: Path, layout: str
) -> None:
    world_size, steps = machine.world_size, 14
    changes: dict[str, Any] = {
        "uniform": {"split": "balanced" if steps % world_size else "uniform"},
        "alternating": {"split": "alternating"},
        "data parallel": {"replicas": world_size},
    }[layout]
    config = machine.full_size(full_size, **changes)
    requests = machine.requests(world_size + 1)
    report.prove(f"full size, {world_size} cards, {layout}", config, requests)


@pytest.mark.full
def test_twenty_runs_of_the_demo_have_the_same_bits(machine: Machine, report: Report) -> None:
    found = set()
    for _ in range(2 if machine.is_small else 20):
        with Pipeline(_config(machine, parallel=ParallelConfig(split="alternating"))) as pipeline:
            results = pipeline.run(machine.requests(machine.world_size + 1))
        found.add(tuple(result.metadata["latents_sha256"] for result in results))
    report.add("demo model twenty times over", different_results=len(found))
    assert len(found) == 1


@pytest.mark.parametrize("moment", ["step", "transfer"])
def test_a_killed_rank_is_named_and_nobody_hangs(
    machine: Machine, report: Report, moment: str
) -> None:
    kind = StepDone if moment == "step" else TransferDone
    pipeline = Pipeline(_config(machine))
    seconds = seconds_until_named(pipeline, machine.requests(8), signal.SIGKILL, kind)
    report.add(f"rank 1 killed in a {moment}", seconds_until_the_run_ended=seconds)
    assert seconds < allowing_for_others(15)


@pytest.mark.full
def test_the_makespan_is_what_the_forecast_says(
    machine: Machine, report: Report, full_size: Path
) -> None:
    config = machine.full_size(full_size, parallel=ParallelConfig(split="alternating"))
    with Pipeline(config) as pipeline:
        requests = machine.requests(machine.world_size * 3)
        pipeline.run(requests)
        measured = pipeline.trace.summary().makespan
        forecast = summarise(pipeline.replayed(requests), machine.world_size).makespan
    report.add("makespan / forecast", ratio=measured / forecast)
    assert machine.is_small or abs(measured / forecast - 1) <= 0.05
