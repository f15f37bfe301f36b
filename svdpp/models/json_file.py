"""The JSON files of a checkpoint, which are untrusted: size and values are bounded."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.errors import ModelError


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

    def require(self, key: str, expected: object, reason: str) -> None:
        """ModelError if the value at `key` is not `expected`."""
        if (value := self.values.get(key)) != expected:
            raise self.error(f"{key} is {short_repr(value)} but must be {expected}, {reason}")

    def refuse(self, options: Mapping[str, str]) -> None:
        """ModelError if one of `options` is set; their values are the reasons."""
        for key, reason in options.items():
            if self.values.get(key):
                raise self.error(f"{key} is not supported: it {reason}")


def read_json(folder: Path, name: str) -> JsonFile:
    """Reads the JSON object in a file of a checkpoint."""
    if not (folder / name).is_file():  # also a pipe, which would never end
        raise ModelError(f"{name} is missing")
    try:
        with (folder / name).open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{name} cannot be read ({error.strerror})") from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise ModelError(f"{name} is too long for a config file")
    check_start(text, name)
    try:
        values = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} does not hold valid JSON") from error
    if not isinstance(values, dict):
        raise ModelError(f"{name} does not hold a JSON object")
    return JsonFile(name, values)


def check_start(data: bytes, label: str) -> None:
    """Detects what a failed download or clone leaves in place of a file."""
    start = data[:_CHECKED_BYTES].lstrip().lower()
    if not data:
        raise ModelError(f"{label} is empty (0 bytes)")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{label} is a git-lfs pointer, not the file itself", "git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(f"{label} is a web page, not the file itself")


def short_repr(value: object) -> str:
    """The repr of an untrusted value, shortened to one line."""
    return _REPR.repr(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 2
_CHECKED_BYTES = 512
_MAX_CONFIG_BYTES = 16 * 2**20
