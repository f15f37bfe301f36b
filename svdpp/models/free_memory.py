"""Owns how much memory is free: of the host, and of this process's own GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device | str) -> int:
    """Free bytes of the host, or of the GPU of a rank.

    Only a process that uses the GPU may ask here: it gets a CUDA context by that. A parent asks
    `launch.gpus`.
    """
    device = torch.device(device)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def available_bytes() -> int:
    """Host memory that a new process can take without swapping, see proc(5): MemAvailable."""
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
