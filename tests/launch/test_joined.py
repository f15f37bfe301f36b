"""Rank 0 and a rank of a launcher, before the work: neither waits for ever for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, NoReturn

import pytest

from svdpp.errors import RankError
from svdpp.launch import connections, joined_rank, process_group, process_lifetime
from svdpp.launch.connections import BEGIN
from svdpp.launch.joined import JoinedGroup
from svdpp.launch.world import World
from tests.launch.test_connections import CALLER, Board, _calling

# In place of the end of a process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

WORLD = World(rank=0, local_rank=0, size=2, local_size=1, num_hosts=2, launcher="torchrun")


class RankHooks:
    """A member's process, as far as its parent knows of it."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda _: b"") -> None:
        self.answer = answer
        self.reasons: list[str] = []

    def sent(self, message: bytes) -> None:
        """Not of interest."""

    def interrupted(self, number: int) -> bytes:
        return b"ended by %d" % number

    def ended(self, error: dict[str, Any] | None) -> None:
        """Not of interest."""

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """The store of a world in this process, which nothing is to end."""

    def exit_process(code: int) -> NoReturn:
        raise SystemExit(code)

    board = Board()
    monkeypatch.setattr(process_group, "open_store", lambda *_: ("127.0.0.1", board))
    monkeypatch.setattr(process_lifetime, "end_with_parent", lambda: None)
    monkeypatch.setattr(process_lifetime, "exit_process", exit_process)
    yield board
    for thread in threading.enumerate():
        if thread.name == "line":  # would end this process, as soon as it could
            thread.join(20)
            assert not thread.is_alive()


def _gathered(start_timeout: float) -> JoinedGroup:
    return JoinedGroup(
        world=WORLD,
        backend="gloo",
        shared_settings=CALLER.shared_settings,
        start_timeout=start_timeout,
        silence=5,
    )


def _gathered_with_parent(board: Board, hooks: RankHooks, start_timeout: float = 20) -> JoinedGroup:
    def work() -> None:
        hello = replace(CALLER, host_index=1)
        line = connections.call(board, hello, silence=5, deadline=time.monotonic() + 20)
        joined_rank._parents[:] = [joined_rank._ParentLink(line, hooks, 5, 0, 20)]

    thread = threading.Thread(target=work)
    thread.start()
    group = _gathered(start_timeout)
    thread.join()
    return group


def test_a_rank_that_is_stopped_as_soon_as_it_has_called_is_named(board: Board) -> None:
    called: list[connections.Connection] = []
    thread = _calling(board, called)
    with pytest.raises(RankError, match=r"rank 1 \(here\) called, and does not go on"):
        _gathered(1)
    thread.join()


def test_a_rank_that_does_not_answer_is_named_with_its_host(board: Board) -> None:
    released = threading.Event()
    hooks = RankHooks(lambda _: b"later" if released.wait(20) else b"")
    group = _gathered_with_parent(board, hooks, 1)
    with pytest.raises(RankError, match=r"rank 1 \(here\) does not say what lies in its") as error:
        group.ask(b"what?")
    assert "on here" in error.value.hint
    released.set()
    group.kill()


def test_a_question_that_cannot_be_answered_ends_both_sides(board: Board) -> None:
    def answer(_: bytes) -> bytes:
        raise OSError(5, "Input/output error")

    hooks = RankHooks(answer)
    group = _gathered_with_parent(board, hooks, 1)
    with pytest.raises(RankError):
        group.ask(b"what?")
    group.kill()
    (reason,) = hooks.reasons
    assert "cannot be answered (OSError(5, 'Input/output error'))" in reason


def test_a_rank_that_a_signal_ends_says_so(board: Board) -> None:
    group = _gathered_with_parent(board, RankHooks())
    with pytest.raises(SystemExit):
        joined_rank._exit_on_signal(2)
    assert group.poll(0) == [], "which would be taken for an answer"
    (parent,) = joined_rank._parents
    group._lines[1].send(BEGIN)
    parent.wait_for_begin()
    with pytest.raises(SystemExit) as end:
        joined_rank._exit_on_signal(2)
    assert end.value.code == 128 + 2
    assert group.poll(20) == [(1, b"ended by 2")]
    group.kill()


def test_a_rank_that_hears_nothing_of_rank_0_gives_up() -> None:
    ours, theirs = Pipe()
    with pytest.raises(RankError, match="rank 0 does not answer"):
        joined_rank._ParentLink(theirs, RankHooks(), 5, 0, 0.1)
    ours.close()


def test_what_a_rank_cannot_read_ends_it(board: Board) -> None:  # noqa: ARG001
    ours, theirs = Pipe()
    hooks = RankHooks()
    parent = joined_rank._ParentLink.__new__(joined_rank._ParentLink)
    parent.__dict__.update(
        _channel=joined_rank.PipeChannel(theirs),
        _hooks=hooks,
        _rank_0="rank 0",
        _hung_up=False,
        _local_rank=0,
    )
    ours.send_bytes(b".no JSON")
    with pytest.raises(SystemExit):
        parent._listen()
    (reason,) = hooks.reasons
    assert "is not understood" in reason
