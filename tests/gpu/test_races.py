"""torch's CUDA Sanitizer finds no race in any thread of a run, but finds a planted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.config import ParallelConfig
from svdpp.verification.verify import run_pipelined
from tests.gpu.inside_ranks import Watched
from tests.gpu.machine import Machine, Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.no_rehearsal,
    pytest.mark.timeout(600),
]


def _found(machine: Machine, folder: Path, *, planted: bool) -> tuple[set[str], list[str]]:
    """Make clips on all GPUs; return the threads that the CUDA Sanitizer checked, and the races."""
    watched, tensors = folder / "watched", folder / "tensors"
    watched.mkdir()
    tensors.mkdir()
    fault = Watched("hang", 0, 0, folder=str(watched), planted=planted)
    config = machine.all_devices(parallel=ParallelConfig(split="alternating"), checksum=True)
    run_pipelined(config, machine.requests(3), tensors, fault=fault)
    assert len(list(watched.iterdir())) == config.world_size
    lines = [line for file in watched.iterdir() for line in file.read_text().splitlines()]
    threads = {line.removeprefix("thread ") for line in lines if line.startswith("thread ")}
    return threads, [line for line in lines if line.startswith("race ")]


def test_no_thread_of_a_run_races_with_another(
    machine: Machine, report: Report, tmp_path: Path
) -> None:
    threads, races = _found(machine, tmp_path, planted=False)
    report.add("races between streams", races=len(races), threads=sorted(threads))
    assert {"MainThread", "to-1_0", "from-0_0"} <= threads
    assert races == []


def test_a_copy_that_waits_for_nothing_is_found(machine: Machine, tmp_path: Path) -> None:
    _, races = _found(machine, tmp_path, planted=True)
    assert races
