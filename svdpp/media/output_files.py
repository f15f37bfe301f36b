"""Owns getting a file or a folder whole into its place; knows nothing of what is in it.

Nothing is seen half written: it grows under a hidden name beside its place until it is whole. Its
writer holds a lock on it meanwhile, so that what a killed one left behind is told from what is
being written, by another run too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from svdpp.errors import OutputError, SvdppError

# Runs that begin together with one new folder make and remove it under each other's hands.
_MAX_PROBES = 5


@contextlib.contextmanager
def atomic_output(name: str, suffix: str, files: re.Pattern[str] | None = None) -> Iterator[Path]:
    """An empty file, or folder, to fill: it takes the place of `name` if the block ends well.

    Folders above `name` are created.

    Args:
        name: the place; links are followed, what lies there stays until the end.
        suffix: of the temporary name, for those who judge a file by it.
        files: None for a file. For a folder the names of its files: one that holds others is
            not replaced.

    Raises:
        OutputError: an OSError, ValueError, RuntimeError or SvdppError, here or in the block.
    """
    temporary, lock = None, -1
    try:
        path = Path(os.path.realpath(name))  # through links, as open() would write
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_place(path, files)
        temporary = path.with_name(_hidden_name() + suffix)  # short beside a long name
        lock = _make_locked(temporary, is_folder=files is not None)
        yield temporary
        sync(temporary)
        _move(temporary, path)
        with contextlib.suppress(OSError):  # some file systems refuse to sync a folder
            sync(path.parent)
    except (OSError, ValueError, RuntimeError, SvdppError) as error:
        hint = error.hint if isinstance(error, SvdppError) else ""
        raise OutputError(f"{name!r} cannot be written: {reason(error)}", hint) from error
    finally:
        if temporary is not None:
            _remove(temporary)
        if lock >= 0:
            os.close(lock)


def remove_abandoned(folder: Path) -> None:
    """Removes what writers that were killed left half written in `folder`.

    Only what was left on this host: on a file system between hosts locks may not reach across.
    """
    for path in folder.glob(f".svdpp-{_host()}-*"):
        with contextlib.suppress(OSError):  # it has a living writer, or is not ours to remove
            _remove_if_abandoned(path)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Writes `record` as indented JSON, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
        ValueError: a number in it is not finite; TypeError: a value is no JSON.
    """
    text = json.dumps(dict(record), indent=2, allow_nan=False) + "\n"
    with atomic_output(str(path), ".json") as temporary:
        temporary.write_text(text, encoding="ascii")


def remove(path: Path) -> None:
    """Removes the file, or the folder and all in it; one that is not there is no matter."""
    _remove(path)


def check_writable(folder: Path) -> None:
    """Proves that `folder` is there, or can be made, and takes a file; leaves nothing behind.

    What killed writers left in it goes as well.

    Raises:
        OutputError: it cannot be created, is no folder, or takes no file.
    """
    try:
        for tries_left in reversed(range(_MAX_PROBES)):
            try:
                _probe(folder)
                break
            except (FileNotFoundError, FileExistsError):  # another run's probe took it away
                if not tries_left:
                    raise
        remove_abandoned(folder)
    except (FileExistsError, NotADirectoryError) as error:
        what = f"cannot write into {str(folder)!r}: a file is in its place, or above it"
        raise OutputError(what) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {reason(error)}") from error


def check_free(name: str, files: re.Pattern[str] | None = None) -> None:
    """Makes sure that what lies at `name`, if anything, may be replaced; as `atomic_output` will.

    Raises:
        OutputError: it is something else than what would take its place.
    """
    try:
        _check_place(Path(os.path.realpath(name)), files)
    except OSError as error:
        raise OutputError(f"{name!r} cannot be written: {reason(error)}") from error


def sync(path: Path) -> None:
    """Waits until what was written to a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """What went wrong, in as few words as the error has."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _probe(folder: Path) -> None:
    """Puts a file into `folder` and takes it away again, with what had to be made for it."""
    probe = folder / _hidden_name()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        probe.write_bytes(b"svdpp")
    finally:
        probe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run needs it, or was quicker to remove it
            for path in missing:
                path.rmdir()


def _check_place(path: Path, files: re.Pattern[str] | None) -> None:
    if files is not None and path.is_dir():
        others = [name for name in os.listdir(path) if not files.fullmatch(name)]
        if others:
            raise FileExistsError(f"the folder holds other files, {sorted(others)[0]!r} for one")
    elif path.exists() and (files is not None or not path.is_file()):
        raise FileExistsError("something else has that name")


def _move(temporary: Path, path: Path) -> None:
    if not path.is_dir():
        os.replace(temporary, path)
        return
    # A folder that is not empty cannot be replaced in one go. Between the two renames it is the
    # only one that is whole, so it has no name that `remove_abandoned` would take.
    old = path.with_name(f".svdpp-old-{secrets.token_hex(4)}")
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(old, path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            path.unlink()


def _make_locked(path: Path, *, is_folder: bool) -> int:
    """Makes an empty file or folder; a descriptor whose lock ends with this process."""
    while True:
        if is_folder:
            path.mkdir()
        else:
            path.open("xb").close()
        descriptor = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # without locks nobody takes it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return descriptor
        os.close(descriptor)  # another run's `remove_abandoned` came before the lock


def _remove_if_abandoned(path: Path) -> None:
    # O_NONBLOCK: a pipe of that name would wait for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(descriptor)


def _hidden_name() -> str:
    return f".svdpp-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    """This host in eight letters: its name can be long, and hold anything."""
    return f"{zlib.crc32(os.fsencode(socket.gethostname())):08x}"
