"""Owns the judgement which rank stands still, from what each has said and when. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from svdpp.plan.actions import Action
from svdpp.worker.messages import Event, Finished, Heartbeat, Joined, StepDone

# The parent looks several times a second; when it has not for so long, it was itself stopped.
_PAUSE_SECONDS = 3.0


@dataclass
class _Seen:
    heard: float
    """When the last message came."""
    progressed: float
    """When the last message came that was no heartbeat."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    started: bool = False
    joined: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Stall:
    """A rank to be named, and what is the matter with it."""

    rank: int
    reason: str
    hint: str
    silent: bool = False
    """Whether nothing is heard of the rank at all."""


class Liveness:
    """Tells a slow rank from a frozen one, and a frozen one from those that wait for it.

    Args:
        world_size: number of ranks.
        now: seconds, on the clock that all later times are of.
        start_timeout: seconds for all ranks to join.
        heartbeat_timeout: seconds without a heartbeat after which a rank is frozen.
        timeout: seconds without progress after which a computing rank is stalled.
    """

    def __init__(
        self,
        world_size: int,
        now: float,
        *,
        start_timeout: float,
        heartbeat_timeout: float,
        timeout: float,
    ) -> None:
        self._begun = self._looked = now
        self._start_timeout = start_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._timeout = timeout
        self._seen = [_Seen(now, now) for _ in range(world_size)]

    def heard(self, rank: int, event: Event, now: float) -> None:
        """Takes note of a message."""
        self._look(now)
        seen = self._seen[rank]
        seen.started = True
        seen.heard = now
        if isinstance(event, Heartbeat):
            # A rank that idles between batches has no progress to make.
            if not event.action and not event.writing:
                seen.progressed = now
            seen.heartbeat = event
            return
        seen.progressed = now
        if isinstance(event, StepDone):
            seen.heartbeat = _at_next_step(seen.heartbeat, event)
        seen.joined = seen.joined or isinstance(event, Joined)
        seen.finished = seen.finished or isinstance(event, Finished)

    def position(self, rank: int) -> Heartbeat:
        """What `rank` last said that it was doing."""
        return self._seen[rank].heartbeat

    def is_finished(self, rank: int) -> bool:
        """Whether `rank` has said that it is done."""
        return self._seen[rank].finished

    @property
    def all_joined(self) -> bool:
        """Whether every rank is ready for work."""
        return all(seen.joined for seen in self._seen)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has said that it is done."""
        return all(seen.finished for seen in self._seen)

    def stall(self, now: float) -> Stall | None:
        """The rank to blame at time `now`, or None while all is well."""
        self._look(now)
        running = [rank for rank, seen in enumerate(self._seen) if not seen.finished]
        for rank in running:
            seen = self._seen[rank]
            if seen.started and now - seen.heard > self._heartbeat_timeout:
                reason = f"has been frozen for {now - seen.heard:.0f} s"
                hint = "is it stopped, or its machine out of memory?"
                return Stall(rank, reason, hint, silent=True)
        if not self.all_joined and now - self._begun > self._start_timeout:
            late = min(
                running, key=lambda rank: (self._seen[rank].joined, self._seen[rank].started)
            )
            reason = "never started" if not self._seen[late].started else "did not get ready"
            reason += f" within {self._start_timeout:.0f} s"
            return Stall(late, reason, "raise --start-timeout for a slow disk")
        return self._without_progress(running, now)

    def _look(self, now: float) -> None:
        """Leaves out the time in which this process was stopped, and perhaps the ranks with it.

        By Ctrl-Z, which reaches the whole terminal group, or as a machine is suspended.
        """
        pause, self._looked = now - self._looked, now
        if pause > _PAUSE_SECONDS:
            self._begun += pause
            for seen in self._seen:
                seen.heard += pause
                seen.progressed += pause

    def _without_progress(self, running: list[int], now: float) -> Stall | None:
        if not self.all_joined:
            return None
        slow = [r for r in running if now - self._seen[r].progressed > self._timeout]
        heartbeats = {rank: self._seen[rank].heartbeat for rank in running}
        # A rank that waits is slow through another's fault, unless all that are not idle wait; or
        # through its own, where it has had something to write for all that time.
        guilty = [rank for rank in slow if heartbeats[rank].writing or not heartbeats[rank].waiting]
        if not guilty and all(rank in slow for rank in running if heartbeats[rank].action):
            guilty = slow
        if not guilty:
            return None
        rank = min(guilty, key=lambda rank: self._seen[rank].progressed)
        waited = now - self._seen[rank].progressed
        if heartbeats[rank].writing and (heartbeats[rank].waiting or not heartbeats[rank].action):
            reason = f"has waited for its disk for {waited:.0f} s"
            return Stall(rank, reason, "does the folder that it writes to still answer?")
        reason = f"has made no progress for {waited:.0f} s"
        return Stall(rank, reason, "raise --timeout if a single step takes that long")


def _at_next_step(heartbeat: Heartbeat, done: StepDone) -> Heartbeat:
    """The place after a step: the next one of the same action, or still that one if it was last."""
    if not heartbeat.action:
        return heartbeat
    last = Action.parse(heartbeat.action).end - 1
    return heartbeat.model_copy(update={"step": min(done.step + 1, last)})
