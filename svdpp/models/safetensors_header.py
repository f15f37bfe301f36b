"""Finding a component's safetensors files, and reading their headers; reads no tensor.

It also reads the JSON files of a checkpoint, which are untrusted: size and values are bounded.
Knows no torch.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from svdpp.errors import ModelError

#: dtype (as safetensors spells it) and shape of each tensor of a file, by name.
Header = dict[str, tuple[str, tuple[int, ...]]]

#: Beginning of the names of each component's weight files.
WEIGHT_STEMS: Mapping[str, str] = {
    **dict.fromkeys(("unet", "transformer", "transformer_2", "vae"), "diffusion_pytorch_model"),
    **dict.fromkeys(("audio_vae", "connectors", "vocoder"), "diffusion_pytorch_model"),
    **dict.fromkeys(("image_encoder", "text_encoder", "text_encoder_2"), "model"),
}


def weight_headers(folder: Path, component: str, variant: str | None) -> dict[Path, Header]:
    """The safetensors files with one component's weights, and the checked header of each.

    If a folder has both a single file and an index of shards, diffusers reads the index and
    transformers the file (`from_pretrained` of diffusers 0.42 and transformers 5.23).

    Args:
        folder: the checkpoint's folder.
        component: one of `WEIGHT_STEMS`.
        variant: such as `fp16` in `diffusion_pytorch_model.fp16.safetensors`; None for the plain
            names.

    Raises:
        ModelError: a file is missing, incomplete, or not a safetensors file.
    """
    there = {path.name for path in (folder / component).glob("*") if path.is_file()}
    name = _index_or_file(there, component, variant)
    path = folder / component / name
    is_index = name.endswith(".json")
    return _shard_headers(path) if is_index else {path: read_safetensors_header(path)}


def choose_weight_files(names: Collection[str], component: str, variant: str | None) -> list[str]:
    """The files among `names`, of a repository, that `weight_headers` would read.

    Args:
        names: with the component's folder, as `vae/diffusion_pytorch_model.safetensors`.
        component: as for `weight_headers`.
        variant: as for `weight_headers`.

    Raises:
        ModelError: the repository has no such weights.
    """
    there = {
        name.removeprefix(f"{component}/") for name in names if name.startswith(f"{component}/")
    }
    chosen = [_index_or_file(there, component, variant)]
    if chosen[0].endswith(".json"):
        stem, tag = _stem_and_tag(component, variant)
        shard = re.compile(rf"{re.escape(stem + tag)}-\d{{5}}-of-\d{{5}}\.safetensors", re.A)
        chosen = [*(name for name in sorted(there) if shard.fullmatch(name)), *chosen]
    return [f"{component}/{name}" for name in chosen]


def read_safetensors_header(path: Path) -> Header:
    """dtype and shape of each tensor in a safetensors file; reads no tensor.

    The safetensors library checks that the tensors fill the file without gaps.

    Raises:
        ModelError: the file is incomplete, or not a safetensors file.
    """
    label = _label(path)
    try:
        with path.open("rb") as file:
            _check_start(file.read(_CHECKED_BYTES), label)
        with safe_open(path, framework="np") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {
                name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()
            }
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        reason = short_repr(str(error)).strip("'\"")
        raise ModelError(f"{label} is damaged or truncated: {reason}") from error


@dataclass(frozen=True)
class JsonFile:
    """A JSON object, and the label of its file for messages."""

    label: str
    values: Mapping[str, Any]

    def error(self, message: str, hint: str = "") -> ModelError:
        """A `ModelError` whose message begins with the file's label."""
        return ModelError(f"{self.label}: {message}", hint)

    def count(self, key: str, largest: int) -> int:
        """The integer at `key`; ModelError if it is not from 1 to `largest`."""
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(f"{key} is {short_repr(value)}, not an integer from 1 to {largest}")
        return value

    def counts(self, key: str, largest: int) -> tuple[int, ...]:
        """Like `count`, for one integer per block of a model, or one for all blocks."""
        value = self.values.get(key)
        values = value if isinstance(value, list) else [value]
        in_range = all(type(each) is int and 1 <= each <= largest for each in values)
        if not (in_range and 1 <= len(values) <= _MAX_BLOCKS):
            raise self.error(f"{key} is {short_repr(value)}, not integers from 1 to {largest}")
        return tuple(values)

    def require(self, key: str, expected: int, reason: str) -> None:
        """ModelError if the value at `key` is not `expected`."""
        value = self.values.get(key)
        if type(value) is not int or value != expected:
            raise self.error(f"{key} is {short_repr(value)} but must be {expected}, {reason}")


def read_json(path: Path, label: str) -> JsonFile:
    """Reads the JSON object in a file; `label` names the file in messages.

    Raises:
        ModelError: the file is missing, unreadable or too long, or does not hold a JSON object.
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
    _check_start(text[:_CHECKED_BYTES], label)
    return JsonFile(label, _parse_json(text, label))


def short_repr(value: object) -> str:
    """The repr of an untrusted value, shortened to one line."""
    return _REPR.repr(value)


def _shard_headers(index: Path) -> dict[Path, Header]:
    config = read_json(index, _label(index))
    weight_map = config.values.get("weight_map")
    if not (isinstance(weight_map, dict) and isinstance(config.values.get("metadata"), dict)):
        raise config.error("not an index of shards (weight_map or metadata is missing)")
    headers: dict[Path, Header] = {}
    for tensor, name in weight_map.items():
        # A path with a separator could point outside the folder.
        if not (isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, re.A)):
            raise config.error(
                f"the shard {short_repr(name)} is not a plain *.safetensors file name"
            )
        path = index.parent / name
        if path not in headers:
            if not path.is_file():
                raise ModelError(f"{_label(path)} is missing, but {config.label} lists it")
            headers[path] = read_safetensors_header(path)
        if tensor not in headers[path]:
            raise config.error(
                f"{short_repr(tensor)} is not in {name}, but the index lists it there"
            )
    return headers


def _stem_and_tag(component: str, variant: str | None) -> tuple[str, str]:
    return WEIGHT_STEMS[component], f".{variant}" if variant else ""


def _index_or_file(there: Collection[str], component: str, variant: str | None) -> str:
    """The name among `there` that the libraries read first: an index of shards, or a file."""
    stem, tag = _stem_and_tag(component, variant)
    single, index = f"{stem}{tag}.safetensors", f"{stem}.safetensors.index{tag}.json"
    if index in there and not (stem == "model" and single in there):
        return index
    if single not in there:
        raise _missing_weights(f"{component}/{single}", stem, variant, there)
    return single


def _missing_weights(
    label: str, stem: str, variant: str | None, there: Collection[str]
) -> ModelError:
    """The error for a missing file; names other variants or pickles of the component."""
    names = sorted(there)
    pattern = rf"{stem}(?:\.(\w+))?(?:-\d+-of-\d+)?\.safetensors"
    matches = [match for name in names if (match := re.fullmatch(pattern, name, re.A))]
    variants = sorted({match[1] or "" for match in matches} - {variant or ""}, reverse=True)
    if variants:
        available = ", ".join(each or "(no variant)" for each in variants)
        hint = f"use --variant {variants[0]}" if variants[0] else "omit --variant"
        return ModelError(f"{label} is missing; available variants: {available}", hint)
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        return ModelError(
            f"{label} is missing and {short_repr(pickles[0])} is a pickle, which can run "
            "code: svdpp loads safetensors only",
            "ask the author for safetensors files, or convert the model with "
            "save_pretrained(..., safe_serialization=True)",
        )
    return ModelError(f"{label} is missing (svdpp loads safetensors only)")


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


def _check_start(data: bytes, label: str) -> None:
    """Detects what a failed download or clone leaves in place of a file."""
    start = data.lstrip().lower()
    if not data:
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

_CHECKED_BYTES = 512
_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_BLOCKS = 8  # SVD-XT has 4
