"""Owns how processes end together: with their parent, with their starter, with their children."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

from svdpp.launch import temp_folders

# Linux, <sys/prctl.h>
_PR_SET_PDEATHSIG = 1

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


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
    """Kills other processes of this user and what they have started, such as an ffmpeg that writes.

    Children are looked for first: those of a process that is gone are nobody's any more. They are
    killed after it, which would else take their end for a failure and go on to the next clip. One
    that was started between look and kill ends by itself, as nobody writes to it any more. (Nothing
    is stopped first: what is stopped when this process is killed would stay so for ever.)
    """
    _kill([*pids, *_children(pids)])


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keeps INT, TERM and HUP from this thread, and from processes it starts.

    They can go to the whole process group, where a process that still imports would answer Ctrl-C
    with a traceback. Those processes hold them until they call `exit_on_signals`; in this thread,
    what came meanwhile arrives when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def exit_on_signals(end: Callable[[int], NoReturn]) -> None:
    """Has INT, TERM and HUP end this process at once, whatever library its main thread is in.

    For the main thread, once. Python would wait until a library's call returns, and a call that
    waits for another host may not.

    Args:
        end: given the signal's number, in a thread: `exit_with_signal_code` or `exit_by_signal`.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) not in _SIGNALS:
            pass
        end(number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def exit_with_signal_code(number: int) -> NoReturn:
    """Ends this process by `leave`, with the code that shells give for signal `number`."""
    exit_process(128 + number)


def exit_by_signal(number: int) -> NoReturn:
    """Ends this process by signal `number` itself, for a parent to see; what it started before it.

    Left to the signal, the process would be gone before anybody could ask what it had started.
    """
    children = _children([os.getpid()])
    # In any thread, which signal.signal is not for.
    ctypes.CDLL(None).signal(number, signal.SIG_DFL.value)
    _kill(children)
    while True:
        os.kill(os.getpid(), number)


def exit_process(code: int) -> NoReturn:
    """Ends this process at once, with what it has started, and without waiting for its threads.

    Python would wait for those that wait for another rank.
    """
    temp_folders.remove_all()
    temp_folders.remove_multiprocessing_folder()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    kill_children()
    os._exit(code)


def kill_children() -> None:
    """Kills what this process has started; for one that ends itself next."""
    _kill(_children([os.getpid()]))


def _kill(pids: Collection[int]) -> None:
    """Kills processes, and lets go of the interpreter's lock neither between them nor afterwards.

    So that no thread of a process that ends itself next reports a killed ffmpeg as a lost clip.
    """
    for pid in pids:
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
