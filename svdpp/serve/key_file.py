"""Owns adding an API key to the file of keys, which holds only its hash."""

from __future__ import annotations

import os
from pathlib import Path

from svdpp.errors import OutputError, RequestError
from svdpp.media import output_files
from svdpp.serve import keys


def add_key(path: Path, name: str) -> str:
    """Creates a key and appends its hash to the file, which is created if it does not exist.

    Args:
        path: of the file.
        name: of the owner of the jobs; one that has a key gets another.

    Returns:
        The key, which is stored nowhere.

    Raises:
        RequestError: the name cannot be used, or other users may read the file.
        InputError: the file is not one of keys.
        OutputError: it cannot be written.
    """
    key, sha256 = keys.new_key()
    try:
        keys.parse_words([name, sha256], [])
    except ValueError as error:
        raise RequestError(f"--new-key {name!r}: {error}") from None
    if path.exists() and path.stat().st_size:
        keys.read_keys(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND, so that two commands at once add two lines.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            before = path.read_bytes()[-1:]
            gap = "" if before in (b"", b"\n") else "\n"
            os.write(file, f"{gap}{name} {sha256}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        reason = output_files.reason(error)
        raise OutputError(f"cannot write {str(path)!r}: {reason}") from error
    return key
