"""Owns bytes as torch counts them: of weights, and the peak of what its CPU allocator allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile


def allocated_peak(work: Callable[[], object]) -> int:
    """Peak of the bytes that torch's CPU allocator allocates during `work`."""
    with torch.no_grad():
        work()  # oneDNN creates its kernels in the first run
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def num_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Bytes of the parameters and buffers of `modules`."""
    tensors = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)
