"""Owns how processes end together: with their parent, with their starter, with their children."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

from svdpp.distributed import scratch

# Linux, <sys/prctl.h>
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends.

    Args:
        parent: process id of the starter, where it is known; else whoever is the parent now, and
            a starter that is gone already goes unnoticed.
    """
    if parent is None:
        parent = os.getppid()
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Takes back what `end_with_parent` asked for."""
    _set_parent_death_signal(0)


def kill_with_children(pids: Collection[int]) -> None:
    """Kills processes of this user and what they have started, such as an ffmpeg that writes.

    Children first: those of a process that is gone already are nobody's any more.
    """
    for pid in [*_children(pids), *pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Keeps Ctrl-C from this thread, and from processes it starts until they ask for it again.

    It goes to the whole terminal group, where a process that still imports would answer it with a
    traceback. What came meanwhile arrives when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_by_interrupts() -> None:
    """Has an INT for this process alone end it, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@functools.cache
def end_by_signals() -> None:
    """Has INT, TERM and HUP end this process at once, whatever library its main thread is in.

    For the main thread, once. Python would wait until a library's call returns, and a call that
    waits for another host may not.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) == signal.SIGCHLD:
            pass
        leave(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def leave(code: int) -> NoReturn:
    """Ends this process at once, with what it has started, and without waiting for its threads.

    Python would wait for those that wait for another rank.
    """
    kill_children()
    scratch.remove_all()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def kill_children() -> None:
    """Kills what this process has started."""
    for pid in _children([os.getpid()]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _set_parent_death_signal(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _children(pids: Collection[int]) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            # After the name, which can hold anything: state, then the parent's process id.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent in pids:
                found.append(int(stat.parent.name))
    return found
