"""Owns how much memory is free, of a device and of the host."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device | str) -> int:
    """Bytes that nobody uses of a CUDA device; for the CPU those of the host."""
    device = torch.device(device)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def available_bytes() -> int:
    """Host memory that a new process could take without swapping, see proc(5): MemAvailable."""
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
