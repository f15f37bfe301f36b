"""Owns what was measured: spans, steps, waits and hops of every rank, and their sums."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, Span, summarise
from svdpp.runtime.messages import ActionDone, Event, HopDone, Joined, StepDone


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """One rank's times, in seconds; `bubble` is the share of the makespan it did not compute in."""

    rank: int
    device: str
    steps_done: int
    compute_seconds: float
    wait_seconds: float
    transfer_seconds: float
    mean_step_seconds: float
    p95_step_seconds: float
    bubble: float


class Trace:
    """Collects the events of a run.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.spans: list[Span] = []
        self._devices: dict[int, str] = {}
        self._steps: dict[int, list[float]] = defaultdict(list)
        self._waits: dict[int, float] = defaultdict(float)
        self._hops: dict[int, list[HopDone]] = defaultdict(list)

    def add(self, rank: int, event: Event) -> None:
        """Takes note of an event; those without a time are passed over."""
        match event:
            case Joined():
                self._devices[rank] = event.device
            case StepDone():
                self._steps[rank].append(event.seconds)
            case ActionDone():
                action = Action.parse(event.action)
                self.spans.append(Span(rank, action, event.start, event.end))
                self._waits[rank] += event.waited
            case HopDone():
                self._hops[rank].append(event)
            case _:
                pass

    def summary(self) -> Forecast:
        """Makespan, first clip, cadence and bubble, in the forecast's own terms.

        Raises:
            ValueError: nothing has been done yet.
        """
        return summarise(self.spans, self.world_size)

    def costs(self) -> Costs:
        """Mean seconds of each kind of work over all ranks: what a forecast of this run needs."""
        by_kind: dict[Kind, list[float]] = defaultdict(list)
        for span in self.spans:
            by_kind[span.action.kind].append(span.end - span.start)
        steps = [seconds for rank_steps in self._steps.values() for seconds in rank_steps]
        received = [
            hop.seconds for hops in self._hops.values() for hop in hops if hop.direction == "recv"
        ]
        return Costs(
            step_seconds=_mean(steps),
            encode_seconds=_mean(by_kind[Kind.ENCODE]),
            decode_seconds=_mean(by_kind[Kind.DECODE]),
            hop_seconds=_mean(received),
        )

    def rank_stats(self) -> list[RankStats]:
        """Each rank's sums."""
        makespan = self.summary().makespan
        return [self._stats(rank, makespan) for rank in range(self.world_size)]

    def _stats(self, rank: int, makespan: float) -> RankStats:
        compute = sum(span.end - span.start for span in self.spans if span.rank == rank)
        steps = self._steps[rank]
        return RankStats(
            rank=rank,
            device=self._devices.get(rank, ""),
            steps_done=len(steps),
            compute_seconds=compute,
            wait_seconds=self._waits[rank],
            # A sender's time includes the wait for a receiver; the receiver's is the wire's alone.
            transfer_seconds=sum(h.seconds for h in self._hops[rank] if h.direction == "recv"),
            mean_step_seconds=_mean(steps),
            p95_step_seconds=percentile(steps, 0.95),
            bubble=max(0.0, 1 - compute / makespan) if makespan else 0.0,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """The rank statistics as plain values."""
        return [asdict(stats) for stats in self.rank_stats()]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0
