"""The recording of a run's figures: from the events of its ranks to one `RunFigures`."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.diagnostics.figures import GpuFigures, RankFigures, RunFigures, WorkFigures
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.run_manifest import RunManifest
from svdpp.driver.trace import RankStats, Trace
from svdpp.errors import RequestError
from svdpp.launch.gpus import Gpu, visible_gpus
from svdpp.plan.actions import Kind
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
# The last five hours.
_KEPT_SAMPLES = 18_000
# A GPU with less load than this may lower its clock because it has no work.
_BUSY = 0.5
_SAMPLED = ("utilisation", "memory_bytes", "watts", "celsius", "sm_mhz")

Interval = tuple[float, float]


def gpu_figures(samples: Sequence[GpuSample]) -> GpuFigures | None:
    """Mean, peak and energy of one rank's GPU from samples at equal intervals; None without any."""
    if not samples:
        return None
    values: dict[str, list[float]] = {}
    for sample, name in itertools.product(samples, _SAMPLED):
        value = getattr(sample, name)
        is_idle = sample.utilisation is not None and sample.utilisation < _BUSY
        if value is not None and not (name == "sm_mhz" and is_idle):
            values.setdefault(name, []).append(value)
    means = {name: statistics.fmean(known) for name, known in values.items()}
    peaks: dict[str, Any] = {name: max(known) for name, known in values.items()}
    throttled = Counter(why for sample in samples for why in sample.throttled)
    return GpuFigures(
        samples=len(samples),
        mean_utilisation=means.get("utilisation"),
        peak_utilisation=peaks.get("utilisation"),
        peak_memory_bytes=peaks.get("memory_bytes"),
        mean_watts=means.get("watts"),
        peak_watts=peaks.get("watts"),
        peak_celsius=peaks.get("celsius"),
        mean_sm_mhz=means.get("sm_mhz"),
        peak_sm_mhz=peaks.get("sm_mhz"),
        joules=_joules(samples),
        throttled={why: count / len(samples) for why, count in throttled.items()},
    )


def _joules(samples: Sequence[GpuSample]) -> float | None:
    """By the GPU's own energy counter if it has one, else its power summed up over time."""
    first, last = samples[0].joules, samples[-1].joules
    if first is not None and last is not None and last >= first:
        return last - first
    powers = [(sample.when, sample.watts) for sample in samples if sample.watts is not None]
    steps = itertools.pairwise(powers)
    return sum((w + x) / 2 * (v - u) for (u, w), (v, x) in steps) if len(powers) > 1 else None


@dataclass
class _Reported:
    """What one rank has reported."""

    load_seconds: float = 0.0
    started: Started | None = None
    compute: float = 0.0
    cpu: float = 0.0
    waits: dict[WaitCause, float] = field(default_factory=lambda: defaultdict(float))
    write: WorkFigures = field(default_factory=WorkFigures)
    gpu: deque[GpuSample] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class FigureRecorder:
    """An observer of ranks that sums up what `svdpp report` needs of their events.

    Args:
        schedule: what the ranks do to make this many clips, for a forecast; None if it is unknown.
        trace: gets the events; None: one that keeps the last clips.
    """

    def __init__(
        self,
        config: PipelineConfig,
        schedule: Callable[[int], Schedule | None],
        trace: Trace | None = None,
    ) -> None:
        self.trace = trace or Trace(config.world_size, _KEPT_CLIPS)
        self._config = config
        self._schedule = schedule
        self._begun = self._ready = time.monotonic()
        self._last_written: float | None = None
        self._reported: dict[int, _Reported] = defaultdict(_Reported)

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        self.trace.add(rank, event)
        reported = self._reported[rank]
        match event:
            case GpuSample():
                reported.gpu.append(event)
            case Started():
                reported.started = event
            case Joined():
                reported.load_seconds = event.load_seconds
                self._ready = time.monotonic()
            case ActionDone():
                reported.compute += event.end - event.start
                reported.cpu += event.cpu_seconds
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
        gpus = _gpus(config.device)
        figures = RunFigures(
            ranks=tuple(self._rank(stats, gpus) for stats in self.trace.rank_stats()),
            clips=measured.clips,
            num_steps=config.sampling.num_inference_steps,
            split=config.split,
            replicas=config.replicas,
            decoders=config.decoders,
            cfg_parallel=config.cfg_parallel,
            decode_ranks=config.decode_ranks or 1,
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
            transfer_seconds=_mean(packets).mean_seconds,
            model=asdict(config.model),
            sampling=asdict(config.sampling),
        )
        return replace(figures, forecast_seconds=self._forecast(figures))

    def _rank(self, stats: RankStats, gpus: Sequence[Gpu]) -> RankFigures:
        rank = stats.rank
        share, reported = self._config.layout.all_shares[rank], self._reported[rank]
        gpu = self._gpu_of(rank, gpus)
        uuid = (reported.started and reported.started.uuid) or (gpu and gpu.uuid)
        on_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # The part of the run that the trace still has.
        kept = stats.compute_seconds / reported.compute if reported.compute else 1.0
        return RankFigures(
            rank=rank,
            device=stats.device,
            device_name=gpu.name if gpu else "",
            start=share.start,
            end=share.end,
            **_parts_of_time(self.trace, rank),
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
            allocated_bytes=reported.allocated_bytes,
            peak_bytes=reported.reserved_bytes,
            device_bytes=on_host if uuid is None else gpu.total_bytes if gpu else None,
            memory_id=uuid or "host",
            gpu=gpu_figures(reported.gpu),
        )

    def _gpu_of(self, rank: int, gpus: Sequence[Gpu]) -> Gpu | None:
        """The GPU of a rank, if it is one of this host."""
        if (started := self._reported[rank].started) is not None:
            return next((gpu for gpu in gpus if gpu.uuid.endswith(started.uuid or "none")), None)
        # The process of diffusers' own pipeline does not report its GPU.
        device = self.trace.devices.get(rank)
        return next((gpu for gpu in gpus if device == f"cuda:{gpu.index}"), None)

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


class RunRecorder(FigureRecorder):
    """Records the figures of a pipeline's run."""

    def __init__(self, pipeline: Pipeline, requests: Sequence[ClipRequest]) -> None:
        def schedule(clips: int) -> Schedule | None:
            kept = list(requests)[-_KEPT_CLIPS:]
            is_whole = clips == len(kept) and not pipeline.failures
            return pipeline.schedule(kept) if is_whole else None

        super().__init__(pipeline.config, schedule)


@contextlib.contextmanager
def left_in(manifest: RunManifest, recorder: FigureRecorder) -> Iterator[None]:
    """Leaves the figures in the run's manifest when the block ends, also after a failure."""
    try:
        yield
    finally:
        figures = recorder.figures()
        if figures is not None:
            manifest.measured(figures.to_json())


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


def _gpus(device: str) -> list[Gpu]:
    """The GPUs of this host that the run could use."""
    if device == "cpu":
        return []
    try:
        return visible_gpus()
    except RequestError:  # MIG slices
        return []
