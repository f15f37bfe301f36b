"""Monitoring samples of a rank: bytes transferred, memory, and values of its GPU from NVML."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from svdpp.diagnostics.run_metrics import metrics_of_pipeline
from svdpp.driver.pipeline import Pipeline
from svdpp.worker.messages import Event, RankStats
from svdpp.worker.stats import read_gpu
from tests.support.dummies import SHAPE, clips, config


@pytest.mark.slow
def test_real_ranks_report_the_bytes_that_they_move_and_their_memory() -> None:
    samples: dict[int, list[RankStats]] = {0: [], 1: [], 2: []}

    def keep(rank: int, event: Event) -> None:
        if isinstance(event, RankStats):
            samples[rank].append(event)

    pipeline, requests = Pipeline(config(3, steps=3)), clips(0, 1)
    pipeline.observe(keep)
    with pipeline:
        pipeline.run(requests)
    moved = len(requests) * math.prod(SHAPE) * 4  # float32
    for rank, (sent, received) in enumerate([(moved, 0), (moved, moved), (0, moved)]):
        first, last = samples[rank][0], samples[rank][-1]
        assert (first.sent_bytes, first.received_bytes) == (0, 0)
        assert (last.sent_bytes, last.received_bytes) == (sent, received)
        assert last.resident_bytes > 2**20
        assert last.gpu_load is None
        assert last.allocated_bytes is None
    metrics = metrics_of_pipeline(pipeline, requests)
    assert metrics is not None
    of_middle = metrics.to_json()["ranks"][1]
    assert (of_middle["sent_bytes"], of_middle["received_bytes"]) == (moved, moved)
    assert of_middle["resident_bytes"] > 2**20


class _FakeNvml:
    """Stand-in for the NVML library, with or without the power of the GPU."""

    NVMLError = RuntimeError

    def __init__(self, *, tells_power: bool) -> None:
        self._tells_power = tells_power

    def nvmlDeviceGetUtilizationRates(self, _: Any) -> Any:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetMemoryInfo(self, _: Any) -> Any:
        return SimpleNamespace(used=5 * 2**30)

    def nvmlDeviceGetPowerUsage(self, _: Any) -> int:
        if not self._tells_power:
            raise self.NVMLError("Not Supported")
        return 412_500


@pytest.mark.parametrize(("tells_power", "watts"), [(True, 412.5), (False, None)])
def test_a_gpus_values_are_in_plain_units(tells_power: bool, watts: float | None) -> None:
    found = read_gpu(_FakeNvml(tells_power=tells_power), None)
    assert found == {"gpu_load": 0.37, "gpu_memory_bytes": 5 * 2**30, "gpu_watts": watts}
    RankStats(sent_bytes=0, received_bytes=0, resident_bytes=1, **found)
