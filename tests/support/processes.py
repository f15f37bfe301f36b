"""The processes of one run as /proc shows them, independent of the run itself."""

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

#: An environment variable of the command under test, inherited by all its processes.
MARK = "TEST_RUN_OF_SVDPP"


def process_ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def marked(mark: str, older: Set[int] = frozenset()) -> list[int]:
    """Ids of the processes with `mark` in their environment, without those in `older`."""
    found = []
    for pid in process_ids():
        if pid in older:
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def ranks_below(folder: Path) -> dict[int, int]:
    """Process id by rank, of ranks whose output goes to a file in `folder`."""
    found = {}
    for pid in process_ids():
        with contextlib.suppress(OSError):
            match = re.search(r"/rank(\d+)\.txt$", os.readlink(f"/proc/{pid}/fd/1"))
            if match and match.string.startswith(str(folder)):
                found[int(match[1])] = pid
    return found


def is_there(pid: int) -> bool:
    """Whether the process exists, also as a zombie."""
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int, module: str) -> list[int]:
    """The children of a process that run `module`."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child.pid)
    return found


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of orphaned descendants (prctl(2), subreaper).

    Otherwise init adopts them, and some inits reap zombies only after seconds.
    """
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    libc.prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        libc.prctl(set_child_subreaper, 0)


def collected(pids: Iterable[int]) -> bool:
    """Whether all of `pids` have ended; reaps adopted ones."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return not any(map(is_there, pids))


def command_line(pid: int) -> str:
    """The process's arguments; empty once it has ended."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def allowing_for_others(seconds: float) -> float:
    """A bound of the fault table, which is for an idle machine, on a loaded one.

    The load is that of the last minute, or what runs now if that is more. `make test-jitter` pauses
    each process for about a third of the time.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    load = max(os.getloadavg()[0], running) / (os.cpu_count() or 1)
    return seconds * max(1.0, load) * (3 if "JITTER_SEED" in os.environ else 1)


Happened = TypeVar("Happened")


def wait_until(
    happens: Callable[[], Happened], seconds: float, what: str | Callable[[], str]
) -> Happened:
    """Waits until `happens()` and returns what it gives; fails the test after too long."""
    begun = time.monotonic()
    while not (happened := happens()):
        assert time.monotonic() - begun < seconds, f"{what() if callable(what) else what}: too late"
        time.sleep(0.005)
    return happened
