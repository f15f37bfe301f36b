"""The comparison of a component's weight files with the module that its config describes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from svdpp.errors import ModelError
from svdpp.models.safetensors_header import Header

#: Other dtypes are those of quantised weights, which need their scales.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def check_weights(component: str, module: torch.nn.Module, headers: Mapping[Path, Header]) -> None:
    """Compares names, shapes and dtypes of the weight files with the module.

    Otherwise a missing weight would raise an unclear error about meta tensors, and diffusers only
    warns about unknown weights, which mean that the file belongs to another class.

    Raises:
        ModelError: a weight is missing or unknown, or has a wrong shape or dtype; it names the
            first one.
    """
    headers = _comparable(headers, module)
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


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """A weight's name in the module, from its name in a file."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _comparable(headers: Mapping[Path, Header], module: Any) -> dict[Path, Header]:
    """`headers` as the library reads them: without ignored weights, and with tied ones.

    Files hold one of several tied weights, such as the embedding of a T5 encoder.
    """
    # Of models whose names have changed, files keep the old ones.
    known = isinstance(module, PreTrainedModel)
    renamings = get_model_conversion_mapping(module) if known else []
    headers = {
        path: {_renamed(name, renamings): entry for name, entry in header.items()}
        for path, header in headers.items()
    }
    ignored = [re.compile(key) for key in module._keys_to_ignore_on_load_unexpected or ()]
    kept = {
        path: {
            name: entry
            for name, entry in header.items()
            if not any(pattern.search(name) for pattern in ignored)
        }
        for path, header in headers.items()
    }
    for name, other in (getattr(module, "all_tied_weights_keys", None) or {}).items():
        for header in kept.values():
            for present, absent in ((name, other), (other, name)):
                if present in header:
                    header.setdefault(absent, header[present])
    return kept
