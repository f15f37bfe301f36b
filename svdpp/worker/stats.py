"""Samples of a rank's process and GPU for monitoring: bytes transferred, memory, load and power.

A separate thread takes the samples, because NVML can block while a driver hangs. The heartbeats,
which tell the parent that the rank is alive, must not be delayed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from svdpp.launch import gpus
from svdpp.worker.device import status_bytes
from svdpp.worker.messages import RankStats

_SAMPLE_SECONDS = 1.0


class StatsSampler:
    """Thread that sends samples of a rank (`RankStats`) at its start, every second, and at its end.

    Args:
        send: Callback that gets each sample. The sampler's thread calls it; for the last sample,
            the thread that calls `stop` does.
        device: Device of the rank.
        uuid: UUID of the rank's GPU, with or without the prefix `GPU-`; None on the CPU.
        moved: Function that returns the number of bytes that the rank has sent so far, and the
            number of bytes that it has received so far.
    """

    def __init__(
        self,
        send: Callable[[RankStats], None],
        device: torch.device,
        uuid: str | None,
        moved: Callable[[], tuple[int, int]],
    ) -> None:
        self._send, self._device, self._moved = send, device, moved
        self._uuid = uuid
        self._gpu: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats", daemon=True)

    def start(self) -> None:
        """Start the thread that samples a rank's process and GPU."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that samples a rank, and send a last sample.

        The last sample repeats the GPU's values from the sample before it. The call waits at most a
        second for the thread, which a hanging driver may block.
        """
        self._stopped.set()
        self._thread.join(timeout=_SAMPLE_SECONDS)
        self._send(self._sample())

    def _run(self) -> None:
        # An OSError means that the parent has ended. Nobody needs samples then.
        with contextlib.suppress(OSError), gpus.open_nvml() as nvml:
            handle = None if nvml is None or self._uuid is None else _nvml_handle(nvml, self._uuid)
            while True:
                self._gpu = {} if handle is None else read_gpu(nvml, handle)
                self._send(self._sample())
                if self._stopped.wait(_SAMPLE_SECONDS):
                    return

    def _sample(self) -> RankStats:
        sent, received = self._moved()
        return RankStats(
            sent_bytes=sent,
            received_bytes=received,
            resident_bytes=status_bytes("VmRSS"),
            **_torch_bytes(self._device),
            **self._gpu,
        )


def _torch_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated_bytes": int(torch.cuda.memory_allocated(device)),
        "reserved_bytes": int(torch.cuda.memory_reserved(device)),
        "peak_reserved_bytes": int(torch.cuda.max_memory_reserved(device)),
    }


def _nvml_handle(nvml: Any, uuid: str) -> Any:
    """Return the handle by which NVML identifies a GPU; None if NVML does not know the GPU."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None


def read_gpu(nvml: Any, handle: Any) -> dict[str, float | int | None]:
    """Return load, memory and power of a GPU, read with NVML, as fields of `RankStats`.

    Args:
        nvml: Initialised module `pynvml`, which creates no CUDA context.
        handle: NVML's handle of the GPU.

    Returns:
        `gpu_load` (0 to 1), `gpu_memory_bytes` of all processes, and `gpu_watts`; None for
        values that the GPU does not report, such as those of a MIG slice.
    """

    def read(name: str) -> Any:
        try:
            return getattr(nvml, name)(handle)
        # old GPUs, drivers and versions of pynvml do not report all values
        except (nvml.NVMLError, AttributeError):
            return None

    rates, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    milliwatts = read("nvmlDeviceGetPowerUsage")
    return {
        "gpu_load": None if rates is None else rates.gpu / 100,
        "gpu_memory_bytes": None if memory is None else int(memory.used),
        "gpu_watts": None if milliwatts is None else milliwatts / 1000,
    }
