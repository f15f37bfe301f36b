"""How fast the ranks compute, from their latest work and the FLOPs of its parts."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from svdpp.config import ModelConfig, SamplingConfig, SvdSampling
from svdpp.diagnostics.utilisation import PartFlops, count_flops
from svdpp.plan.actions import Action, Kind
from svdpp.serve import rank_speeds
from svdpp.serve.rank_speeds import FlopCounts, RankSpeeds, count_in_process
from svdpp.worker.messages import ActionDone, Started, StepDone
from tests.faults.processes import wait_until

DEMO = ModelConfig(name="demo")
SMALL = SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=2, decode_chunk_size=2)
LARGE = replace(SMALL, width=128)
FLOPS = {
    64: PartFlops(encode=10**12, step=2 * 10**12, decode=3 * 10**12),
    128: PartFlops(encode=10**13, step=2 * 10**13, decode=3 * 10**13),
}


def _count(model: ModelConfig, sampling: SamplingConfig) -> PartFlops | None:
    assert model == DEMO
    return FLOPS.get(sampling.width)


def _counted(*samplings: SamplingConfig) -> FlopCounts:
    """Counts that know these clips already."""
    counts = FlopCounts(DEMO, _count)
    for sampling in samplings:
        counts.of(sampling)
        wait_until(lambda s=sampling: counts.of(s), 10, lambda: "no FLOPs")  # type: ignore[misc]
    return counts


def _step(seconds: float) -> StepDone:
    return StepDone(clip=0, step=0, seconds=seconds)


def test_speeds_are_flops_of_all_sizes_over_seconds() -> None:
    speeds = RankSpeeds(DEMO, _counted(SMALL, LARGE))
    assert speeds.read() == []
    for _ in range(3):
        speeds.add(0, _step(1.0), SMALL)
    speeds.add(0, _step(5.0), LARGE)
    speeds.add(1, ActionDone(action="DENOISE c0 0:2", start=0, end=9, waited=1), SMALL)
    speeds.add(
        1, ActionDone(action=str(Action.at(Kind.DECODE, 0, 2)), start=1.0, end=2.5, waited=1), SMALL
    )
    speeds.add(1, _step(1.0), None)
    first, second = speeds.read()
    assert (first.rank, first.tflops, first.mfu) == (0, pytest.approx((3 * 2 + 20) / 8), None)
    assert (second.rank, second.tflops) == (1, pytest.approx(3 / 1.5))


def test_only_the_latest_work_counts() -> None:
    speeds = RankSpeeds(DEMO, _counted(SMALL))
    for seconds in [1000.0] * 5 + [2.0] * rank_speeds._LATEST:
        speeds.add(0, _step(seconds), SMALL)
    assert speeds.read()[0].tflops == pytest.approx(1.0)


def test_mfu_is_of_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        SimpleNamespace(uuid="GPU-a", name="NVIDIA H200"),
        SimpleNamespace(uuid="GPU-b", name="a GPU without a published peak"),
    ]
    monkeypatch.setattr(rank_speeds, "visible_gpus", lambda: gpus)
    speeds = RankSpeeds(replace(DEMO, dtype="fp16"), _counted(SMALL))
    for rank, uuid in enumerate("abc"):  # the GPU of the last rank is on another host
        speeds.add(rank, Started(device=f"cuda:{rank}", uuid=uuid, conditions={}), None)
        speeds.add(rank, _step(0.01), SMALL)
    assert [each.mfu for each in speeds.read()] == [pytest.approx(200 / 989.5), None, None]


def test_flops_are_counted_once_for_each_size_in_the_background() -> None:
    asked: list[SamplingConfig] = []
    go = threading.Event()

    def count(_: ModelConfig, sampling: SamplingConfig) -> PartFlops | None:
        asked.append(sampling)
        go.wait(30)
        return FLOPS[64]

    counts = FlopCounts(DEMO, count)
    assert [counts.of(SMALL), counts.of(SMALL), counts.of(LARGE)] == [None, None, None]
    go.set()
    wait_until(lambda: counts.of(SMALL), 10, lambda: "no FLOPs")
    other_motion = replace(SMALL, motion_bucket_id=5, num_inference_steps=9)
    assert counts.of(other_motion) == FLOPS[64]
    assert [each.width for each in asked] == [64]


def test_the_dummy_and_a_failed_count_have_no_speed() -> None:
    assert FlopCounts(ModelConfig(name="dummy"), _count).of(SMALL) is None
    calls: list[int] = []
    counts = FlopCounts(DEMO, lambda *_: calls.append(1))
    counts.of(SMALL)
    wait_until(lambda: not counts._is_counting, 10, lambda: "counting")
    assert counts.of(SMALL) is None
    assert len(calls) == 1


@pytest.mark.processes
@pytest.mark.long
def test_a_process_counts_as_this_one_does() -> None:
    assert count_in_process(DEMO, SMALL) == count_flops(DEMO, SMALL)
    assert count_in_process(ModelConfig(name="/absent"), SMALL) is None
