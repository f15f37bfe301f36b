"""`Trace`: measurements of a run, such as the times of actions, steps, waits and transfers."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.actions import Kind
from svdpp.plan.costs import CostModel, measured_costs
from svdpp.plan.forecast import Forecast, Span, summarise
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    Event,
    Finished,
    Joined,
    RankStats,
    StepDone,
    TransferDone,
    WaitCause,
)


class StepSpan(NamedTuple):
    """Start and end of one denoising step, in seconds on the monotonic clock of rank 0's host."""

    rank: int
    clip: int
    step: int
    start: float
    end: float


class WaitSpan(NamedTuple):
    """Start and end of a wait before an action, for example for a packet from another rank.

    A rank also waits until another rank receives a packet, an image is read, or a clip is written.
    """

    rank: int
    clip: int
    start: float
    end: float


class TransferSpan(NamedTuple):
    """Start and end of the transfer of one packet, as measured by the sender or the receiver."""

    rank: int
    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    start: float
    end: float
    waited: float = 0.0
    """Seconds that the sender waited for the receiver before `start`; 0 if the receiver measured
    this span."""


class MeasuredCosts:
    """Mean seconds of each kind of work over all ranks.

    Only sums and counts are kept, so the memory does not grow with the number of events.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._has_pairs = False

    def add(self, event: Event) -> None:
        """Record the duration that a rank's event reports; ignore events without a duration."""
        match event:
            case StepDone():
                self._add("step", event.seconds)
            case ActionDone(action=action):
                self._add(action.kind, (event.end - event.start) / action.fraction)
                self._has_pairs |= action.kind is Kind.DENOISE and action.peer >= 0
            # Sender and receiver both report a transfer. Only the receiver's report is counted.
            case TransferDone(direction="recv"):
                self._add("transfer", event.seconds)
            case _:
                pass

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] += seconds
        self._counts[kind] += 1

    @property
    def has_stepped(self) -> bool:
        """Whether at least one denoising step of the run has been measured."""
        return "step" in self._counts

    def costs_like(self, assumed: CostModel) -> CostModel:
        """Return a cost model with the measured means, and scaled costs for other kinds of work.

        Args:
            assumed: Costs for kinds of work that were not measured. They are scaled by the ratio of
                the measured to the assumed seconds of a step.
        """
        means = {kind: self._seconds[kind] / count for kind, count in self._counts.items()}
        return measured_costs(means, assumed, in_pairs=self._has_pairs)


#: Any span of a run, with a start and an end.
TimedSpan = Span | StepSpan | WaitSpan | TransferSpan


class SpanBuilder:
    """Builder of time spans from ranks' events. It converts times to the clock of rank 0's host."""

    def __init__(self) -> None:
        self._clock_ahead: dict[int, float] = defaultdict(float)
        self._open_steps: dict[int, list[StepDone]] = defaultdict(list)

    def add(self, rank: int, event: Event) -> list[TimedSpan]:
        """Return the time spans (action, steps, wait, transfer) that a rank's event completes.

        `ActionDone` completes an action, its steps, and the wait before it. `TransferDone`
        completes a transfer. The list is empty for other events.

        Args:
            rank: Rank that sent the event.
            event: Any event.
        """
        match event:
            case Joined():
                self._clock_ahead[rank] = event.clock_ahead
            case StepDone():
                steps = self._open_steps[rank]
                if steps and steps[-1].clip != event.clip:
                    # The earlier steps are dropped. They belong to a failed action, for which the
                    # rank sent no `ActionDone`.
                    steps.clear()
                steps.append(event)
            case ActionDone():
                return self._action(rank, event)
            case TransferDone():
                return [self._transfer(rank, event)]
            case _:
                pass
        return []

    def _action(self, rank: int, done: ActionDone) -> list[TimedSpan]:
        action, ahead = done.action, self._clock_ahead[rank]
        start, end = done.start - ahead, done.end - ahead
        spans: list[TimedSpan] = [Span(rank, action, start, end)]
        steps = [step for step in self._open_steps.pop(rank, []) if step.clip == action.clip]
        # Steps follow each other without gaps, and the last step ends with the action. So the times
        # are computed from the last step to the first.
        for step in reversed(steps):
            begun = max(start, end - step.seconds)
            spans.insert(1, StepSpan(rank, step.clip, step.step, begun, end))
            end = begun
        if done.waited > 0:
            # `waited` may be the sum of two waits, one for a send and one for a receive. One span
            # stands for both, because the gap between them is tiny.
            spans.append(WaitSpan(rank, action.clip, start - done.waited, start))
        return spans

    def _transfer(self, rank: int, done: TransferDone) -> TransferSpan:
        end = done.end - self._clock_ahead[rank]
        kind = done.direction, done.clip, done.next_step, done.peer, done.num_bytes
        return TransferSpan(rank, *kind, end - done.seconds, end, done.waited)


@dataclass
class RunningMean:
    """Running mean of samples, such as the seconds of each step in a run."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """Add a sample to the mean; ignore None."""
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        """Mean of the samples; None if there are no samples."""
        return self.total / self.count if self.count else None


@dataclass
class RankMetrics:
    """Measurements of one rank over all clips. `Trace` has the rank's spans."""

    device: str = ""
    device_name: str = ""
    """Name of the rank's GPU; empty on the CPU."""
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    waits: dict[WaitCause, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the rank has waited, by cause."""
    num_written: int = 0
    write_seconds: float = 0.0
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    stats: RankStats | None = None
    """Last `RankStats` event of the rank; None if no such event has arrived."""
    peak_resident_bytes: int = 0
    peak_gpu_memory_bytes: int | None = None
    gpu_load: RunningMean = field(default_factory=RunningMean)
    gpu_watts: RunningMean = field(default_factory=RunningMean)


class Trace:
    """Observer that keeps the measurements of a run.

    Times are seconds on the monotonic clock of rank 0's host. Only one thread may call this object,
    but any thread may read the lists while they grow.

    Args:
        world_size: Number of ranks.
        last_clips: Number of the latest clips whose spans are kept, so that memory does not grow
            while a pipeline runs for days. `costs` covers all clips. None: all spans are kept.
        first_clip: First clip that is measured; earlier clips only warm up the ranks.
    """

    def __init__(
        self, world_size: int, last_clips: int | None = None, *, first_clip: int = 0
    ) -> None:
        self.world_size = world_size
        self.spans: list[Span] = []
        self.steps: list[StepSpan] = []
        self.waits: list[WaitSpan] = []
        self.transfers: list[TransferSpan] = []
        self.rank_metrics: dict[int, RankMetrics] = defaultdict(RankMetrics)
        self.begun = self.ready = time.monotonic()
        self.last_written: float | None = None
        self.last_clips, self._first_clip = last_clips, first_clip
        self._newest_clip = -1
        self._means = MeasuredCosts()
        self._span_builder = SpanBuilder()

    def __call__(self, rank: int, event: Event) -> None:
        """Record the measurements (times, memory, load) in an event of a rank."""
        clip = event.action.clip if isinstance(event, ActionDone) else getattr(event, "clip", None)
        if clip is not None and clip < self._first_clip:
            return
        self._means.add(event)
        self._report(self.rank_metrics[rank], event)
        spans = self._span_builder.add(rank, event)
        if not spans or not self._keeps(spans[0].clip):
            return
        for span in spans:
            getattr(self, _LISTS[type(span)]).append(span)

    def _report(self, metrics: RankMetrics, event: Event) -> None:
        match event:
            case Joined():
                metrics.device, metrics.load_seconds = event.device, event.load_seconds
                metrics.device_name = event.device_name
                self.ready = time.monotonic()
            case ActionDone():
                metrics.compute_seconds += event.end - event.start
                for cause, seconds in event.waits.items():
                    metrics.waits[cause] += seconds
            case ClipDone():
                metrics.num_written += 1
                metrics.write_seconds += event.write_seconds
                self.last_written = time.monotonic()
            case RankStats():
                metrics.stats = event
                resident = max(metrics.peak_resident_bytes, event.resident_bytes)
                metrics.peak_resident_bytes = resident
                if (memory := event.gpu_memory_bytes) is not None:
                    metrics.peak_gpu_memory_bytes = max(metrics.peak_gpu_memory_bytes or 0, memory)
                metrics.gpu_load.add(event.gpu_load)
                metrics.gpu_watts.add(event.gpu_watts)
            case Finished():
                metrics.allocated_bytes = event.allocated_bytes
                metrics.reserved_bytes = event.reserved_bytes
            case _:
                pass

    def _keeps(self, clip: int) -> bool:
        if self.last_clips is None:
            return True
        if clip > self._newest_clip:
            self._newest_clip = clip
            first = clip - self.last_clips + 1
            # New lists replace the old lists, because another thread may be reading the old lists.
            for name in _LISTS.values():
                setattr(self, name, [span for span in getattr(self, name) if span.clip >= first])
        return clip > self._newest_clip - self.last_clips

    @property
    def received(self) -> list[TransferSpan]:
        """Transfers of packets, as measured by the receivers, so that each one occurs only once."""
        return [transfer for transfer in self.transfers if transfer.direction == "recv"]

    def summary(self) -> Forecast:
        """Return the measured times of the run, such as makespan and bubble, as a `Forecast`."""
        return summarise(self.spans, self.world_size)

    def costs(self) -> CostModel:
        """Return a cost model with the mean seconds that this run measured for each kind of work.

        Raises:
            RequestError: No step was measured.
        """
        if not self._means.has_stepped:
            raise RequestError("no step was measured", "make at least one clip first")
        return self._means.costs_like(CostModel())


_LISTS: dict[type[TimedSpan], str] = {
    Span: "spans",
    StepSpan: "steps",
    WaitSpan: "waits",
    TransferSpan: "transfers",
}
