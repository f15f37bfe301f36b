"""Unix clock that ignores jumps of the machine's clock, and a check that two clocks agree.

Files and jobs are deleted because of their age. Without these precautions, all files and jobs would
look old and be deleted if the machine's clock jumped ahead, or was ahead of the database's clock.
"""

from __future__ import annotations

import time

from svdpp.errors import OutputError

#: Maximum difference of two clocks in seconds. If two clocks differ by more, no file or job is
#: deleted because of its age.
MAX_SKEW = 60.0
#: Seconds after a server's start during which no file or job is deleted because of its age. The
#: clock of a machine that has just booted may be wrong until NTP sets it. The clock then jumps, and
#: `check_skew` reports the jump.
SETTLING_SECONDS = 600.0


class ClockError(OutputError):
    """Error for two clocks that differ by more than `MAX_SKEW`, so that ages are not reliable.

    The error's details have `skew_seconds`, positive if this machine's clock is ahead.
    """


def uptime() -> float:
    """Return the seconds since the machine's boot, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Unix clock that follows small corrections of the machine's clock, but ignores jumps.

    Any thread may call any method. After a jump of the machine's clock, this clock continues from
    the time before the jump, until the machine's clock is corrected or the server restarts.
    """

    def __init__(self) -> None:
        self._created = uptime()
        self._start = time.time() - self._created

    @property
    def is_settled(self) -> bool:
        """Whether the server has run long enough for NTP to have set the machine's clock.

        This is the case after `SETTLING_SECONDS`.
        """
        return uptime() - self._created >= SETTLING_SECONDS

    def now(self) -> float:
        """Return the unix time in seconds, without jumps of the machine's clock."""
        skew = self.skew()
        if abs(skew) <= MAX_SKEW:
            self._start += skew
        return uptime() + self._start

    def skew(self) -> float:
        """Return the seconds by which the machine's clock is ahead of this `SteadyClock`."""
        return time.time() - uptime() - self._start


def check_skew(seconds: float, other: str) -> None:
    """Raise a `ClockError` if two clocks differ by so much that nothing may be deleted by its age.

    Args:
        seconds: Seconds by which this machine's clock is ahead of the other clock.
        other: Name of the other clock, for the error message.

    Raises:
        ClockError: The difference is larger than `MAX_SKEW`.
    """
    if abs(seconds) <= MAX_SKEW:
        return
    direction = "ahead of" if seconds > 0 else "behind"
    raise ClockError(
        f"the clock of this machine is {abs(seconds):.0f} s {direction} {other}: nothing is "
        "deleted because of its age",
        "set the clock by NTP; if it is right and the queue is not shared, restart the server",
        details={"skew_seconds": round(seconds)},
    )
