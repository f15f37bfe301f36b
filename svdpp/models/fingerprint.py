"""The fingerprint of a folder's weights: a hash of samples, computed in milliseconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from svdpp.errors import ModelError

# A few hundred KB of several GB are enough: training changes every number of a tensor.
_SAMPLED_BYTES = 64


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """SHA-256 of the headers of safetensors `files` and of bytes from the middle of each tensor.

    A copy of the folder has the same fingerprint. A folder with other weights has another one.

    Args:
        folder: file names are relative to it.
        files: with headers that have been checked.

    Raises:
        ModelError: a file can no longer be read.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0")
        try:
            for sample in _samples(path):
                digest.update(sample)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{name} cannot be read: it changed during the check") from error
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """The file's header, then the middle of each tensor in file order."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        yield header
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for begin, end in sorted(entry["data_offsets"] for entry in entries.values()):
            num_bytes = min(_SAMPLED_BYTES, end - begin)
            file.seek(8 + length + (begin + end - num_bytes) // 2)
            yield file.read(num_bytes)
