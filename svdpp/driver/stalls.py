"""The decision which rank has stalled, from the ranks' events and their times."""

from __future__ import annotations

from dataclasses import dataclass, field

from svdpp.config import PipelineConfig
from svdpp.worker.messages import Event, Finished, GpuSample, Heartbeat, Joined, StepDone

# Before a rank has joined, a library may hold the GIL for long, such as CUDA's initialisation with
# many GPUs; so its silence counts only after this many times the limit for joined ranks.
_PATIENCE_AT_START = 8
# The parent polls several times a second; a longer pause means that it was stopped itself.
_PAUSE_SECONDS = 3.0
_SLOW_DISK = "raise --start-timeout for a slow disk"
_LINK = (
    "on GPUs try NCCL_P2P_DISABLE=1, a larger /dev/shm (docker run --shm-size=8g), or "
    "PIPELINE_BACKEND=gloo; between hosts check the firewall"
)


@dataclass
class _Seen:
    heard: float
    """Time of the last message."""
    progressed: float
    """Until when it has made progress, or had nothing to do."""
    acted: float
    """Time of the last message that was not a heartbeat."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    started: bool = False
    joined: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Stall:
    """A stalled rank, and what is wrong with it."""

    rank: int
    reason: str
    hint: str
    silent: bool = False
    """Whether the rank sends no messages."""


class Liveness:
    """Distinguishes a stalled rank from a slow one and from those that wait for it.

    All times are seconds on one clock, and begin `now`. All ranks must join within the start
    timeout. A rank is stalled after `silence_limit` without a heartbeat (eight times that before it
    has joined), or, once all have joined, after the timeout of computing without progress.
    """

    def __init__(self, config: PipelineConfig, now: float) -> None:
        self._begun = self._polled = now
        self._start_timeout = config.start_timeout_seconds
        self._heartbeat_timeout = silence_limit(config)
        self._timeout = config.timeout_seconds
        self._seen = [_Seen(now, now, now) for _ in range(config.world_size)]

    def heard(self, rank: int, event: Event, now: float) -> None:
        """Takes one event."""
        self._discount_pause(now)
        if isinstance(event, GpuSample):
            return  # of a thread that goes on even if the rank is stuck
        seen = self._seen[rank]
        seen.started = True
        seen.heard = now
        if isinstance(event, Heartbeat):
            # An idle rank makes no progress, and is not stalled. One that waited has its packet.
            is_idle = event.action is None and not event.writing
            if is_idle or (seen.heartbeat.waiting and not event.waiting):
                seen.progressed = now
            seen.heartbeat = event
            return
        seen.progressed = seen.acted = now
        if isinstance(event, StepDone):
            seen.heartbeat = _at_next_step(seen.heartbeat, event)
        seen.joined = seen.joined or isinstance(event, Joined)
        seen.finished = seen.finished or isinstance(event, Finished)

    def position(self, rank: int) -> Heartbeat:
        """What `rank` was doing at its last event."""
        return self._seen[rank].heartbeat

    def is_finished(self, rank: int) -> bool:
        """Whether `rank` has reported the end of its work."""
        return self._seen[rank].finished

    @property
    def all_joined(self) -> bool:
        """Whether every rank is ready for work."""
        return all(seen.joined for seen in self._seen)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has reported the end of its work."""
        return all(seen.finished for seen in self._seen)

    def stall(self, now: float) -> Stall | None:
        """The stalled rank at time `now`; None if there is none."""
        self._discount_pause(now)
        running = [rank for rank, seen in enumerate(self._seen) if not seen.finished]
        for rank in running:
            seen = self._seen[rank]
            limit = self._heartbeat_timeout * (1 if seen.joined else _PATIENCE_AT_START)
            if seen.started and now - seen.heard > limit:
                reason = f"has sent no heartbeat for {now - seen.heard:.0f} s"
                hint = "check whether it is stopped, or its machine is out of memory"
                return Stall(rank, reason, hint, silent=True)
        if not self.all_joined and now - self._begun > self._start_timeout:
            return self._late(running)
        return self._without_progress(running, now)

    def _late(self, running: list[int]) -> Stall:
        """The rank that delays the start; a rank that is not yet connecting comes first."""

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

    def _discount_pause(self, now: float) -> None:
        """Subtracts the time for which this process, and perhaps the ranks, were stopped.

        Ctrl-Z stops the whole terminal group; a suspended machine stops everything.
        """
        pause, self._polled = now - self._polled, now
        if pause > _PAUSE_SECONDS:
            self._begun += pause
            for seen in self._seen:
                seen.heard += pause
                seen.progressed += pause
                seen.acted += pause

    def _without_progress(self, running: list[int], now: float) -> Stall | None:
        if not self.all_joined:
            return None
        slow = [r for r in running if now - self._seen[r].progressed > self._timeout]
        heartbeats = {rank: self._seen[rank].heartbeat for rank in running}
        # A waiting rank is slow because of another rank, unless all busy ranks wait, or unless it
        # has had something to write for all that time.
        causes = [rank for rank in slow if heartbeats[rank].writing or not heartbeats[rank].waiting]
        if not causes and all(rank in slow for rank in running if heartbeats[rank].action):
            # Not if one has just sent its packet, which the waiting rank has not reported yet.
            acted = max((self._seen[rank].acted for rank in running), default=now)
            causes = slow if now - acted > self._timeout else []
        if not causes:
            return None
        rank = min(causes, key=lambda rank: self._seen[rank].progressed)
        waited = now - self._seen[rank].progressed
        if heartbeats[rank].writing and (
            heartbeats[rank].waiting or heartbeats[rank].action is None
        ):
            reason = f"has waited for its disk for {waited:.0f} s"
            return Stall(rank, reason, "check that the folder it writes to still responds")
        reason = f"has made no progress for {waited:.0f} s"
        return Stall(rank, reason, "raise --timeout if a single step takes that long")


def _at_next_step(heartbeat: Heartbeat, done: StepDone) -> Heartbeat:
    if heartbeat.action is None:
        return heartbeat
    last = heartbeat.action.end - 1
    return heartbeat.model_copy(update={"step": min(done.step + 1, last)})


def silence_limit(config: PipelineConfig) -> float:
    """Seconds without a heartbeat after which a rank is stalled; shorter than its `timeout`."""
    return min(config.heartbeat_timeout_seconds, 0.8 * config.timeout_seconds)
