"""Owns getting a file or a folder whole into its place; knows nothing of what is in it.

Nothing is seen half written: it grows under a hidden name beside its place until it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from svdpp.errors import OutputError, SvdppError


@contextlib.contextmanager
def in_place_of(name: str, suffix: str, files: re.Pattern[str] | None = None) -> Iterator[Path]:
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
    temporary = None
    try:
        path = Path(os.path.realpath(name))  # through links, as open() would write
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_place(path, files)
        temporary = path.with_name(_hidden_name() + suffix)  # short beside a long name
        if files is not None:
            temporary.mkdir()
        else:
            temporary.open("xb").close()
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


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Writes `record` as indented JSON, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
        ValueError: a number in it is not finite; TypeError: a value is no JSON.
    """
    text = json.dumps(dict(record), indent=2, allow_nan=False) + "\n"
    with in_place_of(str(path), ".json") as temporary:
        temporary.write_text(text, encoding="ascii")


def check_writable(folder: Path) -> None:
    """Proves that `folder` is there, or can be made, and takes a file; leaves nothing behind.

    Raises:
        OutputError: it cannot be created, is no folder, or takes no file.
    """
    probe = folder / _hidden_name()
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"svdpp")
        finally:
            probe.unlink(missing_ok=True)
            for path in missing:
                path.rmdir()
    except (FileExistsError, NotADirectoryError) as error:
        what = f"cannot write into {str(folder)!r}: a file is in its place, or above it"
        raise OutputError(what) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {reason(error)}") from error


def check_free(name: str, files: re.Pattern[str] | None = None) -> None:
    """Makes sure that what lies at `name`, if anything, may be replaced; as `in_place_of` will.

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
    old = path.with_name(_hidden_name())  # a folder that is not empty cannot be replaced in one go
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


def _hidden_name() -> str:
    return f".svdpp-{os.getpid()}-{secrets.token_hex(4)}"
