"""Owns the comparison of a component's weight files with the module that its config describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.errors import ModelError
from svdpp.models.safetensors_header import Header

#: Class of each component that diffusers implements.
DIFFUSERS_CLASSES: Mapping[str, Any] = {
    "unet": UNetSpatioTemporalConditionModel,
    "vae": AutoencoderKLTemporalDecoder,
}

#: Other dtypes are those of quantised weights, which need their scales.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def empty_module(component: str, folder: Path) -> Any:
    """The module that a component's config describes, with uninitialised or fake weights.

    Call it on the meta device or under fake tensors; otherwise it allocates the weights.

    Args:
        component: `unet`, `vae` or `image_encoder`.
        folder: the component's folder.
    """
    if component == "image_encoder":
        config = CLIPVisionConfig.from_pretrained(folder, local_files_only=True)
        config.dtype = torch.get_default_dtype()  # the config has the dtype of the files
        return CLIPVisionModelWithProjection(config)
    cls = DIFFUSERS_CLASSES[component]
    return cls.from_config(cls.load_config(folder, local_files_only=True))


def meta_module(component: str, folder: Path) -> torch.nn.Module:
    """The module that a component's config describes, on the meta device."""
    with torch.device("meta"):
        module: torch.nn.Module = empty_module(component, folder)
    return module


def check_names(component: str, module: torch.nn.Module, headers: Mapping[Path, Header]) -> None:
    """Compares names, shapes and dtypes of the weight files with the module.

    Otherwise a missing weight would raise an unclear error about meta tensors, and diffusers only
    warns about unknown weights, which mean that the file belongs to another class.

    Raises:
        ModelError: a weight is missing or unknown, or has a wrong shape or dtype; it names the
            first one.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    # Files of old transformers versions contain buffers such as position_ids.
    buffers = {name for name, _ in module.named_buffers()}
    where = f"{component}/{min(headers).name}" if len(headers) == 1 else f"{component} (in shards)"
    problems = {
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
    for problem, names in problems.items():
        if names:
            count = f"{len(names)} of {len(expected)} weights are {problem}"
            raise ModelError(f"{where}: {count}, the first is {names[0][:200]!r}")
