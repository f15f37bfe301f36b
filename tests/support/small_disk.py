"""A disk so small that it is soon full, where this machine lets a test mount one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """`folder` as a tmpfs with mount's `options`, such as `size=64k`; skips where that needs root.

    Every test of it has a second way that always runs: RLIMIT_FSIZE, or a permission.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
