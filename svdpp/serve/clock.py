"""Clocks of a server: unix time without the machine's jumps, and how far two clocks may differ.

Ages decide what is deleted. So a clock that was set anew, or that is not the database's, must not
make everything old at once.
"""

from __future__ import annotations

import time

from svdpp.errors import OutputError

#: Seconds between two clocks beyond which nothing is deleted by its age.
MAX_SKEW = 60.0
#: Seconds after a server's start in which nothing is deleted by its age: a machine that has just
#: booted may have a wrong clock until NTP sets it, which `check_skew` then notices.
SETTLING_SECONDS = 600.0


class ClockError(OutputError):
    """Two clocks differ by more than `MAX_SKEW`, so ages are unknown and nothing is deleted.

    Its details have `skew_seconds`, positive if this machine's clock is ahead.
    """


def uptime() -> float:
    """Return the seconds since the machine's start, also those while it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Unix time of this machine that follows small corrections of its clock, but no jump.

    Any thread may call it. After a jump it goes on as before, until the machine's clock is back or
    the server starts again.
    """

    def __init__(self) -> None:
        self._created = uptime()
        self._start = time.time() - self._created

    @property
    def is_settled(self) -> bool:
        """Whether the clock has been watched for `SETTLING_SECONDS`."""
        return uptime() - self._created >= SETTLING_SECONDS

    def now(self) -> float:
        """Return the unix time in seconds."""
        skew = self.skew()
        if abs(skew) <= MAX_SKEW:
            self._start += skew
        return uptime() + self._start

    def skew(self) -> float:
        """Return by how many seconds the machine's clock is ahead of this one."""
        return time.time() - uptime() - self._start


def check_skew(seconds: float, other: str) -> None:
    """Check that this machine's clock is near another one.

    Args:
        seconds: How far it is ahead.
        other: Name of the other clock, for the message.

    Raises:
        ClockError: The difference is larger than `MAX_SKEW`.
    """
    if abs(seconds) <= MAX_SKEW:
        return
    direction = "ahead of" if seconds > 0 else "behind"
    raise ClockError(
        f"the clock of this machine is {abs(seconds):.0f} s {direction} {other}: nothing is "
        "deleted by its age",
        "set the clock by NTP; if this is the right time, start the server again",
        details={"skew_seconds": round(seconds)},
    )
