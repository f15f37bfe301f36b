"""A plugin of pytest that pauses processes and threads of the tests for 50 to 500 ms, at random.

    make test-jitter
    make test-jitter JITTER_SEED=7 ARGS="-m processes -k cancel"

A test that reads a state before it has waited for it then fails often, not once in a thousand runs.
Paused are the processes that a test has started (SIGSTOP), the threads of all Python processes, and
the test itself between two of its calls. In a test that is marked `timing`, no process is stopped:
its subject is a deadline, or it stops a process itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_HERE = Path(__file__).parent

# Set before the tests import it: their processes inherit both.
os.environ.setdefault("JITTER_SEED", str(random.SystemRandom().randrange(10**6)))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH"))))

from tests.jitter import sitecustomize  # noqa: E402  it needs the seed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"JITTER_SEED={sitecustomize.SEED}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    over = threading.Event()
    chance = random.Random(f"{sitecustomize.SEED} {item.nodeid}")
    if item.get_closest_marker("timing"):
        over.set()
    pauser = threading.Thread(target=_stop_processes, args=(chance, over), name="pauser")
    pauser.start()
    sys.setprofile(sitecustomize.pause)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        over.set()
        pauser.join()


def _stop_processes(chance: random.Random, over: threading.Event) -> None:
    sys.setprofile(None)
    while not over.wait(sitecustomize.seconds_between(chance) / 2):
        if running := _running_descendants():
            with contextlib.suppress(ProcessLookupError):
                _stop(chance.choice(running), sitecustomize.seconds_of_pause(chance))


def _stop(pid: int, seconds: float) -> None:
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)


def _running_descendants() -> list[int]:
    """Processes below this one, in a fixed order; without stopped and ended ones."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                found.append(process.pid)
    return sorted(found)
