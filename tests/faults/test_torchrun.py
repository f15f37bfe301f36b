"""Rows: torchrun's agent is killed, and a rank under torchrun raises."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import SIMULATE, STANDING, WORLD_SIZE, Command
from tests.faults.conftest import StartCommand

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)),
    *("--log-dir", "{home}"),  # the default is a temporary folder, which torchrun leaves behind
    *("--no-python", sys.executable, "-m", "tests.faults.injected"),
)


def _start(start: StartCommand, stop: dict[str, Any], **plan: Any) -> Command:
    return start(*TORCHRUN, "{plan}", *SIMULATE, plan={"stop": stop, **plan})


def test_ranks_end_with_a_killed_agent(start: StartCommand) -> None:
    command = _start(start, STANDING)
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    command.signal(signal.SIGKILL)
    command.process.wait()
    command.assert_gone(seconds=1)


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
    """Ctrl-C or scancel: every rank gets the signal and ends, the others perhaps before rank 0."""
    command = _start(start, STANDING, leaving_seconds=late)
    command.event(kind="Heartbeat", rank=2, waiting=True, action="DENOISE c2 4:6")
    command.end(command.signal(number, group=True), 6)
    assert f"error: ended by {number.name}\n" in command.errors
    assert "is gone" not in command.errors
