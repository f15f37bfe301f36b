"""Owns a process's own peak of memory, as the kernel or torch's CUDA allocator kept it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch


def peak_bytes(device: str) -> tuple[int | None, int]:
    """The most that this process has held on `device`: allocated by tensors, and reserved in all.

    On the CPU the second is the resident set with libraries and mapped weights, and nobody counts
    the first.
    """
    if device.startswith("cuda"):
        return (
            int(torch.cuda.max_memory_allocated(torch.device(device))),
            int(torch.cuda.max_memory_reserved(torch.device(device))),
        )
    return None, status_bytes("VmHWM")


def reset_peak() -> None:
    """Gives back what an earlier run in this process has left, and forgets its peak."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # where that may not be written the old peak stays
        _reset_resident_peak()


def reset_peak_of(device: torch.device) -> int:
    """Makes this process's peak on `device` what is in use now, and returns that, bytes.

    Raises:
        OSError: the kernel does not let it, see proc(5), so no peak after it could be told.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would else hide what is needed
    _reset_resident_peak()
    return status_bytes("VmRSS")


def peak_in_use(device: torch.device) -> int:
    """The most bytes in use on `device` since `reset_peak_of`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    return status_bytes("VmHWM")


def _reset_resident_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS: proc(5)


def status_bytes(name: str) -> int:
    """A size out of /proc/self/status, see proc(5): VmRSS now, VmHWM at its peak."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
