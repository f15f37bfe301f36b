"""Owns a rank's actions that are still to be performed; lists can be added at any time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from svdpp.plan.actions import Action, Kind


class ActionQueue:
    """One rank's actions, in the order in which it performs them.

    A list that joins and begins with a RECV is added as if it had been built as one list with the
    one before by `build_schedule`: that RECV moves before the work of the last clip, if this work
    has not begun. So clips that are submitted one at a time overlap like those of one list. The
    order of a rank's RECVs does not change.
    """

    def __init__(self) -> None:
        self._joins = False
        self._actions: deque[Action] = deque()
        self._left: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether actions are left."""
        return bool(self._actions)

    def holds(self, clip: int) -> bool:
        """Whether actions of `clip` are left."""
        return clip in self._left

    def add(self, actions: Sequence[Action], *, joins: bool = True) -> None:
        """Adds a list of further clips.

        Args:
            actions: in order.
            joins: whether it joins lists that join; the list of a draft plan does not.
        """
        self._left.update(action.clip for action in actions)
        does_join = joins and self._joins
        if does_join and self._actions and actions and actions[0].kind is Kind.RECV:
            self._actions.insert(self._start_of_last_work(), actions[0])
            actions = actions[1:]
        self._actions.extend(actions)
        self._joins = joins

    def pop(self) -> Action:
        """Removes and returns the next action.

        Raises:
            IndexError: none is left.
        """
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
