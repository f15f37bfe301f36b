"""Free memory of the host; knows no torch."""

from __future__ import annotations

import psutil


def available_bytes() -> int:
    """Host memory in bytes that a new process can use without swapping."""
    return int(psutil.virtual_memory().available)


def gib_text(num_bytes: int) -> str:
    """An amount of memory for messages, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"
