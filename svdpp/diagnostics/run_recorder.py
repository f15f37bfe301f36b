"""The recording of a run's figures: from the events of its ranks to one `RunFigures`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.diagnostics.figures import RankFigures, RunFigures, WorkFigures
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import RankStats, Trace
from svdpp.errors import RequestError
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.schedule import Schedule
from svdpp.worker.messages import ActionDone, ClipDone, Event, Finished, Joined, WaitCause

# The times of longer runs are those of their last clips.
_KEPT_CLIPS = 1000

Interval = tuple[float, float]


@dataclass
class _Reported:
    load_seconds: float = 0.0
    compute: float = 0.0
    waits: dict[WaitCause, float] = field(default_factory=lambda: defaultdict(float))
    write: WorkFigures = field(default_factory=WorkFigures)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class FigureRecorder:
    """An observer of ranks that sums up what `svdpp report` needs of their events.

    Args:
        schedule: what the ranks do to make this many clips, for a forecast; None if it is unknown.
        trace: gets the events; None: one that keeps the last clips.
        first_clip: the clips before it only warm up, and do not count.
    """

    def __init__(
        self,
        config: PipelineConfig,
        schedule: Callable[[int], Schedule | None],
        trace: Trace | None = None,
        first_clip: int = 0,
    ) -> None:
        self.trace = trace or Trace(config.world_size, _KEPT_CLIPS)
        self._config, self._schedule, self._first_clip = config, schedule, first_clip
        self._begun = self._ready = time.monotonic()
        self._last_written: float | None = None
        self._reported: dict[int, _Reported] = defaultdict(_Reported)

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        clip = event.action.clip if isinstance(event, ActionDone) else getattr(event, "clip", None)
        if clip is not None and clip < self._first_clip:
            return
        self.trace.add(rank, event)
        reported = self._reported[rank]
        match event:
            case Joined():
                reported.load_seconds = event.load_seconds
                self._ready = time.monotonic()
            case ActionDone():
                reported.compute += event.end - event.start
                for cause, seconds in event.waits.items():
                    reported.waits[cause] += seconds
            case ClipDone():
                count, seconds = reported.write.count + 1, reported.write.seconds
                mean = (seconds + event.write_seconds) / count
                reported.write = WorkFigures(count=count, mean_seconds=mean)
                self._last_written = time.monotonic()
            case Finished():
                reported.allocated_bytes = event.allocated_bytes
                reported.reserved_bytes = event.reserved_bytes
            case _:
                pass

    def figures(self) -> RunFigures | None:
        """The figures so far; None if no rank has done an action."""
        if not self.trace.spans:
            return None
        config, measured = self._config, self.trace.summary()
        received = (packet for packet in self.trace.transfers if packet.direction == "recv")
        packets = [packet.end - packet.start for packet in received]
        end = max(span.end for span in self.trace.spans)
        figures = RunFigures(
            ranks=tuple(map(self._rank, self.trace.rank_stats())),
            clips=measured.clips,
            num_steps=config.sampling.num_inference_steps,
            cfg_parallel=config.cfg_parallel,
            decodes=config.decodes,
            start_seconds=self._ready - self._begun,
            makespan=measured.makespan,
            first_clip=measured.first_clip,
            seconds_per_clip=measured.seconds_per_clip,
            bubble=measured.bubble,
            write_tail=max(0.0, (self._last_written or end) - end),
            transfer_seconds=_mean(packets).mean_seconds,
        )
        return replace(figures, forecast_seconds=self._forecast(figures))

    def _rank(self, stats: RankStats) -> RankFigures:
        rank = stats.rank
        share, reported = self._config.layout.all_shares[rank], self._reported[rank]
        # The part of the run that the trace still has.
        kept = stats.compute_seconds / reported.compute if reported.compute else 1.0
        waits = {cause: kept * seconds for cause, seconds in reported.waits.items()}
        return RankFigures(
            rank=rank,
            device=stats.device,
            start=share.start,
            end=share.end,
            **_parts_of_time(self.trace, rank),
            **{f"{cause}_wait": waits.get(cause, 0.0) for cause in get_args(WaitCause)},
            step=WorkFigures(count=stats.steps_done, mean_seconds=stats.mean_step_seconds),
            encode=self._work(rank, Kind.ENCODE),
            decode=self._work(rank, Kind.DECODE),
            write=reported.write,
            load_seconds=reported.load_seconds,
            allocated_bytes=reported.allocated_bytes,
            peak_bytes=reported.reserved_bytes,
        )

    def _work(self, rank: int, kind: Kind) -> WorkFigures:
        spans = (s for s in self.trace.spans if s.rank == rank and s.action.kind is kind)
        return _mean([(span.end - span.start) / span.action.fraction for span in spans])

    def _forecast(self, figures: RunFigures) -> float | None:
        schedule = self._schedule(figures.clips)
        if schedule is None or not any(rank.step.count for rank in figures.ranks):
            return None
        try:
            spans = replay(schedule, figures.costs)
        except (RequestError, ValueError):  # the costs of transfers between hosts are unknown
            return None
        return summarise(spans, self._config.world_size).makespan


def of_run(pipeline: Pipeline, requests: Sequence[ClipRequest]) -> Callable[[int], Schedule | None]:
    """What the ranks do in a pipeline's run, for `FigureRecorder`; None if some clips are lost."""
    kept = requests[-_KEPT_CLIPS:]
    return lambda clips: (
        pipeline.schedule(kept) if clips == len(kept) and not pipeline.failures else None
    )


def _parts_of_time(trace: Trace, rank: int) -> dict[str, float]:
    """Seconds of a rank, each measured on its own, from the first start to the last end of any."""
    begin = min([span.start for span in trace.spans] + [wait.start for wait in trace.waits])
    end = max(span.end for span in trace.spans)
    work = [(span.start, span.end) for span in trace.spans if span.rank == rank]
    waits = [(wait.start, wait.end) for wait in trace.waits if wait.rank == rank]
    arriving = [
        (packet.start, packet.end)
        for packet in trace.transfers
        if packet.rank == rank and packet.direction == "recv"
    ]
    head = min((start for start, _ in work + waits), default=end) - begin
    tail = end - max((last for _, last in work + waits), default=end)
    transfer = _overlap(waits, arriving)
    return {
        "wall": end - begin,
        "compute": _length(work),
        "wait": max(0.0, _length(waits) - transfer),
        "transfer": transfer,
        "idle": head + tail,
    }


def _mean(seconds: Sequence[float]) -> WorkFigures:
    return WorkFigures(count=len(seconds), mean_seconds=sum(seconds) / max(1, len(seconds)))


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(waits: Iterable[Interval], transfers: Iterable[Interval]) -> float:
    """Seconds of `waits` that overlap with any of `transfers`; two at once count once."""
    reached, joined = float("-inf"), []
    for start, end in sorted(transfers):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    return sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in waits
        for first, last in joined
    )
