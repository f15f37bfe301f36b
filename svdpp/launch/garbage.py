"""Owns how rarely a process that imports torch searches for garbage; knows no torch."""

from __future__ import annotations

import atexit
import gc


def collect_rarely() -> None:
    """Saves a sixth of the time that the imports of torch and diffusers and their end take.

    These imports create a million objects that stay. By default Python searches them for garbage
    again and again, and several times more while it exits.
    """
    gc.set_threshold(10_000, 20, 100)
    atexit.register(gc.freeze)
