"""Owns the space on the disk of the data folder: when there is too little, and a reserve.

A full disk must not keep clients from removing clips, which would free space. So a file holds some
space while there is enough, and is removed once the disk is full: a change of the queue fits then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: The name of the file that holds the reserve.
RESERVE = ".svdpp-reserve"

#: SQLite's log grows to this size before it is written back.
_RESERVE_BYTES = 4 * 2**20
_LOW_BYTES = 256 * 2**20
# Of a disk that is smaller than eight times the above.
_LOW_PART = 8


class Disk:
    """The disk of a data folder.

    Args:
        folder: the data folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reserve = folder / RESERVE

    @property
    def is_low(self) -> bool:
        """Whether so little is free that no clip should be begun or taken."""
        try:
            return _free(self._folder) < _low_mark(self._folder)
        except OSError:  # the folder is gone, or its disk
            return True

    def keep_reserve(self) -> None:
        """Gives the reserve up if the disk is full, and takes it back once there is enough."""
        free = _free(self._folder)
        if free < _RESERVE_BYTES:
            self._reserve.unlink(missing_ok=True)
        elif free > _low_mark(self._folder) + _RESERVE_BYTES and not self._reserve.exists():
            self._take()

    def _take(self) -> None:
        try:
            with self._reserve.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        except OSError:  # a quota, perhaps: the queue works without
            with contextlib.suppress(OSError):
                self._reserve.unlink()


def _free(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _low_mark(folder: Path) -> int:
    about = os.statvfs(folder)
    return min(_LOW_BYTES, about.f_blocks * about.f_frsize // _LOW_PART)
