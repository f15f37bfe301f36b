"""A component's safetensors files: which of them the libraries read, and their headers.

Reads no whole tensor; knows no torch.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from svdpp.errors import ModelError
from svdpp.models.engine.configs import JsonFile, check_not_pointer, read_json, short_repr

#: dtype (as safetensors spells it) and shape of each tensor of a file, by name.
Header = dict[str, tuple[str, tuple[int, ...]]]

# A few hundred KB of several GB are enough: training changes every number of a tensor.
_SAMPLED_BYTES = 64
_HINT = (
    "--variant fp16 reads names with .fp16; no pickles (.bin) are read, which can run code: "
    "convert them with save_pretrained(..., safe_serialization=True)"
)


def weight_names(component: str, variant: str | None) -> tuple[str, str, str]:
    """The names of a component's weights: of one file; or a pattern for shards, and their index."""
    # Encoders of text and images are of transformers, the others of diffusers.
    stem = "model" if "_encoder" in component else "diffusion_pytorch_model"
    start, tag = f"{component}/{stem}", f".{variant}" if variant else ""
    return (
        f"{start}{tag}.safetensors",
        f"{start}{tag}-?????-of-?????.safetensors",
        f"{start}.safetensors.index{tag}.json",
    )


def weight_files(folder: Path, component: str, variant: str | None) -> list[str]:
    """The files with a component's weights that the libraries read: one, or the shards of an index.

    If there are both, diffusers reads the index and transformers the file (`from_pretrained` of
    diffusers 0.42 and transformers 5.23). `variant` is such as `fp16`; None: plain names.
    """
    paths = filter(Path.is_file, (folder / component).glob("*"))  # no pipe, which would never end
    names = sorted(f"{component}/{path.name}" for path in paths)
    single, shard, index = weight_names(component, variant)
    if index in names and not ("_encoder" in component and single in names):
        return _shards(read_json(folder, index), component, shard, names)
    if single in names:
        return [single]
    if others := ", ".join(name for name in names if not name.endswith(".json")):
        raise ModelError(f"{single} is missing; there are {short_repr(others)}", _HINT)
    raise ModelError(f"{single} is missing")


def _shards(index: JsonFile, component: str, pattern: str, names: list[str]) -> list[str]:
    listed = index.values.get("weight_map")
    files = listed.values() if isinstance(listed, dict) else [listed]
    for name in files:  # a pickle, or a file outside the folder
        if not fnmatch.fnmatchcase(f"{component}/{name}", pattern):
            raise index.error(f"lists {short_repr(name)}, which is not one of its shards")
    shards = sorted({f"{component}/{name}" for name in files})
    if missing := {*shards} - {*names}:  # an interrupted download
        raise index.error(f"{len(missing)} of {len(shards)} shards miss")
    return shards


def read_safetensors_header(path: Path) -> Header:
    """dtype and shape of each tensor in a safetensors file; reads no tensor."""
    entries = _read_entries(path)[1]
    return {name: (each["dtype"], tuple(each["shape"])) for name, each in entries.items()}


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """SHA-256 of the headers of `files` and of bytes from the middle of each tensor.

    It takes milliseconds. A copy of the folder has the same fingerprint. A folder with other
    weights has another one.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        header, entries = _read_entries(path)
        digest.update(header)
        with path.open("rb") as file:
            for begin, end in sorted(each["data_offsets"] for each in entries.values()):
                size = min(_SAMPLED_BYTES, end - begin)
                file.seek(8 + len(header) + (begin + end - size) // 2)
                digest.update(file.read(size))
    return digest.hexdigest()


def _read_entries(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file's header as it is, and parsed."""
    label = f"{path.parent.name}/{path.name}"
    try:
        with path.open("rb") as file:
            start = file.read(8)
            check_not_pointer(start + file.read(64), label)
            # The library checks that the tensors fill the file without gaps.
            with safe_open(path, framework="np"):
                file.seek(8)
                header = file.read(int.from_bytes(start, "little"))
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        reason = short_repr(str(error)).strip("'\"")
        raise ModelError(f"{label} is damaged or truncated: {reason}") from error
    entries: dict[str, Any] = json.loads(header)
    entries.pop("__metadata__", None)
    return header, entries
