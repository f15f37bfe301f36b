"""Owns what a component's weights must be: the module its config describes, their names, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.errors import ModelError
from svdpp.models.safetensors_header import Header

#: diffusers' class of each component that is one of its own.
DIFFUSERS_CLASSES: Mapping[str, Any] = {
    "unet": UNetSpatioTemporalConditionModel,
    "vae": AutoencoderKLTemporalDecoder,
}

#: Weights of any other dtype are quantised ones, which mean nothing without their scales.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def empty_module(component: str, home: Path) -> Any:
    """The module that a component's config describes, with weights as torch makes them here.

    Call it on the meta device, or under fake tensors: anywhere else the weights take memory.

    Args:
        component: `unet`, `vae` or `image_encoder`.
        home: the component's folder.
    """
    if component == "image_encoder":
        config = CLIPVisionConfig.from_pretrained(home, local_files_only=True)
        config.dtype = torch.get_default_dtype()  # else that of the files, which it remembers
        return CLIPVisionModelWithProjection(config)
    cls = DIFFUSERS_CLASSES[component]
    return cls.from_config(cls.load_config(home, local_files_only=True))


def expected_module(component: str, home: Path) -> torch.nn.Module:
    """The module its config describes, without any memory for its weights."""
    with torch.device("meta"):
        module: torch.nn.Module = empty_module(component, home)
    return module


def check_names(component: str, module: torch.nn.Module, headers: Mapping[Path, Header]) -> None:
    """Compares names and shapes: else a missing weight surfaces as an error about meta tensors.

    diffusers only warns of weights it does not know; a file with such was made for another class.

    Raises:
        ModelError: naming the first weight that is missing, unknown or of a wrong shape or dtype.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    # Old transformers wrote buffers that today's compute anew, such as position_ids.
    buffers = {name for name, _ in module.named_buffers()}
    where = f"{component}/{min(headers).name}" if len(headers) == 1 else f"{component} (in shards)"
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys() - buffers),
        "not floating point": [
            name for name in expected if name in found and found[name][0] not in _FLOATS
        ],
        "of a wrong shape": [
            f"{name} {found[name][1]}, not {shape}"
            for name, shape in expected.items()
            if name in found and found[name][1] != shape
        ],
    }
    for fault, names in faults.items():
        if names:
            count = f"{len(names)} of {len(expected)} weights are {fault}"
            raise ModelError(f"{where}: {count}, the first is {names[0][:200]!r}")
