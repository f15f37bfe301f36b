"""Owns the hooks in a launched rank's process: for its own events, and for its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from svdpp.driver.supervisor import Observer, describe_position
from svdpp.errors import Interrupted, error_to_dict
from svdpp.worker.messages import Failed, Heartbeat, parse_event


class LaunchedRankHooks:
    """Implements `svdpp.launch.joined_rank.RankHooks`.

    Args:
        name: of the rank, for messages.
        rank: its number.
        observers: called with every event that the rank reports.
        answer: answers rank 0's question about this host.
        say: takes the last message of the process, and whether no other process reports it.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        observers: Sequence[Observer],
        answer: Callable[[bytes], bytes],
        say: Callable[[str, bool], None],
    ) -> None:
        self._name, self._rank = name, rank
        self._observers = observers
        self.answer = answer
        self._say = say
        self._heartbeat = Heartbeat()

    def sent(self, message: bytes) -> None:
        """Passes an event of the rank to the observers."""
        event = parse_event(message)
        if isinstance(event, Heartbeat):
            self._heartbeat = event
        for observer in self._observers:
            observer(self._rank, event)

    def interrupted(self, number: int) -> bytes:
        """The message to rank 0 when a signal ends this process."""
        error = error_to_dict(Interrupted(number))
        heartbeat = self._heartbeat
        return Failed(
            error=error, traceback="", action=heartbeat.action, step=heartbeat.step
        ).to_bytes()

    def ended(self, error: dict[str, Any] | None) -> None:
        """Reports why rank 0 has ended the run; rank 0 has told the user."""
        if error is not None:
            self._say(f"{self._name} ends with the run: {error['message']}", False)

    def lost(self, reason: str) -> None:
        """Reports that rank 0 is gone or unreachable, and what this rank was doing."""
        where = describe_position(self._heartbeat.action, self._heartbeat.step)
        self._say(f"{reason}: {self._name} ends{where}", True)
