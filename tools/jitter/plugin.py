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

from tools.jitter import sitecustomize  # noqa: E402  it needs the seed


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
        with contextlib.suppress(psutil.NoSuchProcess):  # one has just ended
            _stop_one_of(psutil.Process().children(recursive=True), chance)


def _stop_one_of(processes: list[psutil.Process], chance: random.Random) -> None:
    asleep = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    running = [process for process in processes if process.status() not in asleep]
    if running:
        process = chance.choice(sorted(running, key=lambda each: each.pid))
        process.suspend()
        try:
            time.sleep(sitecustomize.seconds_of_pause(chance))
        finally:
            process.resume()
