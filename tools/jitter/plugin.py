"""Pytest plugin that pauses the tests' processes and threads at random times for 50 to 500 ms.

    make test-jitter
    make test-jitter JITTER_SEED=7 ARGS="-m processes -k cancel"

Some tests read a state without waiting until it is reached. Without the pauses, such a test fails
once in a thousand runs; with the pauses, it fails often. The plugin pauses the processes that a
test has started (by SIGSTOP), the threads of all Python processes, and the test itself between two
function calls. During tests with the marker `timing`, no process is stopped, because these tests
check deadlines or stop processes themselves.
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

# The variables are set here, before any test starts a process, because processes inherit them.
os.environ.setdefault("JITTER_SEED", str(random.SystemRandom().randrange(10**6)))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH"))))

from tools.jitter import sitecustomize  # noqa: E402  the module reads JITTER_SEED at its import


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
        with contextlib.suppress(psutil.NoSuchProcess):  # a process may have just ended
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
