"""Denoisers with linear layers that TorchAO has quantised to int8.

The module checks loaded denoisers, and creates fake weights for estimates of memory and FLOPs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from svdpp.errors import ModelError
from svdpp.models.files import short_repr


def check_layers(module: torch.nn.Module, part: str) -> None:
    """Check that TorchAO has quantised only linear layers of a denoiser; check their shapes.

    diffusers does not check the shapes of weights that TorchAO has quantised.

    Args:
        module: Denoiser with weights.
        part: Name of the component, for messages.

    Raises:
        ModelError: A weight of a linear layer has another shape than the config says, or a tensor
            of another layer is quantised.
    """
    from torchao.quantization import Int8Tensor  # torchao is an optional dependency

    expected = {
        f"{name}.weight": (layer.out_features, layer.in_features)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    for name, tensor in module.named_parameters():
        shape = tuple(tensor.shape)
        if name in expected and shape != expected[name]:
            raise ModelError(
                f"{part}: {short_repr(name)} has the shape {list(shape)}, but the checkpoint's "
                f"config says {list(expected[name])}",
                "download the checkpoint again",
                details={
                    "component": part,
                    "tensor": name,
                    "shape": list(shape),
                    "config_shape": list(expected[name]),
                },
            )
        if name not in expected and isinstance(tensor, Int8Tensor):
            raise ModelError(
                f"{part}: {short_repr(name)} is quantised, but only weights of linear layers "
                "may be",
                details={"component": part, "tensor": name},
            )


def quantise_fake_to_int8(module: Any, dtype: torch.dtype, fake: FakeTensorMode) -> None:
    """Replace fake weights by fake int8 weights in the layers that TorchAO would quantise.

    Args:
        module: Denoiser with fake weights.
        dtype: Dtype in which the quantised layers compute.
        fake: Fake tensor mode in which `module` was created.
    """
    from torchao.quantization import Int8Tensor  # torchao is an optional dependency

    # The conditions below are those of `TorchAoHfQuantizer.check_if_quantized_param` in diffusers
    # 0.42.
    named = module.config.quantization_config.get("modules_to_not_convert") or ()
    kept = [*named, *(module._keep_in_fp32_modules or ())]
    for name, layer in module.named_modules():
        path = f"{name}.weight"
        if not isinstance(layer, torch.nn.Linear) or any(f"{each}." in path for each in kept):
            continue
        outputs, inputs = layer.weight.shape
        with fake:
            qdata = torch.empty((outputs, inputs), dtype=torch.int8)
            scale = torch.empty((outputs, 1), dtype=torch.float32)
            zero_point = torch.empty((outputs, 1), dtype=torch.int8)
        quantised = Int8Tensor(qdata, scale, [1, inputs], dtype, zero_point=zero_point)
        layer._parameters["weight"] = torch.nn.Parameter(quantised, requires_grad=False)
