"""Processes of a run, found in /proc without the help of svdpp."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import TypeVar

import psutil

#: Environment variable that marks a command under test. All processes of the command inherit it.
MARK = "TEST_RUN_OF_SVDPP"


def process_ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def marked(mark: str, older: Set[int] = frozenset()) -> list[int]:
    """Return the ids of the processes with a test's mark in their environment, except `older`."""
    found = []
    for pid in process_ids():
        if pid in older:
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def ranks_below(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks whose output goes to files in `folder`, by rank."""
    found = {}
    for pid in process_ids():
        with contextlib.suppress(OSError):
            match = re.search(r"/rank(\d+)\.txt$", os.readlink(f"/proc/{pid}/fd/1"))
            if match and match.string.startswith(str(folder)):
                found[int(match[1])] = pid
    return found


def is_there(pid: int) -> bool:
    """Return whether a process exists. A zombie exists."""
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int, module: str) -> list[int]:
    """Return the children of a process that run the Python module `module`."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child.pid)
    return found


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants during the block (prctl(2)).

    Otherwise init adopts the orphans, and some init processes reap zombies only after seconds.
    """
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    libc.prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        libc.prctl(set_child_subreaper, 0)


def collected(pids: Iterable[int]) -> bool:
    """Return whether all the given processes have ended; reap those that this process started."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return not any(map(is_there, pids))


def command_line(pid: int) -> str:
    """Return the arguments of a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def allowing_for_others(seconds: float) -> float:
    """Return a time limit, given for an idle machine, scaled by the load of this machine.

    The load is the load average of the last minute or the number of processes that run now,
    whichever is larger, divided by the number of cores. `make test-jitter` pauses each process for
    about a third of the time, so it triples the limits.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    load = max(os.getloadavg()[0], running) / (os.cpu_count() or 1)
    return seconds * max(1.0, load) * (3 if "JITTER_SEED" in os.environ else 1)


Happened = TypeVar("Happened")


def wait_until(
    happens: Callable[[], Happened], seconds: float, what: str | Callable[[], str]
) -> Happened:
    """Wait until `happens()` returns a true value, and return that value; else fail the test.

    The test fails after `seconds`, with the message `what`.
    """
    begun = time.monotonic()
    while not (happened := happens()):
        assert time.monotonic() - begun < seconds, f"{what() if callable(what) else what}: too late"
        time.sleep(0.005)
    return happened
