"""The commands from the parent: work as a queue of actions, and cancelled clips."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from svdpp.launch.group import Channel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import Cancel, Stop, Work, parse_command


class ActionQueue:
    """One rank's actions, in the order in which it performs them.

    A list that begins with a RECV is added as if it had been built as one list with the
    one before by `build_schedule`: that RECV moves before the work of the last clip, if this work
    has not begun. So clips that are submitted one at a time overlap like those of one list. The
    order of a rank's RECVs does not change.
    """

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._left: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether actions are left."""
        return bool(self._actions)

    def holds(self, clip: int) -> bool:
        """Whether actions of `clip` are left."""
        return clip in self._left

    def add(self, actions: Sequence[Action]) -> None:
        """Adds a list of further clips, in order."""
        self._left.update(action.clip for action in actions)
        if self._actions and actions and actions[0].kind is Kind.RECV:
            self._actions.insert(self._start_of_last_work(), actions[0])
            actions = actions[1:]
        self._actions.extend(actions)

    def pop(self) -> Action:
        """Removes and returns the next action."""
        action = self._actions.popleft()
        self._left[action.clip] -= 1
        if not self._left[action.clip]:
            del self._left[action.clip]
        return action

    def _start_of_last_work(self) -> int:
        """The index of the first action, other than its RECV, of the last clip in the queue."""
        index = len(self._actions)
        clip = self._actions[-1].clip
        while index and self._actions[index - 1].clip == clip:
            if self._actions[index - 1].kind is Kind.RECV:
                break
            index -= 1
        return index


_POLL_SECONDS = 1.0


class Inbox:
    """Takes the parent's commands between actions and, for cancellations, between steps."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue = ActionQueue()
        self._new: list[Work] = []
        self._now: int | None = None
        self._cancelled: set[int] = set()
        self._is_stopped = False

    def actions(self, expect: Callable[[Work], None], rest: Callable[[], None]) -> Iterator[Action]:
        """Yields this rank's actions until the parent says stop and none is left.

        `expect` is called with each work before any of its actions is yielded, `rest`
        whenever no action is left.
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
                self._queue.add(work.actions)
            case Cancel(clip=clip) if clip == self._now or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # this rank has done its part of the cancelled clip
        return True
