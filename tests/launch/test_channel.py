"""Messages from the parent to a rank that does not read for a while."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

from svdpp.launch.channel import PipeChannel, QueuedChannel

MESSAGES = [bytes([number]) * 2**20 for number in range(3)]


def _senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sender"]


def test_messages_to_a_busy_rank_wait_in_their_order() -> None:
    ours, theirs = Pipe()
    parent, rank = QueuedChannel(ours), PipeChannel(theirs)
    for message in MESSAGES:
        parent.send(message)  # a pipe holds no whole one
    rank.send(b"busy")
    assert parent.receive(10) == b"busy"
    assert [rank.receive(10) for _ in MESSAGES] == MESSAGES
    parent.close()
    parent.close()
    rank.close()


def test_the_end_waits_for_no_rank_and_leaves_no_thread() -> None:
    before = _senders()
    ours, theirs = Pipe()
    parent = QueuedChannel(ours)
    for message in MESSAGES:
        parent.send(message)
    parent.close()
    assert parent.connection.closed
    assert _senders() == before
    theirs.close()


def test_a_rank_that_is_gone_is_no_error_for_the_sender() -> None:
    before = _senders()
    ours, theirs = Pipe()
    parent = QueuedChannel(ours)
    theirs.close()
    parent.send(b"work")
    parent.send(b"stop")
    parent.close()
    assert parent.connection.closed
    assert _senders() == before
