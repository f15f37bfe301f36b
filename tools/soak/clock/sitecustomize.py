"""Shift the unix time of a process by the seconds in a file.

Python imports this module at its start.

libfaketime 0.9.10 is not suitable. If it does not fake the monotonic clock, `time.sleep` of Python
3.11 raises EINVAL. If it fakes the monotonic clock, all deadlines jump, which never happens on a
real machine.
"""

from __future__ import annotations

import os
import time

_FILE = os.environ["SVDPP_SOAK_CLOCK"]
_time = time.time


def _ahead() -> float:
    try:
        with open(_FILE) as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0


def _shifted() -> float:
    return _time() + _ahead()


time.time = _shifted
