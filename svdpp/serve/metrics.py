"""The Prometheus metrics of the service, in a registry of its own.

What the queue and the processes know is read at each scrape, so that it is never out of date. Only
what happens at a moment, such as a step, is counted when it happens.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
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

from svdpp.errors import RequestError
from svdpp.launch.gpus import Gpu, open_nvml, visible_gpus
from svdpp.serve.engine import Engine
from svdpp.serve.job import FleetServer, Job, JobState, Proof
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, Event, Joined, StepDone, TransferDone

#: The content type of `Metrics.exposed`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)
_CLIP_BUCKETS = (0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 1200, 3600)
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_ERROR_BUCKETS = (-0.9, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)
# The newest ratios of which the page shows the median.
_KEPT_ERRORS = 1000


class Metrics(Collector):
    """The metrics of one server. Any thread may call any method.

    An instance is an observer of a `Pipeline`: it is called with (rank, event).
    """

    def __init__(
        self, queue: JobQueue, engine: Engine, num_streams: Callable[[], int] = lambda: 0
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._num_streams = num_streams
        self.servers: Callable[[], list[FleetServer]] = list
        """Those that share the queue."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which nobody reads
        self._registry = CollectorRegistry()
        self._last_end: dict[int, float] = {}
        """When each rank's last action ended."""
        self._eta_errors: deque[float] = deque(maxlen=_KEPT_ERRORS)
        common: dict[str, Any] = {"namespace": "svdpp", "registry": self._registry}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, **common)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, **common)

        self._clips = counter("clips", "Clips that reached a final state.", "state")
        self._clip_seconds = histogram(
            "clip_seconds", "From the ranks' taking of a clip to its file.", _CLIP_BUCKETS
        )
        self._steps = histogram("step_seconds", "One denoising step.", _STEP_BUCKETS, "rank")
        self._rank_seconds = counter(
            "rank_seconds",
            "Seconds of each rank by state; transfers overlap with the other states.",
            "rank",
            "state",
        )
        self._bytes = counter("transfer_bytes", "Bytes between ranks.", "rank", "direction")
        self._proofs = counter("verifications", "Clips compared with one device.", "result")
        self._eta_error = histogram(
            "eta_error_ratio",
            "(Actual - promised) / promised seconds of completed clips.",
            _ERROR_BUCKETS,
        )
        self._requests = counter("http_requests", "Answered requests.", "method", "route", "status")
        self._request_seconds = histogram(
            "http_request_seconds", "Time to an answer's first byte.", _REQUEST_BUCKETS, "route"
        )
        self._refusals = counter(
            "refused_requests", "Requests for a clip, refused by a full queue.", "code"
        )
        self._mismatch = Gauge(
            "verification_mismatch", "1 once a clip differed from one device: an alert.", **common
        )
        for state in filter(lambda state: state.is_final, JobState):
            self._clips.labels(state)
        for result in ("equal", "different"):
            self._proofs.labels(result)
        self._registry.register(self)

    def __call__(self, rank: int, event: Event) -> None:
        """Takes an event of `rank`; the pipeline's thread alone calls it."""
        match event:
            case Joined():
                self._last_end.pop(rank, None)
            case StepDone():
                self._steps.labels(rank).observe(event.seconds)
            case TransferDone():
                self._bytes.labels(rank, event.direction).inc(event.num_bytes)
                self._spent(rank, "transfer", event.seconds)
            case ActionDone():
                self._spent(rank, "compute", event.end - event.start)
                self._spent(rank, "wait", event.waited)
                # Between two actions it waited for a packet, or had no work.
                begin = event.start - event.waited
                self._spent(rank, "idle", begin - self._last_end.get(rank, begin))
                self._last_end[rank] = event.end
            case _:
                pass

    def _spent(self, rank: int, state: str, seconds: float) -> None:
        self._rank_seconds.labels(rank, state).inc(max(0.0, seconds))

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
            self._eta_errors.append(ratio)

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
        """Counts a request for a clip that a full queue refused."""
        self._refusals.labels(code).inc()

    def eta_error(self) -> dict[str, float | int | None]:
        """The newest (actual - promised) / promised: their number, median and spread."""
        ratios = sorted(self._eta_errors.copy())
        if not ratios:
            return {"clips": 0, "median": None, "p10": None, "p90": None}
        last = len(ratios) - 1
        return {
            "clips": len(ratios),
            "median": round(statistics.median(ratios), 4),
            "p10": round(ratios[round(0.1 * last)], 4),
            "p90": round(ratios[round(0.9 * last)], 4),
        }

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What is read at each scrape."""
        jobs, oldest = self._queue.counts(), self._queue.oldest_waiting()
        age = 0.0 if oldest is None else max(0.0, time.time() - oldest)
        yield _by("state", "svdpp_jobs", "Stored jobs by state; held ones do not count.", jobs)
        for name, text, value in (
            ("svdpp_queue_depth", "Jobs that wait.", jobs[JobState.QUEUED]),
            ("svdpp_queue_age_seconds", "Age of the oldest waiting job.", age),
            ("svdpp_live_ranks", "Ranks alive.", self._engine.live_ranks),
            ("svdpp_event_streams", "Open event streams.", self._num_streams()),
        ):
            yield GaugeMetricFamily(name, text, value)
        servers = {server.id: server for server in self.servers()}
        for name, text, about in (
            ("svdpp_server_seen_seconds", "Since each server said that it lives.", "seen_seconds"),
            ("svdpp_server_ranks", "Ranks of each server.", "ranks"),
            ("svdpp_server_claims", "Clips that each server has.", "claims"),
        ):
            values = {id: getattr(server, about) for id, server in servers.items()}
            yield _by("server", name, text, values)
        yield CounterMetricFamily("svdpp_restarts", "Restarts of the ranks.", self._engine.restarts)
        yield _by("process", "svdpp_resident_bytes", "Resident memory.", _resident_bytes())
        yield from _of_gpus()

    def exposed(self) -> bytes:
        """All metrics in Prometheus' text format, of `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _by(label: str, name: str, text: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([str(value_of_label)], value)
    return family


def _resident_bytes() -> dict[str, int]:
    server, workers = psutil.Process(), 0
    for process in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            workers += process.memory_info().rss
    return {"server": server.memory_info().rss, "workers": workers}


def _of_gpus() -> Iterator[GaugeMetricFamily]:
    """Memory and utilisation of the GPUs, by NVML; nothing without an NVIDIA driver."""
    gpus: list[Gpu] = []
    with contextlib.suppress(RequestError):  # their slices are not supported
        gpus = visible_gpus()
    if not gpus:
        return
    used = {gpu.index: gpu.total_bytes - gpu.free_bytes for gpu in gpus}
    total = {gpu.index: gpu.total_bytes for gpu in gpus}
    busy: dict[int, float] = {}
    with open_nvml() as nvml:
        for gpu in gpus if nvml is not None else ():
            with contextlib.suppress(nvml.NVMLError):  # not every GPU tells it
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                busy[gpu.index] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    yield _by("gpu", "svdpp_gpu_memory_bytes", "Memory of the GPU.", total)
    yield _by("gpu", "svdpp_gpu_memory_used_bytes", "Used memory of the GPU.", used)
    yield _by("gpu", "svdpp_gpu_busy_ratio", "Time in kernels.", busy)
