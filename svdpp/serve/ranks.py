"""The view of the ranks: what each does now, and what it did in the last minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from svdpp.errors import BrokenLinkError, Interrupted
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, Event, Failed, Heartbeat, Joined, StepDone

Doing = Literal["compute", "wait", "idle"]
SpanKind = Literal["encode", "denoise", "decode"]

_SPAN_SECONDS = 60.0
_MAX_SPANS = 1024
# Types of errors that follow from the failure of another rank, or from a signal.
_CONSEQUENCES = (BrokenLinkError.__name__, Interrupted.__name__)
_SPAN_KINDS: dict[Kind, SpanKind] = {
    Kind.ENCODE: "encode",
    Kind.DENOISE: "denoise",
    Kind.DECODE: "decode",
}


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
    doing: Doing


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
        self._failed: int | None = None

    def reset(self) -> None:
        """Forgets what the ranks do, because they have ended; keeps the spans."""
        with self._lock:
            self._ranks = [_State() for _ in self._ranks]
            self._failed = None

    @property
    def failed(self) -> int | None:
        """The first rank that reported a failure of its own; None if none has."""
        return self._failed

    def add(self, rank: int, event: Event) -> Action | None:
        """Takes one event; returns its action if it is about one."""
        with self._lock:
            at = self._ranks[rank]
            match event:
                case Joined():
                    at.device, at.clock_ahead = event.device, event.clock_ahead
                case Heartbeat() | Failed():
                    if isinstance(event, Failed) and event.error["type"] not in _CONSEQUENCES:
                        self._failed = rank if self._failed is None else self._failed
                    return self._moved(at, event)
                case StepDone():
                    at.step = event.step + 1
                case ActionDone():
                    return self._done(rank, at, event)
                case _:
                    pass
            return None

    def clip_of(self, rank: int) -> int | None:
        """The clip of the rank's last report; None if it was between actions."""
        with self._lock:
            action = self._ranks[rank].action if rank < len(self._ranks) else None
        return None if action is None else action.clip

    def now(self) -> list[Rank]:
        """What each rank does now."""
        with self._lock:
            return [self._now(rank, at) for rank, at in enumerate(self._ranks)]

    def spans(self) -> list[RankSpan]:
        """The spans of the last 60 seconds, and those of the actions at work."""
        now = time.time()
        with self._lock:
            found = [span for span in self._spans if span.end >= now - _SPAN_SECONDS]
            for rank, at in enumerate(self._ranks):
                if at.action is not None and not at.waits and at.action.kind in _SPAN_KINDS:
                    kind = _SPAN_KINDS[at.action.kind]
                    start = _unix(at.since)
                    found.append(RankSpan(rank, self._job_of(at.action.clip), kind, start, now))
        return found

    def _moved(self, at: _State, event: Heartbeat | Failed) -> Action | None:
        action = event.action
        waits = isinstance(event, Heartbeat) and event.waiting
        if (action, waits) != (at.action, at.waits):
            at.action, at.waits, at.since = action, waits, time.monotonic()
            at.step = -1
        at.step = max(at.step, event.step)
        return action

    def _done(self, rank: int, at: _State, event: ActionDone) -> Action:
        action = event.action
        if (kind := _SPAN_KINDS.get(action.kind)) is not None:
            start, end = (_unix(each - at.clock_ahead) for each in (event.start, event.end))
            self._spans.append(RankSpan(rank, self._job_of(action.clip), kind, start, end))
        return action

    def _now(self, rank: int, at: _State) -> Rank:
        if at.action is None:
            return Rank(rank, at.device, None, "", None, "idle")
        step = at.step if at.action.kind is Kind.DENOISE and at.step >= 0 else None
        doing: Doing = "wait" if at.waits else "compute"
        kind = at.action.kind.lower()
        return Rank(rank, at.device, self._job_of(at.action.clip), kind, step, doing)


def _unix(monotonic: float) -> float:
    return monotonic + time.time() - time.monotonic()
