"""Atomic writes of files and folders, locks of folders, and translation of disk errors.

A file is written under a hidden name in the same folder and renamed when it is complete. While a
process writes a file, it holds a lock on the file. So other runs can distinguish a file in progress
from an abandoned file.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from svdpp.errors import OutputError, RequestError, SvdppError

_LOCK = ".svdpp-lock"


@contextlib.contextmanager
def atomic_output(name: str, suffix: str, files: re.Pattern[str] | None = None) -> Iterator[Path]:
    """Yield a temporary file or folder, which replaces `name` if the `with` block succeeds.

    Parent folders of `name` are created, and links are followed.

    Args:
        name: Path of the file or folder.
        suffix: Suffix of the temporary name, by which writers such as ffmpeg choose the format.
        files: Pattern for the names of the files in an output folder. An existing folder with other
            files is not replaced. None: the output is a file.

    Raises:
        OutputError: The output cannot be written, or the block raised an OSError, a ValueError, a
            RuntimeError or an error of svdpp.
    """
    temporary, lock = None, -1
    try:
        path = Path(os.path.realpath(name))  # symbolic links are followed, as by open()
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_place(path, files)
        # The temporary name is short, because the output's name may already have the maximum
        # length.
        temporary = path.with_name(_hidden_name() + suffix)
        lock = _make_locked(temporary, is_folder=files is not None)
        yield temporary
        fsync(temporary)
        _move(temporary, path)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            fsync(path.parent)
    except (OSError, ValueError, RuntimeError, SvdppError) as error:
        hint = error.hint if isinstance(error, SvdppError) else ""
        inner = error.details if isinstance(error, SvdppError) else {}
        details = {"path": name, "reason": error_reason(error), **inner}
        message = f"{name!r} cannot be written: {error_reason(error)}"
        raise OutputError(message, hint, details=details) from error
    finally:
        if temporary is not None:
            remove(temporary)
        if lock >= 0:
            os.close(lock)


@contextlib.contextmanager
def lock_folder(folder: Path, clip: str = "") -> Iterator[str]:
    """Lock an output folder, or one clip in it, against other runs during the `with` block.

    A missing folder is created, and removed at the end if it is empty.

    Args:
        folder: Folder of the files.
        clip: Name of the clip to lock. Other processes can lock other clips of the folder
            meanwhile, but not this clip or the whole folder. Empty: the whole folder is locked, and
            no other process can lock the folder or a clip in it.

    Yields:
        Reason why the file system cannot lock; "" if it can.

    Raises:
        RequestError: Another process holds the lock.
        OutputError: The folder cannot be written.
    """
    check_writable(folder)
    is_new = not folder.exists()
    try:
        with contextlib.ExitStack() as locks:
            with disk_errors(f"{str(folder)!r} cannot be written"):
                folder.mkdir(parents=True, exist_ok=True)
                why_not = locks.enter_context(_lock(folder / _LOCK, is_shared=bool(clip)))
                if clip:
                    locks.enter_context(_lock(folder / f"{_LOCK}-{_checksum(clip)}"))
            yield why_not
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # an OSError means that the folder is not empty
                folder.rmdir()


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files in `folder` whose writers were killed on this host.

    Unfinished files of other hosts stay, because this host may not see the locks of their writers.
    """
    for path in folder.glob(f".svdpp-{_host_hash()}-*"):
        # An OSError means that the file's writer still runs and holds the lock, or that permission
        # is missing.
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write `record` to a file as indented JSON, completely or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    write_text(path, json_text(record))


def json_text(record: Mapping[str, object]) -> str:
    """Return `record` as indented JSON, as `write_json` writes it."""
    # `json.dumps` would need more memory: it makes a list of all pieces of the text.
    text = io.StringIO()
    json.dump(dict(record), text, indent=2, allow_nan=False)
    text.write("\n")
    return text.getvalue()


def write_text(path: Path, text: str) -> None:
    """Write `text` to a file, completely or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    with atomic_output(str(path), path.suffix) as temporary:
        temporary.write_text(text)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents; ignore errors."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # Errors are ignored, because most callers clean up after another error, and report only
        # that error.
        with contextlib.suppress(OSError):
            path.unlink()


def check_writable(folder: Path) -> None:
    """Raise an `OutputError` unless `folder` is writable; remove files that killed runs left there.

    A missing folder is not created for the check, because another run could begin to use the folder
    before the check removes it.

    Raises:
        OutputError: The folder cannot be written to or created.
    """
    try:
        existing = Path(os.path.realpath(folder))
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError("the path, or a folder above it, is a file")
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"svdpp")
        remove_abandoned(folder)
    except (OSError, ValueError) as error:
        details = {"path": str(folder), "reason": error_reason(error)}
        message = f"cannot write into {str(folder)!r}: {error_reason(error)}"
        raise OutputError(message, details=details) from error


def check_replaceable(name: str, files: re.Pattern[str] | None = None) -> None:
    """Raise an `OutputError` if `atomic_output` may not replace what exists at `name`.

    Args:
        name: Path of the file or folder.
        files: Pattern for the names of the files in an output folder; see `atomic_output`.

    Raises:
        OutputError: `name` exists, and is of the wrong kind or a folder with other files.
    """
    with disk_errors(f"{name!r} cannot be written"):
        _check_place(Path(os.path.realpath(name)), files)


def fsync(path: Path) -> None:
    """Wait until the data of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def error_reason(error: BaseException) -> str:
    """Return the reason for an error, for messages: `strerror`, the error's text, or its type."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Let only this user open the files that the `with` block and its child processes create."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def disk_errors(text: str) -> Iterator[None]:
    """Turn an OSError in the `with` block into an `OutputError`.

    Args:
        text: Beginning of the message; the reason follows.

    Raises:
        OutputError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{text}: {error_reason(error)}", details={"reason": error_reason(error)}
        ) from error


@contextlib.contextmanager
def _lock(path: Path, *, is_shared: bool = False) -> Iterator[str]:
    """Lock a file during the `with` block; yield "", or the reason why locking is not possible."""
    descriptor, why_not = _open_locked(path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
    try:
        yield why_not
    finally:
        with contextlib.suppress(OSError):
            # An exclusive lock fails while others hold a shared lock, so only the last holder
            # removes the file.
            if not why_not:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path, lock: int) -> tuple[int, str]:
    """Open and lock a file; return its descriptor, and why it could not be locked ("" if it could).

    Raises:
        RequestError: Another process holds the lock.
    """
    while True:
        # NFS locks only files that are open for writing.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            # The previous holder of the lock may have removed the file after it was opened here.
            # Then a new file is locked.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor, ""
        except BlockingIOError:
            os.close(descriptor)
            raise RequestError(
                f"another svdpp run is writing into {str(path.parent)!r}",
                "wait until the other run has ended, or name another `out`",
            ) from None
        except OSError as error:
            return descriptor, error_reason(error)
        os.close(descriptor)


def _check_place(path: Path, files: re.Pattern[str] | None) -> None:
    """Raise a `FileExistsError` if an output may not replace what exists at `path`.

    Raises:
        FileExistsError: `path` is of the wrong kind, or a folder with other files.
    """
    if files is not None and path.is_dir():
        others = [name for name in os.listdir(path) if not files.fullmatch(name)]
        if others:
            raise FileExistsError(f"the folder holds other files, such as {sorted(others)[0]!r}")
    elif path.exists() and (files is not None or not path.is_file()):
        raise FileExistsError("the path is not a regular file or folder")


def _move(temporary: Path, path: Path) -> None:
    """Rename a finished output to `path`, in place of an old file or folder of this name."""
    if not path.is_dir():
        os.replace(temporary, path)
        return
    # A rename cannot replace a folder that is not empty, so the old folder is renamed first. Its
    # new name must not match the pattern of `remove_abandoned`: if this process is killed between
    # the two renames, the old folder has to survive.
    old = path.with_name(f".svdpp-old-{secrets.token_hex(4)}")
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(old, path)
        raise
    remove(old)


def _make_locked(path: Path, *, is_folder: bool) -> int:
    """Create and lock an empty output file or folder; return the descriptor that holds the lock.

    Before the file is locked, `remove_abandoned` of another run may remove it; then it is created
    again. The lock ends when the descriptor is closed or the process ends.
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
        # On a file system that cannot lock, the file is safe without a lock: `remove_abandoned`
        # cannot lock files there either, and removes none.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return descriptor
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before the file was locked here, another run may have removed it, and its writer may have
        # created it again. Then the file that now has this name is in use, and must stay.
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            remove(path)
    finally:
        os.close(descriptor)


def _hidden_name() -> str:
    return f".svdpp-{_host_hash()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host_hash() -> str:
    """Return a hash of this host's name for file names: eight hexadecimal digits."""
    return _checksum(socket.gethostname())


def _checksum(name: str) -> str:
    return f"{zlib.crc32(os.fsencode(name)):08x}"
