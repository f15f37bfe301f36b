"""Owns what was measured: spans, steps, waits and transfers of every rank, and their sums."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, Span, percentile, summarise
from svdpp.worker.messages import ActionDone, Event, Joined, StepDone, TransferDone


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


class StepSpan(NamedTuple):
    """When one rank did one denoising step, on the machine's monotonic clock."""

    rank: int
    clip: int
    step: int
    start: float
    end: float


class WaitSpan(NamedTuple):
    """When one rank waited for a packet, or for a slow neighbour."""

    rank: int
    start: float
    end: float


class TransferSpan(NamedTuple):
    """When one rank received or sent one packet."""

    rank: int
    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    start: float
    end: float


class MeanCosts:
    """Running means of each kind of work over all ranks, in the same memory however long the run.

    A sender's transfer includes the wait for a receiver; the receiver's is the wire's alone and
    counts.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, event: Event) -> None:
        """Takes note of an event; those without a time are passed over."""
        match event:
            case StepDone():
                self._count("step", event.seconds)
            case ActionDone():
                self._count(Action.parse(event.action).kind, event.end - event.start)
            case TransferDone(direction="recv"):
                self._count("transfer", event.seconds)
            case _:
                pass

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been measured."""
        return self._counts["step"] > 0

    def costs(self) -> Costs:
        """What a forecast of this run needs.

        Raises:
            RequestError: no step has been measured yet.
        """
        return Costs(
            step_seconds=self._mean("step"),
            encode_seconds=self._mean(Kind.ENCODE),
            decode_seconds=self._mean(Kind.DECODE),
            transfer_seconds=self._mean("transfer"),
        )

    def costs_like(self, assumed: Costs) -> Costs:
        """What is measured; what is not yet, as it weighs beside a step in `assumed`."""
        if not self.has_stepped:
            return assumed
        scale = self._mean("step") / assumed.step_on(0)

        def known(what: str, seconds: float) -> float:
            return self._mean(what) if self._counts[what] else scale * seconds

        transfer = self._mean("transfer") if self._counts["transfer"] else 0.0
        return Costs(
            step_seconds=self._mean("step"),
            encode_seconds=known(Kind.ENCODE, assumed.encode_on(0)),
            decode_seconds=known(Kind.DECODE, assumed.decode_on(0)),
            transfer_seconds=transfer,
        )

    def _count(self, what: str, seconds: float) -> None:
        self._sums[what] += seconds
        self._counts[what] += 1

    def _mean(self, what: str) -> float:
        return self._sums[what] / max(1, self._counts[what])


class Trace:
    """Collects the events of a run. All times are of the monotonic clock of rank 0's machine.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.spans: list[Span] = []
        self.steps: list[StepSpan] = []
        self.waits: list[WaitSpan] = []
        self.transfers: list[TransferSpan] = []
        self.devices: dict[int, str] = {}
        self._means = MeanCosts()
        self._clock_ahead: dict[int, float] = defaultdict(float)
        self._unplaced: dict[int, list[StepDone]] = defaultdict(list)

    def add(self, rank: int, event: Event) -> None:
        """Takes note of an event; those without a time are passed over."""
        self._means.add(event)
        match event:
            case Joined():
                self.devices[rank] = event.device
                self._clock_ahead[rank] = event.clock_ahead
            case StepDone():
                self._unplaced[rank].append(event)
            case ActionDone():
                ahead = self._clock_ahead[rank]
                times = {"start": event.start - ahead, "end": event.end - ahead}
                self._add_action(rank, event.model_copy(update=times))
            case TransferDone():
                transfer = event.direction, event.clip, event.next_step, event.peer, event.num_bytes
                end = event.end - self._clock_ahead[rank]
                self.transfers.append(TransferSpan(rank, *transfer, end - event.seconds, end))
            case _:
                pass

    def _add_action(self, rank: int, done: ActionDone) -> None:
        self.spans.append(Span(rank, Action.parse(done.action), done.start, done.end))
        if done.waited > 0:
            # It may be two waits, for a send and then a receive, with next to nothing between.
            self.waits.append(WaitSpan(rank, done.start - done.waited, done.start))
        self.steps += _placed(rank, done, self._unplaced.pop(rank, []))

    def summary(self) -> Forecast:
        """Makespan, first clip, time per clip and bubble, in the forecast's own shared_settings.

        Raises:
            ValueError: nothing has been done yet.
        """
        return summarise(self.spans, self.world_size)

    def costs(self) -> Costs:
        """Mean seconds of each kind of work over all ranks: what a forecast of this run needs."""
        return self._means.costs()

    def rank_stats(self) -> list[RankStats]:
        """Each rank's sums."""
        makespan = self.summary().makespan
        return [self._stats(rank, makespan) for rank in range(self.world_size)]

    def _stats(self, rank: int, makespan: float) -> RankStats:
        compute = sum(span.end - span.start for span in self.spans if span.rank == rank)
        steps = [step.end - step.start for step in self.steps if step.rank == rank]
        return RankStats(
            rank=rank,
            device=self.devices.get(rank, ""),
            steps_done=len(steps),
            compute_seconds=compute,
            wait_seconds=sum(wait.end - wait.start for wait in self.waits if wait.rank == rank),
            # A sender's time includes the wait for a receiver; the receiver's is the wire's alone.
            transfer_seconds=sum(
                transfer.end - transfer.start
                for transfer in self.transfers
                if transfer.rank == rank and transfer.direction == "recv"
            ),
            mean_step_seconds=_mean(steps),
            p95_step_seconds=percentile(steps, 95),
            bubble=max(0.0, 1 - compute / makespan) if makespan else 0.0,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """The rank statistics as plain values."""
        return [asdict(stats) for stats in self.rank_stats()]


def _placed(rank: int, done: ActionDone, steps: list[StepDone]) -> list[StepSpan]:
    """The steps of one action, in order: they are back to back, and the last ends with it."""
    spans = []
    end = done.end
    for step in reversed(steps):
        start = max(done.start, end - step.seconds)
        spans.append(StepSpan(rank, step.clip, step.step, start, end))
        end = start
    return spans[::-1]


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0
