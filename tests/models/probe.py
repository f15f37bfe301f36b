"""The memory of a model as torch counts it, and made-up packets, to measure without an encode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from svdpp.config import Dtype, ModelConfig
from svdpp.models.base import Tensors
from svdpp.models.engine.model import EngineModel
from svdpp.models.memory import _HollowModel


def probe_packet(
    model: EngineModel, *, dtype: Dtype = "fp32", has_stepped: bool = False
) -> Tensors:
    """A packet with a real one's shapes, dtypes and devices.

    With `has_stepped` it is one to decode, otherwise one before the first step.
    """
    named = ModelConfig(name=model._checkpoint.name, dtype=dtype)
    hollow = _HollowModel(model._checkpoint, named, model._sampling, on_cpu=True)
    made = hollow.encode()[0]
    if has_stepped:
        made = hollow.denoise(made)[0]
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor
        if tensor.dtype == torch.uint8  # in host memory in real packets too
        else torch.randn(tensor.shape, generator=generator).to(model.device, tensor.dtype)
        for name, tensor in made.items()
    }


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
