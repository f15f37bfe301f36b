"""Rows: the parent is killed, two runs work side by side, and which sockets listen meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.shell import svdpp_here
from tests.faults.commands import RUN, SIMULATE, STANDING
from tests.faults.conftest import StartCommand
from tests.faults.processes import listening

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

LOOPBACK = {"127.0.0.1", "::1"}


def test_ranks_listen_on_loopback_and_end_with_a_killed_parent(start: StartCommand) -> None:
    command = start(*SIMULATE, plan={"stop": STANDING})
    command.event(kind="Heartbeat", rank=1, step=2, action="DENOISE c2 2:4")
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    addresses = listening(command.pids())
    assert addresses, "gloo listens somewhere; this test no longer sees it"
    assert addresses <= LOOPBACK
    command.signal(signal.SIGKILL)
    command.process.wait()
    command.assert_gone(seconds=1)


def test_a_parent_killed_while_an_mp4_is_written(start: StartCommand, home: Path) -> None:
    out = home / "out"
    command = start(*RUN, str(out), plan={})
    os.kill(command.process_with("libx264"), signal.SIGSTOP)
    whole = set(out.glob("*.mp4"))
    assert list(out.glob(".svdpp-*.mp4")), "nothing is being written; this test sees nothing"
    command.signal(signal.SIGKILL)
    command.process.wait()
    command.assert_gone(seconds=1)
    assert set(out.glob("*.mp4")) == whole
    again = svdpp_here(*RUN, str(out))
    assert again.code == 0, again
    assert len(list(out.glob("*.mp4"))) == 4


def test_two_runs_side_by_side(start: StartCommand) -> None:
    first, second = start(*SIMULATE), start(*SIMULATE)
    begun = time.monotonic()
    assert (first.end(begun, 100), second.end(begun, 100)) == (0, 0), first.errors + second.errors
