"""A run's measurements: the spans, steps, waits and transfers of every rank."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs, measured_costs
from svdpp.plan.forecast import Forecast, Span, percentile, summarise
from svdpp.worker.messages import ActionDone, Event, Joined, StepDone, TransferDone


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """One rank's times in seconds; `bubble` is the share of the makespan without computing."""

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
    """When one rank waited for a packet or a slow neighbour before an action."""

    rank: int
    clip: int
    start: float
    end: float


class TransferSpan(NamedTuple):
    """When one packet was on the wire, measured at one of its two ends."""

    rank: int
    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    start: float
    end: float
    waited: float = 0.0
    """For a send: seconds before `start`, until the receiver was ready."""


class MeanCosts:
    """Running means of each kind of work over all ranks, in constant memory.

    A transfer counts once, at its receiver.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._has_pairs = False

    def add(self, event: Event) -> None:
        """Records an event; ignores those without a time."""
        match event:
            case StepDone():
                self._count("step", event.seconds)
            case ActionDone():
                self._has_pairs |= event.action.kind is Kind.DENOISE and event.action.peer >= 0
                seconds = event.end - event.start
                self._count(event.action.kind, seconds / event.action.fraction)
            case TransferDone(direction="recv"):
                self._count("transfer", event.seconds)
            case _:
                pass

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been measured."""
        return self._counts["step"] > 0

    def costs_like(self, assumed: Costs) -> Costs:
        """The measured costs; those not measured yet are scaled from `assumed` by the step time."""
        if not self.has_stepped:
            return assumed
        means = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        return measured_costs(means, assumed, in_pairs=self._has_pairs)

    def _count(self, name: str, seconds: float) -> None:
        self._sums[name] += seconds
        self._counts[name] += 1


#: Anything with a start and an end.
Placed = Span | StepSpan | WaitSpan | TransferSpan


class Placement:
    """Places events on the clock of rank 0's machine; keeps only the steps of current actions."""

    def __init__(self) -> None:
        self._clock_ahead: dict[int, float] = defaultdict(float)
        self._unplaced: dict[int, list[StepDone]] = defaultdict(list)

    def place(self, rank: int, event: Event) -> list[Placed]:
        """What `event` completes: an action first, then its steps, then the wait before it."""
        match event:
            case Joined():
                self._clock_ahead[rank] = event.clock_ahead
            case StepDone():
                steps = self._unplaced[rank]
                if steps and steps[-1].clip != event.clip:
                    steps.clear()  # of an action that a bad clip ended early
                steps.append(event)
            case ActionDone():
                return self._action(rank, event)
            case TransferDone():
                return [self._transfer(rank, event)]
            case _:
                pass
        return []

    def on_rank_0(self, rank: int, when: float) -> float:
        """A time of a rank's monotonic clock, by that of rank 0's machine."""
        return when - self._clock_ahead[rank]

    def _action(self, rank: int, done: ActionDone) -> list[Placed]:
        action = done.action
        steps = [step for step in self._unplaced.pop(rank, []) if step.clip == action.clip]
        start, end = self.on_rank_0(rank, done.start), self.on_rank_0(rank, done.end)
        # It may be two waits, for a send and then a receive, with almost nothing between.
        waits = [WaitSpan(rank, action.clip, start - done.waited, start)] if done.waited > 0 else []
        return [Span(rank, action, start, end), *_placed(rank, steps, start, end), *waits]

    def _transfer(self, rank: int, done: TransferDone) -> TransferSpan:
        end = self.on_rank_0(rank, done.end)
        return TransferSpan(
            rank=rank,
            direction=done.direction,
            clip=done.clip,
            next_step=done.next_step,
            peer=done.peer,
            num_bytes=done.num_bytes,
            start=end - done.seconds,
            end=end,
            waited=done.waited,
        )


class Trace:
    """Collects the events of a run. All times are by the monotonic clock of rank 0's machine.

    One thread adds events; any thread may read meanwhile and sees lists that grow.

    Of the newest `last_clips` it keeps spans, steps, waits and transfers, so that a pipeline
    can run for days in constant memory; `summary` and `rank_stats` then cover only these clips,
    `costs` still covers all. None keeps all clips.
    """

    def __init__(self, world_size: int, last_clips: int | None = None) -> None:
        self.world_size = world_size
        self.spans: list[Span] = []
        self.steps: list[StepSpan] = []
        self.waits: list[WaitSpan] = []
        self.transfers: list[TransferSpan] = []
        self.devices: dict[int, str] = {}
        self._last_clips = last_clips
        self._newest_clip = -1
        self._means = MeanCosts()
        self._placement = Placement()

    def add(self, rank: int, event: Event) -> None:
        """Records an event; ignores those without a time."""
        self._means.add(event)
        if isinstance(event, Joined):
            self.devices[rank] = event.device
        placed = self._placement.place(rank, event)
        if not placed or not self._keeps(placed[0].clip):
            return
        for span in placed:
            match span:
                case Span():
                    self.spans.append(span)
                case StepSpan():
                    self.steps.append(span)
                case WaitSpan():
                    self.waits.append(span)
                case TransferSpan():
                    self.transfers.append(span)

    def _keeps(self, clip: int) -> bool:
        if self._last_clips is None:
            return True
        if clip > self._newest_clip:
            self._newest_clip = clip
            self._drop_before(clip - self._last_clips + 1)
        return clip > self._newest_clip - self._last_clips

    def _drop_before(self, first: int) -> None:
        """Drops all clips before `first`, by new lists: another thread may be reading the old."""
        self.spans = [span for span in self.spans if span.clip >= first]
        self.steps = [step for step in self.steps if step.clip >= first]
        self.waits = [wait for wait in self.waits if wait.clip >= first]
        self.transfers = [transfer for transfer in self.transfers if transfer.clip >= first]

    def summary(self) -> Forecast:
        """The measured makespan, first clip, time per clip and bubble, as in a forecast."""
        return summarise(self.spans, self.world_size)

    def costs(self) -> Costs:
        """Mean seconds of each kind of work over all ranks, for a forecast of this run."""
        if not self._means.has_stepped:
            raise RequestError("no step was measured")
        return self._means.costs_like(Costs())

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
            # A transfer counts once, at its receiver.
            transfer_seconds=sum(
                transfer.end - transfer.start
                for transfer in self.transfers
                if transfer.rank == rank and transfer.direction == "recv"
            ),
            mean_step_seconds=statistics.fmean(steps) if steps else 0.0,
            p95_step_seconds=percentile(steps, 95),
            bubble=max(0.0, 1 - compute / makespan) if makespan else 0.0,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """The rank statistics as plain values."""
        return [asdict(stats) for stats in self.rank_stats()]


def _placed(rank: int, steps: list[StepDone], start: float, end: float) -> list[StepSpan]:
    """The steps of one action from `start` to `end`, placed back to back up to `end`."""
    spans = []
    for step in reversed(steps):
        begun = max(start, end - step.seconds)
        spans.append(StepSpan(rank, step.clip, step.step, begun, end))
        end = begun
    return spans[::-1]
