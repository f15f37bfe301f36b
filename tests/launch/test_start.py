"""Start of ranks by torch.multiprocessing, with a deadline, and with clear errors."""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import pytest
import torch.multiprocessing
import typer

from svdpp.cli.console import Console
from svdpp.cli.failures import report_errors
from svdpp.errors import RankError
from svdpp.launch import start_deadline
from svdpp.launch.start_deadline import StartDeadline, limit_error
from svdpp.launch.worker_group import start_ranks


class _StartMethodError(Exception):
    """Error that has the start method requested from torch, raised before a process starts."""


@pytest.mark.parametrize(("device", "method"), [("cpu", "forkserver"), ("cuda", "spawn")])
def test_ranks_are_started_by_torch_multiprocessing(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_context(name: str) -> Any:
        raise _StartMethodError(name)

    monkeypatch.setattr(torch.multiprocessing, "get_context", get_context)
    with pytest.raises(_StartMethodError, match=method):
        start_ranks(print, None, world_size=2, backend="gloo", device=device)


NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
NO_FILE = OSError(errno.EMFILE, "Too many open files")
NO_THREAD = RuntimeError("can't start new thread")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system seem to allow at most 11 processes and 22 open files."""
    soft = {resource.RLIMIT_NPROC: 11, resource.RLIMIT_NOFILE: 22}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft[kind], 100))


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("error", "words", "details"),
    [
        (NO_PROCESS, r"temporarily unavailable \(limit: 11\)", {"limit": 11}),
        (NO_FILE, r"Too many open files \(limit: 22\)", {"limit": 22}),
        (NO_THREAD, r"start new thread \(limit: 11\)", {"limit": 11}),
        # The message has a signal if an earlier test in this process has killed the fork server.
        (EOFError("unexpected EOF"), r"the fork server (has ended|was killed by SIG\w+)$", {}),
    ],
)
def test_a_limit_of_the_system_is_named(
    error: Exception, words: str, details: dict[str, int]
) -> None:
    with pytest.raises(RankError, match=words) as caught, StartDeadline(60) as deadline:
        deadline.rank = 3
        raise error
    assert caught.value.details == {"rank": 3, **details}
    assert "ulimit -u" in caught.value.hint


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("error", "words", "limit"),
    [
        (NO_PROCESS, "no further process or thread", 11),
        (NO_THREAD, "no further process or thread", 11),
        (NO_FILE, "no further file", 22),
    ],
)
def test_what_the_system_refuses_anywhere_is_an_error_with_the_limit(
    error: Exception, words: str, limit: int
) -> None:
    found = limit_error(error)
    assert found is not None
    assert f"{words}: too many" in found.message
    assert f"(limit: {limit})" in found.message
    assert found.details == {"errno": getattr(error, "errno", None), "limit": limit}
    with pytest.raises(typer.Exit) as ended, report_errors(Console(), debug=False):
        raise error
    assert ended.value.exit_code == RankError.exit_code


def test_other_errors_are_not_taken_for_a_limit() -> None:
    for error in (OSError(errno.ENOENT, "No such file"), RuntimeError("no"), EOFError()):
        assert limit_error(error) is None


def test_other_errors_of_a_start_pass() -> None:
    with pytest.raises(ValueError, match="mine"), StartDeadline(60):
        raise ValueError("mine")


def test_at_the_deadline_what_blocks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(start_deadline, "end_fork_server", lambda: os.close(writer))
    with pytest.raises(RankError, match="rank 0 never started within 0 s") as caught:  # noqa: SIM117
        with StartDeadline(0.2):
            if not os.read(reader, 1):  # Python waits for the server like this
                raise EOFError
    os.close(reader)
    assert caught.value.details == {"rank": 0, "timeout_seconds": 0.2}
