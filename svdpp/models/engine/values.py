"""What travels of a pipeline's call: nested values, as named tensors and their structure.

The structure is JSON: plain values stand in it, and tensors by name, with shape, dtype and strides.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only
from transformers.utils import ModelOutput

from svdpp.models.base import STRUCTURE, Tensors

#: One value in a structure: a JSON object whose key `kind` says how the others are read.
Node = dict[str, Any]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)}  # fmt: skip
# What the engine and diffusers themselves add to a scheduler.
_NOT_STATE = ("_range_call", "_internal_dict")

# As the outputs of both libraries, so that its tensors are found.
register_pytree_node(
    DiagonalGaussianDistribution,
    lambda value: ([value.parameters], value.deterministic),
    lambda parts, fixed: DiagonalGaussianDistribution(*parts, fixed),
)


class NotPackableError(Exception):
    """A value that is neither plain nor made of tensors."""


class Packer:
    """Takes values apart; a tensor that several hold travels once, and none does if not `keeps`."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.tensors: Tensors = {}
        self._keeps = keeps
        self._sources: dict[str, torch.Tensor] = {}

    def pack(self, value: Any, name: str) -> Node:
        """The structure of `value`, whose tensors get names that begin with `name`."""
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, name)
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"kind": "plain", "value": value}
        if isinstance(value, DiagonalGaussianDistribution):
            parameters = self.pack(value.parameters, name)
            return {"kind": "gaussian", "of": parameters, "fixed": value.deterministic}
        if type(value) in (list, tuple):
            items = [self.pack(each, f"{name}.{index}") for index, each in enumerate(value)]
            return {"kind": type(value).__name__, "items": items}
        if not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
            raise NotPackableError(f"{name} is a {type(value).__name__}")
        node = {"items": {key: self.pack(each, f"{name}.{key}") for key, each in value.items()}}
        if isinstance(value, (BaseOutput, ModelOutput)):
            cls = f"{type(value).__module__}:{type(value).__name__}"
            return {"kind": "output", "class": cls, **node}
        return {"kind": "dict", **node}

    def _pack_tensor(self, tensor: torch.Tensor, name: str) -> Node:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise NotPackableError(f"{name} is of {tensor.dtype}")
        node = {"kind": "tensor", "shape": list(tensor.shape), "dtype": dtype}
        if not self._keeps:
            return {**node, "name": None, "stride": None}
        same = (known for known, each in self._sources.items() if each is tensor)
        if (known := next(same, None)) is None:
            known = name
            self._sources[name], self.tensors[name] = tensor, tensor.contiguous()
        # The order of the elements in memory is part of the bits: kernels differ by it.
        dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        stride = None if tensor.is_contiguous() else list(dense.stride())
        return {**node, "name": known, "stride": stride}

    def packet(self, structure: Node) -> Tensors:
        """The packed tensors, and their structure as one more."""
        text = json.dumps(structure, separators=(",", ":"))
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return {**self.tensors, STRUCTURE: data}


def structure_of(packet: Tensors) -> Node:
    """The structure that `Packer.packet` has written."""
    assert packet[STRUCTURE].is_cpu
    structure: Node = json.loads(packet[STRUCTURE].numpy().tobytes())
    return structure


def describe(value: Any) -> Node:
    """The structure of `value`, of whose tensors nothing travels."""
    return Packer(keeps=False).pack(value, "value")


def unpack(node: Node, tensors: Tensors, device: torch.device) -> Any:
    """The value that a packer took, with copies of its tensors, which the pipeline may change.

    A tensor that did not travel is NaN everywhere, and takes no memory.
    """

    def tensor(leaf: Node) -> torch.Tensor:
        if leaf["name"] is None:
            dtype = _DTYPES[leaf["dtype"]]
            number = torch.nan if dtype.is_floating_point else 0
            return torch.full((), number, dtype=dtype, device=device).expand(leaf["shape"])
        source = tensors[leaf["name"]]
        if leaf["stride"] is None:
            return source.clone()
        return source.new_empty_strided(leaf["shape"], leaf["stride"]).copy_(source)

    return _build(node, tensor)


def zeros(node: Node, device: torch.device) -> Any:
    """A value of the same structure whose tensors are zero."""

    def tensor(leaf: Node) -> torch.Tensor:
        shape, stride = leaf["shape"], leaf["stride"]
        made = torch.zeros(shape, dtype=_DTYPES[leaf["dtype"]], device=device)
        return made if stride is None else made.as_strided(shape, stride)

    return _build(node, tensor)


def leaves(node: Node) -> list[Node]:
    """The tensors in a structure, in its order."""
    if node["kind"] == "tensor":
        return [node]
    items = node.get("items", [node["of"]] if "of" in node else [])
    parts = items.values() if isinstance(items, dict) else items
    return [leaf for part in parts for leaf in leaves(part)]


def _build(node: Node, tensor: Any) -> Any:
    match node["kind"]:
        case "tensor":
            return tensor(node)
        case "plain":
            return node["value"]
        case "gaussian":
            return DiagonalGaussianDistribution(_build(node["of"], tensor), node["fixed"])
        case "list":
            return [_build(each, tensor) for each in node["items"]]
        case "tuple":
            return tuple(_build(each, tensor) for each in node["items"])
    items = {key: _build(each, tensor) for key, each in node["items"].items()}
    return items if node["kind"] == "dict" else _output_class(node["class"])(**items)


def _output_class(path: str) -> Any:
    """The class of a library's output; packets name no other class."""
    module, _, name = path.partition(":")
    known = module.split(".")[0] in ("diffusers", "transformers")
    cls = getattr(importlib.import_module(module), name) if known else None
    if not (isinstance(cls, type) and issubclass(cls, OrderedDict)):
        raise ValueError(f"a packet names the class {path}")
    return cls


def snapshot(scheduler: Any) -> dict[str, Any]:
    """The scheduler's `__dict__` before its first step, for `changed_state`."""
    return {
        key: copy.copy(value) if isinstance(value, (list, dict)) else value
        for key, value in scheduler.__dict__.items()
    }


def changed_state(before: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """What steps have changed in the scheduler's `__dict__`: its state."""
    return {
        key: value
        for key, value in scheduler.__dict__.items()
        if key not in _NOT_STATE and not (key in before and _is_unchanged(before[key], value))
    }


def _is_unchanged(before: Any, now: Any) -> bool:
    if isinstance(before, (list, tuple)) and type(before) is type(now):
        return len(before) == len(now) and all(map(_is_unchanged, before, now))
    plain = isinstance(before, (int, float, str)) and type(before) is type(now)
    return before is now or (plain and bool(before == now))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def copied(value: Any) -> Any:
    """The value with copies of its tensors, in the same order in memory."""
    return tree_map_only(torch.Tensor, torch.clone, value)


def differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether any tensor is another one than before."""
    return not all(map(torch.equal, before, after))
