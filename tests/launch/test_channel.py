"""The parent's channel to a rank that does not read, or has ended."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

from svdpp.launch.group import PipeChannel, QueuedChannel

MESSAGES = [bytes([number]) * 2**20 for number in range(3)]


def _senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sender"]


def test_messages_to_a_busy_rank_are_queued_in_order() -> None:
    ours, theirs = Pipe()
    parent, rank = QueuedChannel(ours), PipeChannel(theirs)
    for message in MESSAGES:
        parent.send(message)  # each is larger than a pipe's buffer
    rank.send(b"busy")
    assert parent.receive(10) == b"busy"
    assert [rank.receive(10) for _ in MESSAGES] == MESSAGES
    parent.close()
    parent.close()
    rank.close()


def test_close_does_not_wait_for_the_rank_and_leaves_no_thread() -> None:
    before = _senders()
    ours, theirs = Pipe()
    parent = QueuedChannel(ours)
    for message in MESSAGES:
        parent.send(message)
    parent.close()
    assert parent.connection.closed
    assert _senders() == before
    theirs.close()


def test_send_does_not_raise_if_the_rank_has_ended() -> None:
    before = _senders()
    ours, theirs = Pipe()
    parent = QueuedChannel(ours)
    theirs.close()
    parent.send(b"work")
    parent.send(b"stop")
    parent.close()
    assert parent.connection.closed
    assert _senders() == before
