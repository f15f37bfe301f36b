"""Owns the offset between this host's clocks and rank 0's."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from svdpp.launch.connections import receive

_NUM_ROUNDS = 8
_TIMES = struct.Struct("<dd")


@dataclass(frozen=True)
class Clock:
    """Seconds by which this host's clocks are ahead of rank 0's.

    Args:
        monotonic_ahead: offset of the monotonic clock, which starts at zero when its host boots.
        wall_ahead: offset of Unix time.
    """

    monotonic_ahead: float = 0.0
    wall_ahead: float = 0.0


def compare(connection: Connection, deadline: float) -> Clock:
    """Measures the offset to the clocks of the other end, which runs `answer`.

    Cristian's algorithm: the fastest of several round trips counts, and the other end is assumed to
    have read its clocks halfway through it.

    Raises:
        OSError, EOFError: the connection is closed, or there is no answer by `deadline`, a time of
            this host's monotonic clock.
    """
    fastest = float("inf")
    clock = Clock()
    for _ in range(_NUM_ROUNDS):
        start = time.monotonic()
        connection.send_bytes(b"?")
        monotonic, wall = _TIMES.unpack(receive(connection, deadline, _TIMES.size))
        seconds = time.monotonic() - start
        if seconds < fastest:
            fastest = seconds
            clock = Clock(start + seconds / 2 - monotonic, time.time() - seconds / 2 - wall)
    return clock


def answer(connection: Connection, deadline: float) -> None:
    """Sends this host's clock times to the other end, which runs `compare`.

    Raises:
        OSError, EOFError: the connection is closed, or there is no request by `deadline`.
    """
    for _ in range(_NUM_ROUNDS):
        receive(connection, deadline, 1)
        connection.send_bytes(_TIMES.pack(time.monotonic(), time.time()))
