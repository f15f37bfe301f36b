"""Owns reading small text files from strangers: costs, starts, configurations, clips' metadata."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from svdpp.errors import InputError

#: No such file is as large.
MAX_BYTES = 1_000_000


def read_small_file(path: Path, what: str) -> bytes:
    """The content of a regular file of at most `MAX_BYTES`.

    A pipe or device in its place is refused instead of waited for.

    Args:
        path: of the file.
        what: the kind of file, for messages, such as `costs`.

    Raises:
        InputError: it cannot be read, is no regular file, or is larger.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{what} {str(path)!r} is not a regular file")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} {str(path)!r} cannot be read: {reason}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} {str(path)!r} is larger than {MAX_BYTES} bytes")
    return data


def is_version(value: object, version: int) -> bool:
    """Whether a file's `schema_version` is `version`; `true` and `1.0` are not 1."""
    return type(value) is int and value == version
