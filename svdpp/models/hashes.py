"""SHA-256 of whole files, each taken once and kept until the file changes; knows no torch.

A hash of 100 GB takes minutes, so results are kept in this process and, for later ones, in
`~/.cache/svdpp/sha256.json` (below `XDG_CACHE_HOME` if that is set). A result holds for one size,
inode, modification time and change time. The kernel sets the change time; `touch` cannot.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

#: A file that changed this recently may change again without another time, so no result is kept.
SETTLED_SECONDS = 2.0
_THREADS = 4
_MAX_ENTRIES = 10_000
_MAX_CACHE_BYTES = 2**24

_lock = threading.Lock()
#: State and hash of each file, by its absolute path. None: the file of the cache has not been read.
_known: dict[str, tuple[list[int], str]] | None = None


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each whole file, in hex; files that have changed are read in parallel.

    Args:
        paths: Files of any size; links are followed.

    Raises:
        OSError: A file cannot be read.
    """
    listed = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(listed, pool.map(file_sha256, listed), strict=True))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a whole file, in hex; it is read if it is new or has changed.

    Args:
        path: File; links are followed.

    Raises:
        OSError: The file cannot be read.
    """
    key, state = str(path.resolve()), _state(path)
    with _lock:
        known = _entries().get(key)
    if known is not None and known[0] == state:
        return known[1]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _state(path) == state and _is_settled(state):
        with _lock:
            entries = _entries()
            entries.pop(key, None)  # to the end: the oldest are dropped first
            entries[key] = state, digest
            _write(entries)
    return digest


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _is_settled(state: list[int]) -> bool:
    return all(time.time() - nanoseconds / 1e9 > SETTLED_SECONDS for nanoseconds in state[2:])


def _cache_path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "svdpp" / "sha256.json"


def _entries() -> dict[str, tuple[list[int], str]]:
    global _known
    if _known is None:
        _known = {}
        # A cache that is missing, or that is not as `_write` leaves it, is as good as an empty one.
        with suppress(OSError, ValueError, TypeError, AttributeError):
            with _cache_path().open("rb") as file:
                content = json.loads(file.read(_MAX_CACHE_BYTES))
            _known = {
                str(key): (list(state), str(digest)) for key, (state, digest) in content.items()
            }
    return _known


def _write(entries: dict[str, tuple[list[int], str]]) -> None:
    """Replace the file of the cache; other processes may do the same, and the last one stays."""
    for key in list(entries)[:-_MAX_ENTRIES]:
        del entries[key]
    path = _cache_path()
    with suppress(OSError):  # a home that is full or read-only costs time, and nothing else
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sha256-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entries, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
