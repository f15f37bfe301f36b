"""Unix time of a server of the soak, which a file sets ahead; Python imports this at its start.

libfaketime 0.9.10 cannot do it: without its monotonic clock, `time.sleep` of Python 3.11 raises
EINVAL, and with it all deadlines jump as well, which no real clock makes them do.
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
