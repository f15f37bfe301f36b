"""The start of ranks: by torch.multiprocessing, with a deadline whatever blocks it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch.multiprocessing

from svdpp.errors import RankError
from svdpp.launch import start_deadline
from svdpp.launch.start_deadline import StartDeadline
from svdpp.launch.worker_group import start_ranks


class _AskedForError(Exception):
    """Carries the start method, and ends the start before it makes a process."""


@pytest.mark.parametrize(("device", "method"), [("cpu", "forkserver"), ("cuda", "spawn")])
def test_ranks_are_started_by_torch_multiprocessing(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_context(name: str) -> Any:
        raise _AskedForError(name)

    monkeypatch.setattr(torch.multiprocessing, "get_context", get_context)
    with pytest.raises(_AskedForError, match=method):
        start_ranks(print, None, world_size=2, backend="gloo", device=device)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (RuntimeError("can't start new thread"), "thread"),
        (EOFError("unexpected EOF"), "the fork server has ended"),
    ],
)
def test_a_limit_of_the_system_is_named(error: Exception, words: str) -> None:
    with pytest.raises(RankError, match=words) as caught, StartDeadline(60) as deadline:
        deadline.rank = 3
        raise error
    assert caught.value.details == {"rank": 3}
    assert "ulimit -u" in caught.value.hint


def test_other_errors_of_a_start_pass() -> None:
    with pytest.raises(ValueError, match="mine"), StartDeadline(60):
        raise ValueError("mine")


def test_at_the_deadline_what_blocks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(start_deadline, "end_fork_server", lambda: os.close(writer))
    with pytest.raises(RankError, match="rank 0 never started within 0 s") as caught:  # noqa: SIM117
        with StartDeadline(0.2):
            if not os.read(reader, 1):  # as Python's own wait for the server
                raise EOFError
    os.close(reader)
    assert caught.value.details == {"rank": 0, "timeout_seconds": 0.2}
