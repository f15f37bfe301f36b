"""The Prometheus metrics of the service, in a registry of its own.

What the queue and the processes know is read at each scrape, so that it is never out of date. Only
what happens at a moment, such as a step, is counted when it happens.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from svdpp.diagnostics.utilisation import Utilisation
from svdpp.errors import RequestError
from svdpp.launch.gpus import visible_gpus
from svdpp.serve.job import Job, JobState, Proof
from svdpp.worker.messages import ActionDone, Event, Joined, StepDone, TransferDone

#: The content type of `Metrics.exposed`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)
_CLIP_BUCKETS = (0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 1200, 3600)
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_ERROR_BUCKETS = (-0.9, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)
# The newest ratios of which the page shows the median.
_KEPT_ERRORS = 1000


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a scrape reads. None of them may wait long."""

    jobs: Callable[[], Mapping[JobState, int]]
    """The number of jobs in each state."""
    oldest_waiting: Callable[[], float | None]
    """Unix time of the oldest waiting request; None if none waits."""
    restarts: Callable[[], int]
    """How often the ranks have been restarted."""
    live_ranks: Callable[[], int]
    speeds: Callable[[], Sequence[Utilisation]] = tuple
    """How fast each rank computes."""
    subscribers: Callable[[], int] = lambda: 0
    """Open event streams."""


class Metrics:
    """The metrics of one server. Any thread may call any method.

    An instance is an observer of a `Pipeline`: it is called with (rank, event).
    """

    def __init__(self, sources: Sources) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which nobody reads
        self.registry = CollectorRegistry()
        self._time_of_ranks = _RankTimes()
        self._errors: deque[float] = deque(maxlen=_KEPT_ERRORS)
        about: dict[str, Any] = {"namespace": "svdpp", "registry": self.registry}
        self._clips = Counter("clips", "Clips that reached a final state.", ["state"], **about)
        self._clip_seconds = Histogram(
            "clip_seconds",
            "From the ranks' taking of a clip to its file.",
            buckets=_CLIP_BUCKETS,
            **about,
        )
        self._steps = Histogram(
            "step_seconds", "One denoising step.", ["rank"], buckets=_STEP_BUCKETS, **about
        )
        self._bytes = Counter(
            "transfer_bytes", "Bytes between ranks.", ["rank", "direction"], **about
        )
        self._proofs = Counter(
            "verifications", "Clips compared with one device.", ["result"], **about
        )
        self._eta_error = Histogram(
            "eta_error_ratio",
            "(Actual - promised) / promised seconds of completed clips.",
            buckets=_ERROR_BUCKETS,
            **about,
        )
        self._requests = Counter(
            "http_requests", "Answered requests.", ["method", "route", "status"], **about
        )
        self._request_seconds = Histogram(
            "http_request_seconds",
            "Time to an answer's first byte.",
            ["route"],
            buckets=_REQUEST_BUCKETS,
            **about,
        )
        self._refusals = Counter(
            "refused_requests", "Requests for a clip that were refused.", ["code"], **about
        )
        self._mismatch = Gauge(
            "verification_mismatch", "1 once a clip differed from one device: an alert.", **about
        )
        for state in JobState:
            if state.is_final:
                self._clips.labels(state)
        for result in ("equal", "different"):
            self._proofs.labels(result)
        self.registry.register(_AtScrape(sources, self._time_of_ranks))

    def __call__(self, rank: int, event: Event) -> None:
        """Takes an event of `rank`."""
        self._time_of_ranks.add(rank, event)
        match event:
            case StepDone():
                self._steps.labels(rank).observe(event.seconds)
            case TransferDone():
                self._bytes.labels(rank, event.direction).inc(event.num_bytes)
            case _:
                pass

    def ended(self, job: Job) -> None:
        """Counts a job that has reached a final state."""
        self._clips.labels(job.state).inc()
        if job.state is not JobState.COMPLETED or job.finished_at is None:
            return
        if job.started_at is not None:
            self._clip_seconds.observe(max(0.0, job.finished_at - job.started_at))
        if job.promised_seconds:
            actual = job.finished_at - job.created_at
            ratio = (actual - job.promised_seconds) / job.promised_seconds
            self._eta_error.observe(ratio)
            self._errors.append(ratio)

    def verified(self, proof: Proof) -> None:
        """Counts a finished comparison with one device."""
        self._proofs.labels(proof).inc()
        if proof == "different":
            self._mismatch.set(1)

    def requested(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts an answered request; `seconds` are those to the answer's first byte."""
        self._requests.labels(method, route, status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def refused(self, code: str) -> None:
        """Counts a request for a clip that was refused."""
        self._refusals.labels(code).inc()

    def eta_error(self) -> dict[str, float | int | None]:
        """The newest (actual - promised) / promised: their number, median and spread."""
        ratios = sorted(self._errors.copy())
        if not ratios:
            return {"clips": 0, "median": None, "p10": None, "p90": None}
        last = len(ratios) - 1
        return {
            "clips": len(ratios),
            "median": round(statistics.median(ratios), 4),
            "p10": round(ratios[round(0.1 * last)], 4),
            "p90": round(ratios[round(0.9 * last)], 4),
        }

    def exposed(self) -> bytes:
        """All metrics in Prometheus' text format, of `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _RankTimes:
    """The seconds of each rank by what it did, up to its last action.

    Idle is the time between two actions in which it did not wait for a packet: it had no work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[int, str], float] = {}
        self._last_end: dict[int, float | None] = {}

    def add(self, rank: int, event: Event) -> None:
        with self._lock:
            match event:
                case Joined():
                    self._last_end[rank] = None
                case ActionDone():
                    self._add(rank, "compute", event.end - event.start)
                    self._add(rank, "wait", event.waited)
                    last = self._last_end.get(rank)
                    if last is not None:
                        self._add(rank, "idle", event.start - event.waited - last)
                    self._last_end[rank] = event.end
                case TransferDone():
                    self._add(rank, "transfer", event.seconds)
                case _:
                    pass

    def read(self) -> dict[tuple[int, str], float]:
        with self._lock:
            return dict(self._seconds)

    def _add(self, rank: int, state: str, seconds: float) -> None:
        key = rank, state
        self._seconds[key] = self._seconds.get(key, 0.0) + max(0.0, seconds)


class _AtScrape(Collector):
    def __init__(self, sources: Sources, times: _RankTimes) -> None:
        self._sources, self._times = sources, times

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        jobs = self._sources.jobs()
        yield _gauge(
            "svdpp_jobs",
            "Stored jobs by state; held ones do not count.",
            "state",
            ((str(state), number) for state, number in jobs.items()),
        )
        yield GaugeMetricFamily(
            "svdpp_queue_depth", "Jobs that wait.", jobs.get(JobState.QUEUED, 0)
        )
        oldest = self._sources.oldest_waiting()
        age = 0.0 if oldest is None else max(0.0, time.time() - oldest)
        yield GaugeMetricFamily("svdpp_queue_age_seconds", "Age of the oldest waiting job.", age)
        yield CounterMetricFamily(
            "svdpp_restarts", "Restarts of the ranks.", self._sources.restarts()
        )
        yield GaugeMetricFamily("svdpp_live_ranks", "Ranks alive.", self._sources.live_ranks())
        yield GaugeMetricFamily(
            "svdpp_event_streams", "Open event streams.", self._sources.subscribers()
        )
        seconds = CounterMetricFamily(
            "svdpp_rank_seconds",
            "Seconds of each rank by state; transfers overlap with the other states.",
            labels=["rank", "state"],
        )
        for (rank, state), value in sorted(self._times.read().items()):
            seconds.add_metric([str(rank), state], value)
        yield seconds
        yield from _of_speeds(self._sources.speeds())
        yield _gauge(
            "svdpp_resident_bytes", "Resident memory.", "process", _resident_bytes().items()
        )
        yield from _of_gpus()


def _gauge(
    name: str, about: str, label: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value_of_label, value in values:
        family.add_metric([value_of_label], value)
    return family


def _of_speeds(speeds: Sequence[Utilisation]) -> Iterator[GaugeMetricFamily]:
    """TFLOP/s and MFU; a rank whose device has no published peak has no MFU."""
    yield _gauge(
        "svdpp_rank_tflops",
        "TFLOP/s of the rank while it computed its latest steps, encodes and decodes.",
        "rank",
        ((str(each.rank), each.tflops) for each in speeds),
    )
    yield _gauge(
        "svdpp_rank_mfu_ratio",
        "The same over the published peak of its device.",
        "rank",
        ((str(each.rank), each.mfu) for each in speeds if each.mfu is not None),
    )


def _resident_bytes() -> dict[str, int]:
    """Resident bytes of this process, and of all its descendants together: ranks and helpers."""
    resident, parents = {}, {}
    page = os.sysconf("SC_PAGE_SIZE")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # the process has ended since
            # Parent and resident pages are fields 4 and 24 of proc(5); the name, in parentheses,
            # can contain any character.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], resident[pid] = int(fields[1]), int(fields[21]) * page
    own = os.getpid()
    below = {own}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    workers = sum(resident[pid] for pid in below - {own} if pid in resident)
    return {"server": resident.get(own, 0), "workers": workers}


def _of_gpus() -> Iterator[GaugeMetricFamily]:
    """Memory and utilisation of the GPUs, by NVML; nothing without an NVIDIA driver."""
    import pynvml

    try:
        gpus = visible_gpus()
    except RequestError:  # its slices are not supported
        return
    if not gpus:
        return
    total = {str(gpu.index): gpu.total_bytes for gpu in gpus}
    used = {str(gpu.index): gpu.total_bytes - gpu.free_bytes for gpu in gpus}
    yield _gauge("svdpp_gpu_memory_bytes", "Memory of the GPU.", "gpu", total.items())
    yield _gauge("svdpp_gpu_memory_used_bytes", "Used memory of the GPU.", "gpu", used.items())
    busy = GaugeMetricFamily("svdpp_gpu_busy_ratio", "Time in kernels.", labels=["gpu"])
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        for gpu in gpus:
            with contextlib.suppress(pynvml.NVMLError):  # not every GPU tells it
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
                busy.add_metric([str(gpu.index)], rates.gpu / 100)
    finally:
        pynvml.nvmlShutdown()
    yield busy
