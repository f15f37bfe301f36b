"""The private temporary folders of a run, and their removal.

A folder is removed after its use, or when the process exits. A process that exits by `os._exit`
calls `remove_all` first. The module imports no heavy library, because commands use it too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# With the id of the process that created each: a forked child inherits this dictionary, but must
# not remove the folders.
_folders: dict[Path, int] = {}


def make_folder(prefix: str, within: str | None = None) -> Path:
    """Creates a folder that only this user can open (mkdtemp sets its mode to 0700)."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
    _folders[folder] = os.getpid()
    return folder


def remove_folder(folder: Path) -> None:
    """Removes a folder that `make_folder` created; does nothing if it is already removed."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.pop(folder, None)


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """Creates a folder and removes it at the end of the block."""
    made = make_folder(prefix)
    try:
        yield made
    finally:
        remove_folder(made)


def remove_all() -> None:
    """Removes every folder that this process created and has not removed."""
    for made, pid in list(_folders.items()):
        if pid == os.getpid():
            remove_folder(made)


def remove_multiprocessing_folder() -> None:
    """Removes the folder of multiprocessing's sockets, which Python removes only at a normal exit.

    For a process that exits by `os._exit`, or whose starter has been killed.
    """
    if "multiprocessing.util" in sys.modules:
        with contextlib.suppress(OSError):  # get_temp_dir creates the folder if there is none
            shutil.rmtree(sys.modules["multiprocessing.util"].get_temp_dir(), ignore_errors=True)


atexit.register(remove_all)
