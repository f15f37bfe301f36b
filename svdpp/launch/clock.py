"""Owns how far this host's clocks are ahead of rank 0's, which differ from host to host."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from svdpp.launch.connections import receive

_ROUNDS = 8
_TIMES = struct.Struct("<dd")


@dataclass(frozen=True)
class Clock:
    """What to take off this host's clocks to have rank 0's, in seconds.

    Args:
        monotonic_ahead: of the monotonic clock, which counts from each host's own start.
        wall_ahead: of unix time.
    """

    monotonic_ahead: float = 0.0
    wall_ahead: float = 0.0


def compare(line: Connection, deadline: float) -> Clock:
    """The clock of this end beside the other's, which runs `tell`.

    Cristian's algorithm: the answer that came back fastest was read halfway, to half its time.

    Raises:
        OSError, EOFError: the other end is gone, or does not answer by `deadline`, of this clock.
    """
    best = float("inf")
    clock = Clock()
    for _ in range(_ROUNDS):
        begun = time.monotonic()
        line.send_bytes(b"?")
        monotonic, wall = _TIMES.unpack(receive(line, deadline, _TIMES.size))
        took = time.monotonic() - begun
        if took < best:
            best = took
            clock = Clock(begun + took / 2 - monotonic, time.time() - took / 2 - wall)
    return clock


def tell(line: Connection, deadline: float) -> None:
    """Answers one `compare` at the other end.

    Raises:
        OSError, EOFError: the other end is gone, or does not ask by `deadline`.
    """
    for _ in range(_ROUNDS):
        receive(line, deadline, 1)
        line.send_bytes(_TIMES.pack(time.monotonic(), time.time()))
