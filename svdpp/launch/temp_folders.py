"""Owns the private folders that a run makes among the system's temporary files, and their end.

They go when their user is done, else when the process ends, and, through `remove_all`, before it
is ended without further ado. Light: the command line uses it as well.
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

# With the process that made each: a fork of it has them in its memory, too, and must not take them.
_folders: dict[Path, int] = {}


def make_folder(prefix: str) -> Path:
    """A new folder that nobody but this user can enter (mkdtemp makes it 0700)."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _folders[folder] = os.getpid()
    return folder


def remove_folder(folder: Path) -> None:
    """Removes a folder that `make_folder` made; harmless the second time."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.pop(folder, None)


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """A new folder for as long as the block lasts."""
    made = make_folder(prefix)
    try:
        yield made
    finally:
        remove_folder(made)


def remove_all() -> None:
    """Removes every folder that this process still has."""
    for made, maker in list(_folders.items()):
        if maker == os.getpid():
            remove_folder(made)


def remove_multiprocessing_folder() -> None:
    """Removes the folder of multiprocessing's own sockets, which it keeps until a normal exit.

    Called where there will be none: in a process that ends at once, or whose starter is gone.
    """
    if "multiprocessing.util" in sys.modules:
        with contextlib.suppress(OSError):  # it makes one where there is none yet
            shutil.rmtree(sys.modules["multiprocessing.util"].get_temp_dir(), ignore_errors=True)


atexit.register(remove_all)
