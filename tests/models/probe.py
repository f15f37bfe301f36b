"""A made-up packet, to measure steps and a decode without an encode."""

from __future__ import annotations

import torch

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
