"""Owns writing a file or a folder completely or not at all; knows nothing of its contents.

A file is written under a hidden name beside its place and renamed when it is complete. Its writer
holds a lock on it, so that any run can tell what a killed writer left from what is being written.
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
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from svdpp.errors import OutputError, SvdppError


@contextlib.contextmanager
def atomic_output(name: str, suffix: str, files: re.Pattern[str] | None = None) -> Iterator[Path]:
    """An empty file or folder to fill; it replaces `name` if the block ends without an error.

    Folders above `name` are created.

    Args:
        name: the final path; links are followed. What lies there stays until the block ends.
        suffix: of the temporary name, for writers that choose the format by it.
        files: None for a file. For a folder, the names of its files: a folder that holds others
            is not replaced.

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
            remove(temporary)
        if lock >= 0:
            os.close(lock)


def remove_abandoned(folder: Path) -> None:
    """Removes the unfinished files that killed writers on this host left in `folder`.

    Those of other hosts stay: on a shared file system a lock may not be visible between hosts.
    """
    for path in folder.glob(f".svdpp-{_host()}-*"):
        with contextlib.suppress(OSError):  # its writer lives, or it is not ours to remove
            _remove_if_abandoned(path)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Writes `record` as indented JSON, completely or not at all.

    Raises:
        OutputError: the file cannot be written.
        ValueError: a number in it is not finite; TypeError: a value is not JSON.
    """
    text = json.dumps(dict(record), indent=2, allow_nan=False) + "\n"
    with atomic_output(str(path), ".json") as temporary:
        temporary.write_text(text, encoding="ascii")


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents, as far as possible; a missing one is fine."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            path.unlink()


def check_writable(folder: Path) -> None:
    """Proves that `folder` takes a file, or can be created; leaves nothing behind.

    It does not create `folder`: another run that starts with the same one would find it, and then
    lose it. What killed writers left in it is removed.

    Raises:
        OutputError: it cannot be created, is no folder, or takes no file.
    """
    try:
        _probe(Path(os.path.realpath(folder)))
        remove_abandoned(folder)
    except (FileExistsError, NotADirectoryError) as error:
        what = f"cannot write into {str(folder)!r}: a file is in its place, or above it"
        raise OutputError(what) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {reason(error)}") from error


def check_free(name: str, files: re.Pattern[str] | None = None) -> None:
    """Checks that `atomic_output` may replace what lies at `name`, if anything.

    Raises:
        OutputError: a folder lies where a file would go, a file where a folder would, or a folder
            with other files.
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
    """The shortest text that the error has."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _probe(folder: Path) -> None:
    """Writes and removes a file in `folder`, or in the nearest folder above it that exists."""
    while True:
        try:
            is_folder = stat.S_ISDIR(folder.stat().st_mode)
            break
        except FileNotFoundError:
            folder = folder.parent
    if not is_folder:
        raise NotADirectoryError
    probe = folder / _hidden_name()
    lock = _make_locked(probe, is_folder=False)
    try:
        probe.write_bytes(b"svdpp")
    finally:
        remove(probe)
        os.close(lock)


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
    # A folder that is not empty cannot be replaced by one rename. Between the two renames the old
    # one is the only complete one, so its name is not one that `remove_abandoned` looks for.
    old = path.with_name(f".svdpp-old-{secrets.token_hex(4)}")
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(old, path)
        raise
    remove(old)


def _make_locked(path: Path, *, is_folder: bool) -> int:
    """Creates an empty file or folder; a descriptor whose lock ends with this process.

    Another run's `remove_abandoned` can remove it as long as it is not locked: then once more.
    """
    while True:
        if is_folder:
            path.mkdir()
        else:
            path.open("xb").close()
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # without locks nobody takes it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return descriptor
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    # O_NONBLOCK: a pipe of that name would wait for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
    finally:
        os.close(descriptor)


def _hidden_name() -> str:
    return f".svdpp-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    """This host in eight characters: its name can be long and hold any character."""
    return f"{zlib.crc32(os.fsencode(socket.gethostname())):08x}"
