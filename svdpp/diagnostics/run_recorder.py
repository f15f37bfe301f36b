"""The recording of a run's figures: from the events of its ranks to one `RunFigures`."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.diagnostics.figures import ForecastFigures, RankFigures, RunFigures, WorkFigures
from svdpp.diagnostics.gpu_samples import GpuSums
from svdpp.diagnostics.time_breakdown import TimeBreakdown, time_breakdown
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.run_manifest import RunManifest
from svdpp.driver.trace import MeanCosts, RankStats, Trace
from svdpp.errors import RequestError
from svdpp.launch.gpus import Gpu, visible_gpus
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.schedule import Schedule
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    Event,
    Finished,
    GpuSample,
    Joined,
    Started,
    WaitCause,
)

# The times of longer runs are those of their last clips.
_KEPT_CLIPS = 1000


@dataclass
class _Reported:
    """What one rank has reported."""

    load_seconds: float = 0.0
    uuid: str | None = None
    """Of its GPU."""
    has_started: bool = False
    compute: float = 0.0
    cpu: float = 0.0
    waits: dict[WaitCause, float] = field(default_factory=lambda: defaultdict(float))
    write: WorkFigures = field(default_factory=WorkFigures)
    gpu: GpuSums = field(default_factory=GpuSums)
    peak_bytes: int | None = None


class FigureRecorder:
    """An observer of ranks that sums up what `svdpp report` needs of their events.

    Args:
        config: of the ranks, resolved.
        schedule: what the ranks do to make this many clips, for forecasts; None if it is unknown.
        assumed: costs for a forecast before the first step; None if none fit the model.
        trace: gets the events; None: one that keeps the last clips.
    """

    def __init__(
        self,
        config: PipelineConfig,
        schedule: Callable[[int], Schedule | None],
        assumed: Costs | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._assumed = assumed
        self._begun = time.monotonic()
        self._ready = self._begun
        self._last_written: float | None = None
        self._means = MeanCosts()
        self._early_costs: Costs | None = None
        self._reported: dict[int, _Reported] = defaultdict(_Reported)
        self._trace = trace or Trace(config.world_size, _KEPT_CLIPS)

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        self._means.add(event)
        self._trace.add(rank, event)
        reported = self._reported[rank]
        match event:
            case GpuSample():
                reported.gpu.add(event)
            case Started():
                reported.uuid, reported.has_started = event.uuid, True
            case Joined():
                reported.load_seconds = event.load_seconds
                self._ready = time.monotonic()
            case ActionDone():
                reported.compute += event.end - event.start
                reported.cpu += event.cpu_seconds
                for cause, seconds in event.waits.items():
                    reported.waits[cause] += seconds
            case ClipDone():
                reported.write = _with(reported.write, event.write_seconds)
                self._see_clip()
            case Finished():
                reported.peak_bytes = event.reserved_bytes
            case _:
                pass

    def _see_clip(self) -> None:
        self._last_written = time.monotonic()
        if self._early_costs is None and self._means.has_stepped:
            self._early_costs = self._means.costs_like(self._config.costs)

    def figures(self) -> RunFigures | None:
        """The figures so far; None if no rank has done an action."""
        trace = self._trace
        if not trace.spans:
            return None
        measured, stats = trace.summary(), trace.rank_stats()
        config = self._config
        end = max(span.end for span in trace.spans)
        gpus = _gpus(config.device)
        ranks = tuple(
            self._rank(each, one, gpus)
            for each, one in zip(time_breakdown(trace), stats, strict=True)
        )
        figures = RunFigures(
            ranks=ranks,
            clips=measured.clips,
            num_steps=config.sampling.num_inference_steps,
            split=config.split,
            replicas=config.replicas,
            decoders=config.decoders,
            decodes=config.decodes,
            device=config.device,
            num_threads=config.num_threads,
            usable_cores=len(os.sched_getaffinity(0)),
            num_devices=len(gpus),
            frames=config.sampling.frames,
            decode_chunk_size=config.sampling.decode_chunk_size or 0,
            start_seconds=self._ready - self._begun,
            makespan=measured.makespan,
            first_clip=measured.first_clip,
            seconds_per_clip=measured.seconds_per_clip,
            bubble=measured.bubble,
            write_tail=max(0.0, (self._last_written or end) - end),
            transfer_seconds=self._means.transfer_seconds,
            model=asdict(config.model),
            sampling=asdict(config.sampling),
        )
        return replace(figures, forecast=self._forecast(figures))

    def _rank(self, times: TimeBreakdown, stats: RankStats, gpus: Sequence[Gpu]) -> RankFigures:
        rank = times.rank
        share = self._config.layout.all_shares[rank]
        reported = self._reported[rank]
        gpu = self._gpu_of(rank, gpus)
        uuid = reported.uuid or (gpu.uuid if gpu else None)
        on_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # The part of the run that the trace still has.
        kept = times.compute / reported.compute if reported.compute else 1.0
        return RankFigures(
            rank=rank,
            device=stats.device,
            device_name=gpu.name if gpu else "",
            start=share.start,
            end=share.end,
            wall=times.wall,
            compute=times.compute,
            wait=times.wait,
            transfer=times.transfer,
            idle=times.idle,
            photograph_wait=kept * reported.waits["photograph"],
            packet_wait=kept * reported.waits["packet"],
            send_wait=kept * reported.waits["send"],
            writer_wait=kept * reported.waits["writer"],
            step=WorkFigures(count=stats.steps_done, mean_seconds=stats.mean_step_seconds),
            encode=self._work(rank, Kind.ENCODE),
            decode=self._work(rank, Kind.DECODE),
            write=reported.write,
            p95_step_seconds=stats.p95_step_seconds,
            load_seconds=reported.load_seconds,
            cpu_seconds=kept * reported.cpu,
            peak_bytes=reported.peak_bytes,
            device_bytes=on_host if uuid is None else gpu.total_bytes if gpu else None,
            memory_id=uuid or "host",
            gpu=reported.gpu.figures(),
        )

    def _gpu_of(self, rank: int, gpus: Sequence[Gpu]) -> Gpu | None:
        """The GPU of a rank, if it is one of this host."""
        reported = self._reported[rank]
        if reported.has_started:
            return next((gpu for gpu in gpus if gpu.uuid.endswith(reported.uuid or "none")), None)
        # The process of diffusers' own pipeline does not report its GPU.
        device = self._trace.devices.get(rank)
        return next((gpu for gpu in gpus if device == f"cuda:{gpu.index}"), None)

    def _work(self, rank: int, kind: Kind) -> WorkFigures:
        spans = self._trace.spans
        return _mean([s.end - s.start for s in spans if s.rank == rank and s.action.kind is kind])

    def _forecast(self, figures: RunFigures) -> ForecastFigures:
        schedule = self._schedule(figures.clips)
        if schedule is None:
            return ForecastFigures()
        return ForecastFigures(
            before=self._makespan(schedule, self._assumed),
            after_first_clip=self._makespan(schedule, self._early_costs),
            afterwards=self._makespan(schedule, _costs_of(figures)),
        )

    def _makespan(self, schedule: Schedule, costs: Costs | None) -> float | None:
        if costs is None:
            return None
        try:
            spans = replay(schedule, costs)
        except (RequestError, ValueError):  # the costs of transfers between hosts are unknown
            return None
        return summarise(spans, self._config.world_size).makespan


class RunRecorder(FigureRecorder):
    """Records the figures of a pipeline's run.

    Args:
        pipeline: not entered yet.
        requests: the clips that it will make.
        assumed: costs for a forecast before the first step; None if none fit the model.
    """

    def __init__(
        self, pipeline: Pipeline, requests: Sequence[ClipRequest], assumed: Costs | None
    ) -> None:
        def schedule(clips: int) -> Schedule | None:
            kept = list(requests)[-_KEPT_CLIPS:]
            is_whole = clips == len(kept) and not pipeline.failures
            return pipeline.schedule(kept) if is_whole else None

        super().__init__(pipeline.config, schedule, assumed)


@contextlib.contextmanager
def left_in(manifest: RunManifest, recorder: RunRecorder) -> Iterator[None]:
    """Leaves the figures in the run's manifest when the block ends, also after a failure."""
    try:
        yield
    finally:
        figures = recorder.figures()
        if figures is not None:
            manifest.measured(figures.to_json())


def _costs_of(figures: RunFigures) -> Costs | None:
    try:
        return figures.costs
    except RequestError:
        return None


def _gpus(device: str) -> list[Gpu]:
    """The GPUs of this host that the run could use."""
    if device == "cpu":
        return []
    try:
        return visible_gpus()
    except RequestError:  # MIG slices
        return []


def _with(work: WorkFigures, seconds: float) -> WorkFigures:
    """`work` and once more the same, in `seconds`."""
    count = work.count + 1
    return WorkFigures(count=count, mean_seconds=(work.seconds + seconds) / count)


def _mean(values: list[float]) -> WorkFigures:
    return WorkFigures(count=len(values), mean_seconds=sum(values) / max(1, len(values)))
