"""Model of SVD-XT's full size: exact, within the memory estimate, and as fast as diffusers."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.config import PipelineConfig
from svdpp.driver.resolve import estimate_parts, resolve_config
from svdpp.plan.actions import Schedule
from svdpp.verification.result import VerificationResult
from svdpp.verification.verify import verify
from svdpp.worker.messages import Event, Finished, StepDone
from tests.gpu.machine import Machine, Report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class _Listener:
    """Observer that records the seconds of each step, and each rank's peak of allocated memory."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.peaks: dict[int, Finished] = {}

    def __call__(self, rank: int, event: Event) -> None:
        if isinstance(event, StepDone):
            self.seconds.setdefault(event.clip, []).append(event.seconds)
        elif isinstance(event, Finished):
            self.peaks[rank] = event

    def median(self, clip: int) -> float:
        return statistics.median(self.seconds[clip])


def _verified(
    config: PipelineConfig, machine: Machine
) -> tuple[VerificationResult, _Listener, _Listener]:
    """Verify two clips; return the result, and the observers of the ranks and of diffusers."""
    ours, theirs = _Listener(), _Listener()

    def listen(title: str, _: Schedule) -> AbstractContextManager[_Listener]:
        return nullcontext(ours if title == "pipelined" else theirs)

    return verify(config, machine.requests(2), open_observer=listen), ours, theirs


def _config(machine: Machine, folder: Path, world_size: int = 2) -> PipelineConfig:
    config = machine.full_size(folder, world_size=world_size, device=machine.shared_device)
    return replace(config, sampling=replace(config.sampling, num_inference_steps=4))


def test_two_ranks_are_exact_within_their_memory_and_as_fast_as_diffusers(
    machine: Machine, report: Report, full_size: Path
) -> None:
    config = _config(machine, full_size)
    result, ours, theirs = _verified(config, machine)
    parts = estimate_parts(*resolve_config(config))
    needed = [parts.of_rank(roles).peak_bytes for roles in config.layout.roles]
    peaks = [ours.peaks[rank].allocated_bytes or 0 for rank in range(2)]
    ratios = [peak / need for peak, need in zip(peaks, needed, strict=True)]
    report.add(
        f"full size, {config.sampling.height}x{config.sampling.width}, 2 ranks, 4 steps, 2 clips",
        bitwise=result.bitwise,
        step_seconds_of_a_rank=ours.median(1),
        step_seconds_of_diffusers=theirs.median(1),
        peak_gib_by_rank=[round(peak / 2**30, 2) for peak in peaks],
        peak_over_estimate_by_rank=[round(ratio, 3) for ratio in ratios],
    )
    assert result.bitwise, result.first_difference
    if not machine.is_small:
        assert all(0.9 <= ratio <= 1.1 for ratio in ratios), ratios


@pytest.mark.full
def test_a_rank_alone_takes_diffusers_own_time_for_a_step(
    machine: Machine, report: Report, full_size: Path
) -> None:
    """A step of a rank takes at most 1% longer than a step of diffusers' own loop.

    There is only one rank, so that nothing shares the GPU. The rank and diffusers run alternately.
    """
    config = _config(machine, full_size, world_size=1)
    ratios = []
    for _ in range(1 if machine.is_small else 2):
        _, ours, theirs = _verified(config, machine)
        ratios.append(ours.median(1) / theirs.median(1))
    report.add("full size, step of a rank / of diffusers", ratios=[round(r, 4) for r in ratios])
    if not machine.is_small:
        assert min(ratios) <= 1.01, ratios
