"""Faults of whole commands: signals, a killed parent, two runs at the same time, torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import RUN, SIMULATE, STANDING, WORLD_SIZE, Command, StartCommand
from tests.support.processes import allowing_for_others, command_line
from tests.support.shell import svdpp_here

pytestmark = [pytest.mark.slow, pytest.mark.timing]

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
ONE_IN_CI = [SIGNALS[0], *(pytest.param(number, marks=pytest.mark.full) for number in SIGNALS[1:])]


@pytest.mark.parametrize("number", ONE_IN_CI)
def test_a_signal_ends_a_run_in_order(start: StartCommand, number: signal.Signals) -> None:
    """A signal ends a run in order, whether the command or its whole process group gets it.

    Two commands run at the same time.
    """
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
@pytest.mark.parametrize("writes", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_signal_while_ranks_start_or_an_mp4_is_written(
    start: StartCommand, home: Path, number: signal.Signals, writes: bool
) -> None:
    """A signal ends the command within 2 s, even if one of its processes does not respond.

    While it starts, the fork server imports torch and reads no messages. If ffmpeg hangs, a signal
    to the process group ends ffmpeg too.
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


@pytest.mark.parametrize("by_signal", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_stopped_fork_server_does_not_hang_the_start(
    start: StartCommand, by_signal: bool
) -> None:
    """A stopped fork server does not block the command, which ends at its deadline or by a signal.

    Python would wait for the server's response forever. A stopped process reacts only to SIGKILL.
    """
    command = start(*SIMULATE, "--start-timeout", "600" if by_signal else "2")
    begun = time.monotonic()
    _stop_fork_servers(command, allowing_for_others(4 if by_signal else 8))
    if by_signal:
        code = command.end(command.signal(signal.SIGINT), 2)
        assert code == 128 + signal.SIGINT
    else:
        assert command.end(begun, 8) == 6
        assert "rank 0 never started within 2 s" in command.errors
        assert "Traceback" not in command.errors
    command.assert_gone()


def _stop_fork_servers(command: Command, seconds: float) -> None:
    """Stop each fork server of a command, for some seconds or until the command ends.

    Before its ranks start, a command replaces a server that it finds stopped.
    """
    end = time.monotonic() + seconds
    while command.process.poll() is None and time.monotonic() < end:
        for pid in command.pids():
            if "multiprocessing.forkserver" in command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)


def test_a_fork_server_that_was_killed_is_named(start: StartCommand) -> None:
    """If the fork server is killed, the error says so.

    The ranks end with the fork server, and the command cannot get their exit codes.
    """
    command = start(*SIMULATE, plan={"stop": STANDING})
    command.event(kind="Heartbeat", rank=1, step=2, action="DENOISE c2 2:4")
    os.kill(command.process_with("multiprocessing.forkserver"), signal.SIGKILL)
    assert command.end(time.monotonic(), 4) == 6
    assert "ended because its fork server was killed by SIGKILL" in command.errors
    assert "exit code" not in command.errors
    command.assert_gone()


# --- the parent -----------------------------------------------------------------------------------


def test_ranks_listen_on_loopback_and_end_with_a_killed_parent(start: StartCommand) -> None:
    command = start(*SIMULATE, plan={"stop": STANDING})
    command.event(kind="Heartbeat", rank=1, step=2, action="DENOISE c2 2:4")
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    pids = command.pids()
    sockets = [each for each in psutil.net_connections("tcp") if each.pid in pids]
    addresses = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert addresses, "gloo listens somewhere; this test no longer sees it"
    assert addresses <= {"127.0.0.1", "::1"}
    command.signal(signal.SIGKILL)
    command.process.wait()
    command.assert_gone(seconds=1)


@pytest.mark.full
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


@pytest.mark.full
def test_two_runs_side_by_side(start: StartCommand) -> None:
    first, second = start(*SIMULATE), start(*SIMULATE)
    begun = time.monotonic()
    assert (first.end(begun, 100), second.end(begun, 100)) == (0, 0), first.errors + second.errors


# --- torchrun -------------------------------------------------------------------------------------

TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)),
    *("--log-dir", "{home}"),  # by default, torchrun leaves a temporary folder behind
    *("--no-python", sys.executable, "-m", "tests.support.injected"),
)


def _start(start: StartCommand, stop: dict[str, Any], **plan: Any) -> Command:
    return start(*TORCHRUN, "{plan}", *SIMULATE, plan={"stop": stop, **plan})


@pytest.mark.full
def test_a_wrong_request_is_told_once_and_without_tracebacks(start: StartCommand) -> None:
    """Under torchrun, a wrong request is reported once, without a traceback.

    torchrun's agent signals the other ranks while they report the error to rank 0.
    """
    program = ("--no-python", sys.executable, "-m", "svdpp")
    command = start(*TORCHRUN[:-4], *program, "simulate", "--steps", "10", "--quiet")
    assert command.end(time.monotonic(), 60) == 1
    assert command.errors.count("error: 10 steps cannot be split evenly over 3 ranks") == 1
    assert "svdpp/cli" not in command.errors, "a traceback of our own"


@pytest.mark.full
def test_ranks_end_with_a_killed_agent(start: StartCommand) -> None:
    command = _start(start, STANDING)
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    command.signal(signal.SIGKILL)
    command.process.wait()
    command.assert_gone(seconds=1)


@pytest.mark.full
def test_a_rank_that_raises_is_reported_by_rank_0(start: StartCommand, home: Path) -> None:
    gate = home / "gate"
    command = _start(start, {**STANDING, "kind": "raise", "until": str(gate)})
    command.event(kind="ClipDone", clip=0)
    fault = time.monotonic()
    gate.touch()
    assert command.end(fault, 6) == 1, "torchrun exits with its own code, whatever its ranks' codes"
    assert re.search(r"error: rank 1 \(cpu of .*\) failed at clip 2, step 2 ", command.errors)
    root_cause = command.errors.partition("Root Cause")[2]
    assert re.search(r"rank +: 0 .*\n +exitcode +: 6 ", root_cause), root_cause


@pytest.mark.parametrize(
    ("number", "late"),
    [(signal.SIGINT, 0.5), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.full)],
)
def test_a_signal_to_all_is_told_as_the_signal(
    start: StartCommand, number: signal.Signals, late: float
) -> None:
    """A signal to all ranks, as by Ctrl-C or scancel, is reported as the signal.

    Other ranks may end before rank 0, which must not report them as lost.
    """
    command = _start(start, STANDING, leaving_seconds=late)
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    command.end(command.signal(number, group=True), 6)
    assert f"error: ended by {number.name}\n" in command.errors
    assert "is gone" not in command.errors
