"""Owns the decision which rank has stalled, from the events of each and their times. No clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from svdpp.plan.actions import Action
from svdpp.worker.messages import Event, Finished, Heartbeat, Joined, StepDone

# The parent looks several times a second; if it has not for so long, it was itself stopped.
_PAUSE_SECONDS = 3.0
_SLOW_DISK = "raise --start-timeout for a slow disk"
_LINK = (
    "on GPUs try NCCL_P2P_DISABLE=1, a larger /dev/shm (docker run --shm-size=8g), or "
    "PIPELINE_BACKEND=gloo; between hosts look at the firewall"
)


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
    """The rank to name, and what is wrong with it."""

    rank: int
    reason: str
    hint: str
    silent: bool = False
    """Whether the rank sends nothing at all."""


class Liveness:
    """Tells a slow rank from a stalled one, and a stalled one from those that wait for it.

    Args:
        world_size: number of ranks.
        now: seconds, on the clock that all later times are of.
        start_timeout: seconds for all ranks to join.
        heartbeat_timeout: seconds without a heartbeat after which a rank is stalled; it counts
            once the rank has joined.
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
        """Takes one event."""
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
        """What `rank` was doing by its last event."""
        return self._seen[rank].heartbeat

    def is_finished(self, rank: int) -> bool:
        """Whether `rank` has reported that it is done."""
        return self._seen[rank].finished

    @property
    def all_joined(self) -> bool:
        """Whether every rank is ready for work."""
        return all(seen.joined for seen in self._seen)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has reported that it is done."""
        return all(seen.finished for seen in self._seen)

    def stall(self, now: float) -> Stall | None:
        """The rank to blame at time `now`; None while all is well."""
        self._look(now)
        running = [rank for rank, seen in enumerate(self._seen) if not seen.finished]
        for rank in running:
            seen = self._seen[rank]
            # Before a rank has joined, a library may hold Python's lock for long, such as CUDA's
            # initialisation with many cards.
            if seen.joined and now - seen.heard > self._heartbeat_timeout:
                reason = f"has sent no heartbeat for {now - seen.heard:.0f} s"
                hint = "is it stopped, or its machine out of memory?"
                return Stall(rank, reason, hint, silent=True)
        if not self.all_joined and now - self._begun > self._start_timeout:
            return self._late(running)
        return self._without_progress(running, now)

    def _late(self, running: list[int]) -> Stall:
        """The rank that keeps the others from starting: rather one that is not yet connecting."""

        def progress(rank: int) -> tuple[bool, bool, bool]:
            seen = self._seen[rank]
            return seen.joined, seen.heartbeat.peer >= 0, seen.started

        rank = min(running, key=progress)
        seen, within = self._seen[rank], f"within {self._start_timeout:.0f} s"
        if not seen.started:
            return Stall(rank, f"never started {within}", _SLOW_DISK)
        if seen.heartbeat.peer >= 0:
            return Stall(rank, f"did not finish {seen.heartbeat.phase} {within}", _LINK)
        doing = f" ({seen.heartbeat.phase})" if seen.heartbeat.phase else ""
        return Stall(rank, f"did not get ready {within}{doing}", _SLOW_DISK)

    def _look(self, now: float) -> None:
        """Discounts the time in which this process was stopped, and perhaps the ranks with it.

        By Ctrl-Z, which reaches the whole terminal group, or by a suspended machine.
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
        # A rank that waits is slow because of another, unless all busy ranks wait; or because of
        # itself, if it has had something to write for all that time.
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
    """The position after a step: the next step of the same action, or the same if it was last."""
    if not heartbeat.action:
        return heartbeat
    last = Action.parse(heartbeat.action).end - 1
    return heartbeat.model_copy(update={"step": min(done.step + 1, last)})
