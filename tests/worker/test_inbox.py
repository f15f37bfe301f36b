"""Commands arrive in order, cancellations at once, and the inbox keeps neither for ever."""

from __future__ import annotations

import multiprocessing

from svdpp.launch.channel import PipeChannel
from svdpp.worker.messages import Cancel, Stop, Work
from svdpp.worker.rank import _Inbox


def test_a_cancelled_clip_is_forgotten_when_the_next_work_begins() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent, inbox = PipeChannel(ours), _Inbox(PipeChannel(theirs))
    for command in (Work(actions=(), jobs=()), Cancel(clip=0), Work(actions=(), jobs=()), Stop()):
        parent.send(command.to_bytes())
    assert isinstance(inbox.next(), Work)
    assert inbox.is_cancelled(0)
    assert not inbox.is_cancelled(1)
    assert isinstance(inbox.next(), Work)
    assert not inbox.is_cancelled(0)
    assert isinstance(inbox.next(), Stop)
