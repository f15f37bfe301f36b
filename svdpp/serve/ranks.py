"""The view of the ranks: what each does now, and what it did in the last minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from svdpp.errors import BrokenLinkError, Interrupted
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, Event, Failed, Heartbeat, Joined, StepDone

SpanKind = Literal["encode", "denoise", "decode"]

_SPAN_SECONDS = 60.0
_MAX_SPANS = 1024
# Types of errors that follow from the failure of another rank, or from a signal.
_CONSEQUENCES = (BrokenLinkError.__name__, Interrupted.__name__)
_SHOWN = (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)


@dataclass(frozen=True)
class Rank:
    """What a rank does now."""

    rank: int
    device: str
    """Empty until it has joined."""
    video: str | None
    action: str
    """The kind, in lower case; empty between actions."""
    step: int | None
    """None outside of denoising."""
    doing: Literal["compute", "wait", "idle"]


@dataclass(frozen=True, slots=True)
class RankSpan:
    """What a rank did, in unix seconds."""

    rank: int
    video: str | None
    kind: SpanKind
    start: float
    end: float


@dataclass
class _State:
    device: str = ""
    clock_ahead: float = 0.0
    action: Action | None = None
    step: int = -1
    waits: bool = False
    since: float = 0.0


class RankView:
    """Collects the events of the ranks. One thread adds them, any thread reads.

    `job_of` gives the id of the job of a clip; it is called in `add`, `now` and `spans`.
    """

    def __init__(self, world_size: int, job_of: Callable[[int], str | None]) -> None:
        self._job_of = job_of
        self._lock = threading.Lock()
        self._ranks = [_State() for _ in range(world_size)]
        self._spans: deque[RankSpan] = deque(maxlen=_MAX_SPANS)
        self.failed: int | None = None
        """The first rank that reported a failure of its own; None if none has."""

    def reset(self) -> None:
        """Forgets what the ranks do, because they have ended; keeps the spans."""
        with self._lock:
            self._ranks = [_State() for _ in self._ranks]
            self.failed = None

    def add(self, rank: int, event: Event) -> Action | None:
        """Takes one event; returns its action if it is about one."""
        with self._lock:
            at = self._ranks[rank]
            match event:
                case Joined():
                    at.device, at.clock_ahead = event.device, event.clock_ahead
                case Failed() | Heartbeat():
                    if isinstance(event, Failed) and event.error["type"] not in _CONSEQUENCES:
                        self.failed = rank if self.failed is None else self.failed
                    waits = isinstance(event, Heartbeat) and event.waiting
                    if (event.action, waits) != (at.action, at.waits):
                        at.action, at.waits, at.since = event.action, waits, time.monotonic()
                        at.step = -1
                    at.step = max(at.step, event.step)
                    return event.action
                case StepDone():
                    at.step = event.step + 1
                case ActionDone():
                    start, end = event.start - at.clock_ahead, event.end - at.clock_ahead
                    self._spans += self._span(rank, event.action, start, end)
                    return event.action
                case _:
                    pass
            return None

    def _span(self, rank: int, action: Action, start: float, end: float) -> list[RankSpan]:
        """The span of an action between monotonic times, if it is one that the page shows."""
        if action.kind not in _SHOWN:
            return []
        ahead = time.time() - time.monotonic()
        kind = cast("SpanKind", action.kind.lower())
        return [RankSpan(rank, self._job_of(action.clip), kind, start + ahead, end + ahead)]

    def clip_of(self, rank: int) -> int | None:
        """The clip of the rank's last report; None if it was between actions."""
        with self._lock:
            action = self._ranks[rank].action if rank < len(self._ranks) else None
        return None if action is None else action.clip

    def now(self) -> list[Rank]:
        """What each rank does now."""
        with self._lock:
            return [self._now(rank, at) for rank, at in enumerate(self._ranks)]

    def _now(self, rank: int, at: _State) -> Rank:
        if at.action is None:
            return Rank(rank, at.device, None, "", None, "idle")
        step = at.step if at.action.kind is Kind.DENOISE and at.step >= 0 else None
        job = self._job_of(at.action.clip)
        return Rank(
            rank, at.device, job, at.action.kind.lower(), step, "wait" if at.waits else "compute"
        )

    def spans(self) -> list[RankSpan]:
        """The spans of the last 60 seconds, and those of the actions at work."""
        oldest, now = time.time() - _SPAN_SECONDS, time.monotonic()
        with self._lock:
            spans = [span for span in self._spans if span.end >= oldest]
            for rank, at in enumerate(self._ranks):
                if at.action is not None and not at.waits:
                    spans += self._span(rank, at.action, at.since, now)
        return spans
