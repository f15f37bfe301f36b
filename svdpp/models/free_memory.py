"""Measuring free memory, on the host and on this process's GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device | str) -> int:
    """Free bytes of the host, or of the GPU of this rank.

    Only a process that uses the GPU may call it, because it creates a CUDA context. The parent uses
    `launch.gpus`.
    """
    device = torch.device(device)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def available_bytes() -> int:
    """Host memory in bytes that a new process can use without swapping; MemAvailable in proc(5)."""
    for line in _meminfo().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> str:
    try:
        return Path("/proc/meminfo").read_text()
    except OSError:
        return ""


def gib_text(num_bytes: int) -> str:
    """An amount of memory for messages, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"
