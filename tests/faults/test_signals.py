"""Rows: Ctrl-C, TERM and HUP, once and twice, to the command and its group, at any time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.commands import RUN, SIMULATE, STANDING
from tests.faults.conftest import StartCommand

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
ONE_IN_CI = [SIGNALS[0], *(pytest.param(number, marks=pytest.mark.full) for number in SIGNALS[1:])]


@pytest.mark.parametrize("number", ONE_IN_CI)
def test_a_signal_ends_a_run_in_order(start: StartCommand, number: signal.Signals) -> None:
    """To the command alone and to its whole group, with two commands that start together."""
    commands = [start(*SIMULATE, plan={"stop": STANDING}) for _ in range(2)]
    for command in commands:
        command.event(kind="ClipDone")
    for command, group in zip(commands, (False, True), strict=True):
        assert command.end(command.signal(number, group=group), 2) == 128 + number
        assert command.errors == f"error: ended by {number.name}\n"
        command.assert_gone()


@pytest.mark.parametrize("number", ONE_IN_CI)
def test_a_second_signal_ends_it_at_once(start: StartCommand, number: signal.Signals) -> None:
    command = start(*SIMULATE, plan={"stop": STANDING, "leaving_seconds": 600})
    command.event(kind="ClipDone")
    command.signal(number, group=True)
    command.event(kind="leaving")
    assert command.end(command.signal(number, group=True), 1) == 128 + number
    assert command.errors == ""


@pytest.mark.parametrize("number", ONE_IN_CI)
@pytest.mark.parametrize("writes", [False, True])
def test_a_signal_while_ranks_start_or_an_mp4_is_written(
    start: StartCommand, home: Path, number: signal.Signals, writes: bool
) -> None:
    """At its start the fork server imports torch, and reads no messages.

    A signal to the group also ends an ffmpeg that hangs, whichever process dies first.
    """
    if writes:
        command = start(*RUN, str(home / "out"), out=home / "out", plan={})
        os.kill(command.process_with("libx264"), signal.SIGSTOP)
    else:
        command = start(*SIMULATE)
        command.process_with("multiprocessing.forkserver")
    assert command.end(command.signal(number, group=True), 2) == 128 + number
    first, *rest = command.errors.splitlines()
    assert first == f"error: ended by {number.name}"
    assert "Traceback" not in command.errors
    assert not rest or writes
