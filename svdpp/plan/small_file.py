"""Reading small untrusted text files: costs, configurations, metadata."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from svdpp.errors import InputError

#: The default limit.
MAX_BYTES = 1_000_000


def read_small_file(path: Path, what: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`.

    A pipe or device is refused, because a read of it could block.

    Args:
        path: of the file.
        what: the kind of file, for messages, such as `costs file`.
        max_bytes: the limit.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{what} {str(path)!r} is not a regular file")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} {str(path)!r} cannot be read: {reason}") from error
    if len(data) > max_bytes:
        raise InputError(f"{what} {str(path)!r} is larger than {max_bytes} bytes")
    return data


def is_version(value: object, version: int) -> bool:
    """Whether a file's `schema_version` is `version`; `true` and `1.0` do not count as 1."""
    return type(value) is int and value == version
