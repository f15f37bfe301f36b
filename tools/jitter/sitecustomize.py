"""Pauses threads at random. Python imports this module first if its folder is on PYTHONPATH.

So the processes that tests start pause their threads too. A profile function, which Python calls
at each call and return, lets a pause begin anywhere. It leaves out main threads: libraries are
imported there, and `tools.jitter.plugin` stops the whole process instead.
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
    """When the present thread makes its next pause, and the chance that decides it."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.chance = random.Random(f"{SEED} {os.getpid()} {name}")
        self.next_pause = time.monotonic() + seconds_between(self.chance)


def seconds_between(chance: random.Random) -> float:
    """How long to wait for the next pause."""
    return chance.expovariate(1 / _MEAN_SECONDS_BETWEEN)


def seconds_of_pause(chance: random.Random) -> float:
    """How long a pause lasts."""
    return chance.uniform(0.05, 0.5)


_own = _Thread()


def pause(_frame: FrameType, _event: str, _argument: Any) -> None:
    """Pauses the present thread if it is time."""
    if time.monotonic() >= _own.next_pause:
        _own.next_pause = float("inf")  # what follows is profiled too
        time.sleep(seconds_of_pause(_own.chance))
        _own.next_pause = time.monotonic() + seconds_between(_own.chance)


threading.setprofile(pause)
