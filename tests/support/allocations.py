"""Measurement of the peak memory that torch allocates on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def allocated_peak(work: Callable[[], object]) -> int:
    """Return the peak bytes that torch's CPU allocator allocates during `work`."""
    with torch.no_grad():
        work()  # not measured, because oneDNN allocates memory for its kernels in the first run
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
