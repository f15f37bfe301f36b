"""What needs two GPUs or more: one card for each rank, NCCL between cards, whole runs on them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, DraftConfig, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import rank_probe
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from svdpp.media.examples import example_photos
from svdpp.plan.draft_starts import default_start_steps
from svdpp.verification.verify import compare, run_pipelined, run_sequential
from svdpp.worker.messages import Event, StepDone, TransferDone
from tests.gpu.machine import Machine, Report

pytestmark = [
    pytest.mark.processes,
    pytest.mark.num_gpus(2),
    pytest.mark.timeout(900),
]

PHOTOS = [str(path) for path in example_photos()]


def _requests(count: int) -> list[ClipRequest]:
    return [ClipRequest(seed=clip, image=PHOTOS[clip % len(PHOTOS)]) for clip in range(count)]


def _config(machine: Machine, **changes: Any) -> PipelineConfig:
    return machine.config(machine.world_size, device=machine.own, **changes)


def _full_size(machine: Machine, folder: Path, **changes: Any) -> PipelineConfig:
    size = {"height": 64, "width": 64} if machine.is_rehearsal else {}
    return PipelineConfig(
        world_size=machine.world_size,
        model=ModelConfig(name=str(folder), dtype=machine.dtype),
        sampling=SvdSampling(num_inference_steps=14, decode_chunk_size=8, **size),
        device=machine.own,
        **changes,
    )


def _cards_of(pid: int) -> set[int]:
    """NVML's indices of the cards on which a process has a context."""
    import pynvml

    pynvml.nvmlInit()
    found = set()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if pid in {process.pid for process in processes}:
            found.add(index)
    return found


@pytest.mark.no_rehearsal
def test_each_rank_is_on_its_own_card_and_the_parent_on_none(
    machine: Machine, report: Report
) -> None:
    cards: dict[int, set[int]] = {}
    with Pipeline(_config(machine)) as pipeline:
        pipeline.run(_requests(1))
        pids: list[int] = pipeline._supervisor._group.pids  # type: ignore[union-attr]
        cards = {rank: _cards_of(pid) for rank, pid in enumerate(pids)}
        own = _cards_of(os.getpid())
    if not any(cards.values()):
        pytest.skip("NVML names no processes here, as in some containers")
    report.add("cards of each rank's process", **{str(rank): c for rank, c in cards.items()})
    assert all(len(each) == 1 for each in cards.values())
    assert len(set.union(*cards.values())) == machine.num_gpus
    assert own == set()


def test_transfers_between_cards_are_measured(machine: Machine, report: Report) -> None:
    links = rank_probe.measure_transfers(_config(machine))
    for link in links:
        report.add(
            f"transfer {link.source} -> {link.target}",
            milliseconds=link.latency_seconds * 1000,
            gb_per_second=link.bytes_per_second / 1e9,
        )
    assert len(links) == machine.world_size - 1


@pytest.mark.parametrize(
    "layout",
    [
        *("uniform", "dithered", "data parallel", "draft"),
        pytest.param("reversed", marks=pytest.mark.no_rehearsal),
    ],
)
def test_all_cards_at_full_size_are_exact(
    machine: Machine, report: Report, full_size: Path, tmp_path: Path, layout: str
) -> None:
    world_size, steps = machine.world_size, 14
    changes: dict[str, Any] = {
        "uniform": {"split": "balanced" if steps % world_size else "uniform"},
        "dithered": {"split": "dithered"},
        "reversed": {"split": "dithered", "device_order": tuple(reversed(range(world_size)))},
        "data parallel": {"replicas": world_size},
        "draft": {"draft": DraftConfig(start_steps=default_start_steps(steps, min(world_size, 8)))},
    }[layout]
    if layout == "draft" and world_size > 8:
        pytest.skip("start steps are known for up to 8 ranks")
    config = _full_size(machine, full_size, **changes)
    num_clips = 1 if layout == "draft" else world_size + 1
    run_pipelined(config, _requests(num_clips), tmp_path)
    run_sequential(config, _requests(num_clips), tmp_path)
    result = compare(config, num_clips, tmp_path)
    report.add(f"full size, {world_size} cards, {layout}", bitwise=result.bitwise)
    assert result.bitwise, result.first_difference


def test_twenty_runs_of_the_demo_have_the_same_bits(machine: Machine, report: Report) -> None:
    found = set()
    for _ in range(2 if machine.is_rehearsal else 20):
        with Pipeline(_config(machine, split="dithered")) as pipeline:
            results = pipeline.run(_requests(machine.world_size + 1))
        found.add(tuple(result.metadata["latents_sha256"] for result in results))
    report.add("demo model twenty times over", different_results=len(found))
    assert len(found) == 1


@pytest.mark.parametrize("moment", ["step", "transfer"])
def test_a_killed_rank_is_named_and_nobody_hangs(
    machine: Machine, report: Report, moment: str
) -> None:
    kind = StepDone if moment == "step" else TransferDone
    pipeline = Pipeline(_config(machine))
    began: list[float] = []

    def strike(rank: int, event: Event) -> None:
        if rank == 1 and isinstance(event, kind) and not began:
            began.append(time.monotonic())
            pids: list[int] = pipeline._supervisor._group.pids  # type: ignore[union-attr]
            os.kill(pids[1], signal.SIGKILL)

    pipeline.observe(strike)
    with pytest.raises(RankError, match="rank 1 "), pipeline:
        pipeline.run(_requests(8))
    seconds = time.monotonic() - began[0]
    report.add(f"rank 1 killed in a {moment}", seconds_until_the_run_ended=seconds)
    assert seconds < 15


def test_the_makespan_is_what_the_forecast_says(
    machine: Machine, report: Report, full_size: Path
) -> None:
    config = _full_size(machine, full_size, split="dithered")
    with Pipeline(config) as pipeline:
        pipeline.run(_requests(machine.world_size * 3))
        measured, forecast = pipeline.trace.summary().makespan, pipeline.forecast().makespan
    report.add("makespan / forecast", ratio=measured / forecast)
    assert abs(measured / forecast - 1) <= (0.5 if machine.is_rehearsal else 0.05)
