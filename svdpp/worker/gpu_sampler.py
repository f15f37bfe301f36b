"""Sampling a rank's GPU through NVML: load, memory, power, temperature, clock, throttling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from svdpp.launch import gpus
from svdpp.worker.messages import GpuSample

SAMPLE_SECONDS = 1.0

#: Bits of NVML's clock event reasons (nvml.h) that slow a busy GPU down.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class GpuSampler:
    """A thread that sends a sample of one GPU every second; without NVML it sends nothing.

    A thread of its own, because a driver that hangs must not stop the heartbeats.
    """

    def __init__(self, uuid: str, send: Callable[[GpuSample], None]) -> None:
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._send = send
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def start(self) -> None:
        """Starts the samples."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the samples; waits for one that is being taken, but not for a driver that hangs."""
        self._stopped.set()
        self._thread.join(timeout=SAMPLE_SECONDS)

    def _run(self) -> None:
        with gpus.open_nvml() as nvml:
            if nvml is None:
                return
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            except nvml.NVMLError:
                return
            try:
                while not self._stopped.is_set():
                    self._send(read_sample(nvml, handle))
                    self._stopped.wait(SAMPLE_SECONDS)
            except OSError:
                return  # the parent is gone, and this process ends with it


def read_sample(nvml: Any, handle: Any) -> GpuSample:
    """One sample; None for a value that the GPU does not give."""

    def read(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # an old GPU, or an old driver's module
            return None

    rates, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    milliwatts = read("nvmlDeviceGetPowerUsage")
    millijoules = read("nvmlDeviceGetTotalEnergyConsumption")
    reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuSample(
        when=time.monotonic(),
        utilisation=None if rates is None else rates.gpu / 100,
        memory_bytes=None if memory is None else memory.used,
        watts=None if milliwatts is None else milliwatts / 1000,
        joules=None if millijoules is None else millijoules / 1000,
        celsius=read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        sm_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        throttled=tuple(name for bit, name in _THROTTLE_REASONS.items() if (reasons or 0) & bit),
    )
