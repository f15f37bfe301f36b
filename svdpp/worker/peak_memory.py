"""Owns a process's memory figures: its use, its peak, and whether the CUDA allocator ran short."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch


class MemoryPressure:
    """Tells whether the CUDA allocator has run short of memory since the last call.

    cuDNN then silently falls back to kernels with a smaller workspace, and the bits change.

    Args:
        device: of the rank; on the CPU there is no such pressure.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._count = self._events()

    def rose(self) -> bool:
        """Whether an allocation was retried or failed since the last call."""
        before, self._count = self._count, self._events()
        return self._count > before

    def _events(self) -> int:
        if self._device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))


def peak_bytes(device: str) -> tuple[int | None, int]:
    """The peak of this process on `device`: bytes in tensors, and bytes reserved.

    On the CPU the first is None, and the second is the resident set with libraries and weights.
    """
    if device.startswith("cuda"):
        return (
            int(torch.cuda.max_memory_allocated(torch.device(device))),
            int(torch.cuda.max_memory_reserved(torch.device(device))),
        )
    return None, status_bytes("VmHWM")


def bytes_in_use(device: str) -> int:
    """What this process uses on `device` now: on CUDA in tensors, on the CPU its resident set."""
    if device.startswith("cuda"):
        return int(torch.cuda.memory_allocated(torch.device(device)))
    return status_bytes("VmRSS")


def reset_peak() -> None:
    """Frees the memory that an earlier run in this process left, and resets the peak."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # a kernel may refuse; the old peak then stays
        _reset_resident_peak()


def reset_peak_of(device: torch.device) -> int:
    """Resets the peak on `device` to the bytes in use now, and returns them.

    Raises:
        OSError: the kernel refuses; see proc(5).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    ctypes.CDLL(None).malloc_trim(0)  # malloc reuses freed memory, which would hide a later need
    _reset_resident_peak()
    return status_bytes("VmRSS")


def peak_in_use(device: torch.device) -> int:
    """The peak of bytes in use on `device` since `reset_peak_of`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    return status_bytes("VmHWM")


def _reset_resident_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS: proc(5)


def status_bytes(name: str) -> int:
    """A size from /proc/self/status in bytes; see proc(5): VmRSS is current, VmHWM the peak."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
