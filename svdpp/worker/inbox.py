"""Owns the commands from the parent: work as a queue of actions, and cancelled clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from svdpp.launch.channel import Channel
from svdpp.plan.action_queue import ActionQueue
from svdpp.plan.actions import Action
from svdpp.worker.messages import Cancel, Stop, Work, parse_command

_POLL_SECONDS = 1.0


class Inbox:
    """Takes the parent's commands between actions and, for cancellations, between steps.

    Args:
        channel: to the parent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue = ActionQueue()
        self._new: list[Work] = []
        self._now: int | None = None
        self._cancelled: set[int] = set()
        self._drafts: set[int] = set()
        self._is_stopped = False

    def actions(self, expect: Callable[[Work], None], rest: Callable[[], None]) -> Iterator[Action]:
        """Yields this rank's actions until the parent says stop and none is left.

        Args:
            expect: called with each work before any of its actions is yielded.
            rest: called whenever no action is left.
        """
        while True:
            self._receive_all(expect)
            if not self._queue:
                rest()
                while not (self._queue or self._is_stopped):
                    self._receive(_POLL_SECONDS)
                    self._receive_all(expect)
                if not self._queue:
                    return
            action = self._queue.pop()
            self._now = action.clip
            yield action
            if not self._queue.holds(action.clip):
                self._cancelled.discard(action.clip)
                self._drafts.discard(action.clip)
            self._now = None

    def wait_for_stop(self) -> None:
        """Waits until the parent says stop another time; cancellations before it are late."""
        self._is_stopped = False
        while not self._is_stopped:
            self._receive(_POLL_SECONDS)

    def is_cancelled(self, clip: int) -> bool:
        """Whether the parent has cancelled `clip`, which has actions left; does not wait."""
        while self._receive(0):
            pass
        return clip in self._cancelled

    def is_draft(self, clip: int) -> bool:
        """Whether `clip`, which has actions left, is a draft."""
        return clip in self._drafts

    def _receive_all(self, expect: Callable[[Work], None]) -> None:
        while self._receive(0):
            pass
        for work in self._new:
            expect(work)
        self._new.clear()

    def _receive(self, timeout: float) -> bool:
        message = self._channel.receive(timeout)
        if message is None:
            return False
        match parse_command(message):
            case Work() as work:
                self._new.append(work)
                self._queue.add(work.actions, joins=not work.is_draft)
                if work.is_draft:
                    self._drafts.update(action.clip for action in work.actions)
            case Cancel(clip=clip) if clip == self._now or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # this rank has done its part of the cancelled clip
        return True
