"""Owns a process's own peak of memory, as the kernel or torch's CUDA allocator kept it."""

from __future__ import annotations

import contextlib
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


def begin_anew() -> None:
    """Gives back what an earlier run in this process has left, and forgets its peak."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    # 5: the peak is now, see proc(5). Where that may not be written the old one stays.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """A size out of /proc/self/status, see proc(5): VmRSS now, VmHWM at its peak."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
