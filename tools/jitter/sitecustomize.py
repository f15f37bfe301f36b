"""Pause a process's threads at random times, to find races in tests.

Python imports this module at its start if the module's folder is on PYTHONPATH. So the processes
that tests start pause their threads too. The pauses begin in a profile function, which Python calls
at each call and return. Main threads have no profile function, because it would slow down the
imports of libraries; `tools.jitter.plugin` stops the whole process instead.
"""

import os
import random
import threading
import time
from types import FrameType
from typing import Any

SEED = os.environ["JITTER_SEED"]

_MEAN_SECONDS_BETWEEN = 1.0


class _Thread(threading.local):
    """Time of a thread's next random pause, and the thread's random generator."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.chance = random.Random(f"{SEED} {os.getpid()} {name}")
        self.next_pause = time.monotonic() + seconds_between(self.chance)


def seconds_between(chance: random.Random) -> float:
    """Return a random number of seconds until a thread's next pause."""
    return chance.expovariate(1 / _MEAN_SECONDS_BETWEEN)


def seconds_of_pause(chance: random.Random) -> float:
    """Return the random length of a thread's pause in seconds."""
    return chance.uniform(0.05, 0.5)


_own = _Thread()


def pause(_frame: FrameType, _event: str, _argument: Any) -> None:
    """Pause the calling thread if its next random pause is due."""
    if time.monotonic() >= _own.next_pause:
        _own.next_pause = float("inf")  # the calls below must not cause another pause
        time.sleep(seconds_of_pause(_own.chance))
        _own.next_pause = time.monotonic() + seconds_between(_own.chance)


threading.setprofile(pause)
