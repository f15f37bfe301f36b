"""Owns which safetensors files hold a component's weights, and their headers; reads no tensor.

A header and an index of shards are a stranger's JSON, as configs are: so how such JSON is read,
bounded and shown is here as well. Knows no torch.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.errors import ModelError

#: dtype (in safetensors' spelling) and shape of each tensor of a file, by name.
Header = dict[str, tuple[str, tuple[int, ...]]]

#: What the name of each component's weight files begins with.
WEIGHT_STEMS: Mapping[str, str] = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "image_encoder": "model",
}


def weight_headers(folder: Path, component: str, variant: str | None) -> dict[Path, Header]:
    """The safetensors files that hold one component's weights, each with its checked header.

    Where a folder holds both one file and an index of shards, diffusers takes the index and
    transformers the file (their `from_pretrained`, diffusers 0.42 and transformers 5.23).

    Args:
        folder: the checkpoint's folder.
        component: `unet`, `vae` or `image_encoder`.
        variant: as in `diffusion_pytorch_model.fp16.safetensors`; None for the plain names.

    Raises:
        ModelError: a file is missing, not safetensors, or not whole.
    """
    stem, tag = WEIGHT_STEMS[component], f".{variant}" if variant else ""
    single = folder / component / f"{stem}{tag}.safetensors"
    index = folder / component / f"{stem}.safetensors.index{tag}.json"
    if index.is_file() and not (component == "image_encoder" and single.is_file()):
        return _shard_headers(index)
    if not single.is_file():
        raise _missing_weights(single, stem, variant)
    return {single: read_safetensors_header(single)}


def read_safetensors_header(path: Path) -> Header:
    """dtype and shape of each tensor in a safetensors file, without reading the tensors.

    Format: https://huggingface.co/docs/safetensors (8 bytes of length, JSON, tensors without gaps).

    Raises:
        ModelError: not a safetensors file, or not whole. Never anything else, whatever the bytes.
    """
    label = _label(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
            _refuse_disguise(head, label)
            length = int.from_bytes(head[:8], "little")
            if size < 8 or length > _MAX_HEADER_BYTES:
                raise ModelError(f"{label} is not a safetensors file")
            if 8 + length > size:
                raise ModelError(f"{label} is truncated: {size} bytes end within its header")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror})") from error
    entries = _parse_json(text, label)
    entries.pop("__metadata__", None)
    header, num_bytes = _parse_entries(entries, label)
    if 8 + length + num_bytes != size:
        fault = "truncated" if size < 8 + length + num_bytes else "too long"
        raise ModelError(f"{label} is {fault}: {size} bytes, not {8 + length + num_bytes}")
    return header


@dataclass(frozen=True)
class JsonFile:
    """A JSON object with the name of its file for the messages."""

    label: str
    values: Mapping[str, Any]

    def fault(self, sentence: str, hint: str = "") -> ModelError:
        """The error that says `sentence` of this file."""
        return ModelError(f"{self.label}: {sentence}", hint)

    def count(self, key: str, largest: int) -> int:
        """The whole number at `key`, from 1 to `largest`; ModelError if it is none."""
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.fault(f"{key} is {show(value)}, not a whole number from 1 to {largest}")
        return value

    def counts(self, key: str, largest: int) -> tuple[int, ...]:
        """As `count`, one number for each of a model's blocks, or one for all."""
        value = self.values.get(key)
        values = value if isinstance(value, list) else [value]
        sound = all(type(each) is int and 1 <= each <= largest for each in values)
        if not (sound and 1 <= len(values) <= _MAX_BLOCKS):
            raise self.fault(f"{key} is {show(value)}, not whole numbers from 1 to {largest}")
        return tuple(values)

    def require(self, key: str, wanted: int, because: str) -> None:
        """ModelError if another number than `wanted` is at `key`."""
        value = self.values.get(key)
        if type(value) is not int or value != wanted:
            raise self.fault(f"{key} is {show(value)} but must be {wanted}, {because}")


def read_json(path: Path, label: str) -> JsonFile:
    """The object in a config file, which `label` names in the messages.

    Raises:
        ModelError: the file is missing, too long, or holds no JSON object. Never anything else.
    """
    if not path.is_file():
        raise ModelError(f"{label} is missing")
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror})") from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise ModelError(f"{label} is too long for a config file")
    _refuse_disguise(text[:_SNIFFED_BYTES], label)
    return JsonFile(label, _parse_json(text, label))


def show(value: object) -> str:
    """A stranger's value on one short line, whatever its length or depth."""
    return _REPR.repr(value)


def _shard_headers(index: Path) -> dict[Path, Header]:
    config = read_json(index, _label(index))
    weight_map = config.values.get("weight_map")
    if not (isinstance(weight_map, dict) and isinstance(config.values.get("metadata"), dict)):
        raise config.fault("not an index of shards (weight_map or metadata is missing)")
    headers: dict[Path, Header] = {}
    for tensor, name in weight_map.items():
        # A plain name: neither a folder nor a way out of this one.
        if not (isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, re.A)):
            raise config.fault(f"the shard {show(name)} is not a plain *.safetensors file name")
        path = index.parent / name
        if path not in headers:
            if not path.is_file():
                raise ModelError(f"{_label(path)} is missing, though {config.label} names it")
            headers[path] = read_safetensors_header(path)
        if tensor not in headers[path]:
            raise config.fault(f"{show(tensor)} is not in {name}, where the index has it")
    return headers


def _missing_weights(single: Path, stem: str, variant: str | None) -> ModelError:
    """Says what lies there instead: another variant, or pickles."""
    names = sorted(path.name for path in single.parent.glob("*") if path.is_file())
    pattern = rf"{stem}(?:\.(\w+))?(?:-\d+-of-\d+)?\.safetensors"
    matches = [match for name in names if (match := re.fullmatch(pattern, name, re.A))]
    variants = sorted({match[1] or "" for match in matches} - {variant or ""}, reverse=True)
    if variants:
        there = ", ".join(each or "those without a variant" for each in variants)
        named = f"--variant {shlex.quote(variants[0])}"
        hint = named if variants[0] else "leave --variant out"
        return ModelError(f"{_label(single)} is missing; the weights there are: {there}", hint)
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        return ModelError(
            f"{_label(single)} is missing and {show(pickles[0])} is a pickle, which can run code: "
            "svdpp loads safetensors only",
            "ask its author for safetensors, or save it again with "
            "save_pretrained(..., safe_serialization=True)",
        )
    return ModelError(f"{_label(single)} is missing (svdpp loads safetensors only)")


def _parse_entries(entries: Mapping[str, Any], label: str) -> tuple[Header, int]:
    """The header's entries, and the number of bytes that their tensors fill without a gap."""
    header: Header = {}
    spans: list[tuple[int, int]] = []
    for name, entry in entries.items():
        dtype, shape, (start, stop) = _parse_entry(entry, f"{label} is damaged: entry {show(name)}")
        header[name] = (dtype, shape)
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ModelError(f"{label} is damaged: its tensors overlap or leave gaps")
        end = stop
    return header, end


def _parse_entry(entry: Any, label: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and first and last byte of one tensor, which agree with each other."""
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    item_bytes = _ITEM_BYTES.get(str(values.get("dtype")))
    shape, span = _sizes(values.get("shape")), _sizes(values.get("data_offsets"))
    if item_bytes is None or shape is None or span is None or len(span) != 2:
        raise ModelError(f"{label} has no known dtype, shape and data_offsets")
    start, stop = span
    if stop - start != math.prod(shape) * item_bytes:
        raise ModelError(f"{label} has {stop - start} bytes, which do not fit its shape")
    return str(values["dtype"]), shape, (start, stop)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """`value` as sizes, few and bounded, so that nothing computed from them can grow; else None."""
    if not isinstance(value, list) or len(value) > 16:
        return None
    if not all(type(each) is int and 0 <= each < 2**48 for each in value):
        return None
    return tuple(value)


def _parse_json(text: bytes, label: str) -> dict[str, Any]:
    try:
        values = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{label} does not hold valid JSON") from error
    if not isinstance(values, dict):
        raise ModelError(f"{label} does not hold a JSON object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_disguise(head: bytes, label: str) -> None:
    """What stands in place of a file after a failed download or clone."""
    start = head.lstrip().lower()
    if not head:
        raise ModelError(f"{label} is empty (0 bytes)")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{label} is a git-lfs pointer, not the file itself", "git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(f"{label} is a web page, not the file itself")


def _label(path: Path) -> str:
    """The path relative to the checkpoint's folder."""
    return f"{path.parent.name}/{path.name}"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 2

_SNIFFED_BYTES = 512
_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_BLOCKS = 8  # SVD-XT has 4
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it

_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
