"""SHA-256 of whole files, with a cache; imports no torch.

Hashing 100 GB takes minutes, so hashes are cached in memory and in `~/.cache/svdpp/sha256.json` (or
below `XDG_CACHE_HOME`). A cached hash is used only if the file's size, inode, modification time and
change time (ctime) have not changed. Programs such as `touch` cannot set the change time.
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

#: Seconds that must have passed since a file's last change before its hash is cached. Within this
#: time, the file may change again without getting a new time stamp.
SETTLED_SECONDS = 2.0
_THREADS = 4
_MAX_ENTRIES = 10_000
_MAX_CACHE_BYTES = 2**24

_lock = threading.Lock()
#: Cache in memory: state (size, inode, times) and SHA-256 of each file, by absolute path. None: the
#: cache file has not been read yet.
_known: dict[str, tuple[list[int], str]] | None = None


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file, in hex. Files without a cached hash are read in parallel.

    Args:
        paths: Paths of files of any size; symbolic links are followed.

    Raises:
        OSError: A file cannot be read.
    """
    listed = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(listed, pool.map(cached_sha256, listed), strict=True))


def cached_sha256(path: Path) -> str:
    """Return the SHA-256 of a whole file, in hex, from the cache if the file has not changed.

    Args:
        path: Path of the file; symbolic links are followed.

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
            # Move the entry to the end, because a full cache drops entries at its start.
            entries.pop(key, None)
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
        # A missing or damaged cache file counts as an empty cache.
        with suppress(OSError, ValueError, TypeError, AttributeError):
            with _cache_path().open("rb") as file:
                content = json.loads(file.read(_MAX_CACHE_BYTES))
            _known = {
                str(key): (list(state), str(digest)) for key, (state, digest) in content.items()
            }
    return _known


def _write(entries: dict[str, tuple[list[int], str]]) -> None:
    """Write the cache of hashes to its file. If several processes write it, the last one wins."""
    for key in list(entries)[:-_MAX_ENTRIES]:
        del entries[key]
    path = _cache_path()
    with suppress(OSError):  # if the cache cannot be written, files are just hashed again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sha256-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entries, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
