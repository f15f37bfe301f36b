"""Samples of a GPU, and their sums. NVML is a stand-in here; tests/gpu has the real one."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from svdpp.diagnostics.figures import GpuFigures
from svdpp.diagnostics.findings import find_limits
from svdpp.diagnostics.run_recorder import gpu_figures
from svdpp.launch import gpus
from svdpp.worker import reporter
from svdpp.worker.messages import GpuSample, parse_event
from svdpp.worker.reporter import GpuSampler, read_sample
from tests.diagnostics.made_up_runs import replayed, with_rank


def _stand_in(**changes: Any) -> Any:
    """A stand-in for the module `pynvml`, with one GPU."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    functions: dict[str, Any] = {
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=75, memory=20),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**30, total=2**34),
        "nvmlDeviceGetPowerUsage": lambda _: 250_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: 9_000_000,
        "nvmlDeviceGetTemperature": lambda _, sensor: 61 if sensor == 0 else 0,
        "nvmlDeviceGetClockInfo": lambda _, clock: 1410 if clock == 1 else 0,
        # Idle (bit 0) is no slowdown; the power cap (bit 2) is.
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0b101,
    }
    for name, value in changes.items():
        functions[name] = refuse if value is None else value
    return SimpleNamespace(**(vars(pynvml) | functions))


def _use(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        yield nvml

    monkeypatch.setattr(gpus, "open_nvml", opened)
    monkeypatch.setattr(reporter, "SAMPLE_SECONDS", 0.01)


def test_a_sample_has_plain_units_and_survives_the_channel() -> None:
    sample = read_sample(_stand_in(), "GPU-1")
    assert (sample.utilisation, sample.watts, sample.joules) == (0.75, 250.5, 9000.0)
    assert (sample.memory_bytes, sample.celsius, sample.sm_mhz) == (3 * 2**30, 61, 1410)
    assert sample.throttled == ("power cap",)
    assert parse_event(sample.to_bytes()) == sample
    assert sample.counters()["gpu power"] == {"W": 250.5}
    assert sample.counters()["gpu load"] == {"percent": 75.0}


def test_what_a_gpu_does_not_give_is_missing() -> None:
    nvml = _stand_in(nvmlDeviceGetPowerUsage=None, nvmlDeviceGetUtilizationRates=None)
    del nvml.nvmlDeviceGetTotalEnergyConsumption  # the module of an old driver
    sample = read_sample(nvml, "GPU-1")
    assert (sample.utilisation, sample.watts, sample.joules) == (None, None, None)
    assert "gpu power" not in sample.counters()
    assert sample.celsius == 61


def test_the_thread_samples_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _stand_in())
    samples: queue.Queue[GpuSample] = queue.Queue()
    sampler = GpuSampler("1", samples.put)
    sampler.start()
    found = [samples.get(timeout=60) for _ in range(3)]
    sampler.stop()
    assert found[0].when < found[1].when < found[2].when
    assert not sampler._thread.is_alive()


@pytest.mark.parametrize("nvml", [None, _stand_in(nvmlDeviceGetHandleByUUID=None)])
def test_without_nvml_there_is_nothing(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, nvml)
    samples: list[GpuSample] = []
    sampler = GpuSampler("GPU-1", samples.append)
    sampler.start()
    sampler._thread.join(timeout=60)
    sampler.stop()
    assert samples == []


def _sums(*samples: GpuSample) -> GpuFigures:
    figures = gpu_figures(samples)
    assert figures is not None
    return figures


def test_sums_have_mean_peak_and_the_gpus_own_energy() -> None:
    figures = _sums(
        GpuSample(when=0.0, utilisation=0.5, watts=100, joules=1000, memory_bytes=5, sm_mhz=1400),
        GpuSample(when=1.0, utilisation=1.0, watts=300, joules=1250, memory_bytes=9, sm_mhz=1200,
                  throttled=("power cap",)),
        GpuSample(when=2.0, utilisation=0.0, watts=200, joules=1500, memory_bytes=7, sm_mhz=300),
    )  # fmt: skip
    assert (figures.samples, figures.mean_utilisation, figures.peak_utilisation) == (3, 0.5, 1.0)
    assert (figures.mean_watts, figures.peak_watts, figures.joules) == (200.0, 300.0, 500.0)
    assert figures.peak_memory_bytes == 9
    # The last sample had no work, and so a low clock.
    assert (figures.mean_sm_mhz, figures.peak_sm_mhz) == (1300.0, 1400.0)
    assert figures.throttled == {"power cap": pytest.approx(1 / 3)}


def test_without_an_energy_counter_power_is_summed_up_over_time() -> None:
    samples = [GpuSample(when=when, watts=watts) for when, watts in ((0, 100), (1, 300), (3, 100))]
    assert _sums(*samples).joules == pytest.approx(200 * 1 + 200 * 2)
    assert _sums(samples[0]).joules is None
    assert gpu_figures([]) is None


def test_energy_of_a_shared_gpu_counts_once() -> None:
    gpu = _sums(*(GpuSample(when=when, joules=40 * when) for when in (0, 100)))
    figures = replayed(clips=40)
    for rank in (0, 1):
        figures = with_rank(figures, rank, gpu=gpu, memory_id="GPU-1")
    assert figures.joules_per_clip == pytest.approx(100.0)
    apart = with_rank(figures, 1, memory_id="GPU-2")
    assert apart.joules_per_clip == pytest.approx(200.0)
    assert with_rank(apart, 1, gpu=None).joules_per_clip is None


def test_a_gpu_that_lowers_its_clock_is_named() -> None:
    hot = GpuFigures(
        samples=40, mean_sm_mhz=1000, peak_sm_mhz=1500,
        throttled={"power cap": 0.1, "hardware thermal slowdown": 0.6},
    )  # fmt: skip
    figures = replace(with_rank(replayed(), 1, gpu=hot), device="cuda")
    first = find_limits(figures)[0]
    assert (first.kind, first.rank) == ("throttled", 1)
    assert "60% of the samples (hardware thermal slowdown)" in first.text
