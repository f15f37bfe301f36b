"""Prometheus metrics of the service, in a separate registry.

Present values, such as the number of jobs, are read at each scrape, so no value is out of date.
Events, such as finished steps, are counted when they happen.
"""

from __future__ import annotations

import statistics
from collections import Counter as Counted
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from svdpp.serve.engine import Engine
from svdpp.serve.job import Job, JobState, VerificationStatus
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, Event, Joined, RankStats, StepDone

#: Help text and labels of each counter, by the counter's name.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "clips": ("Clips that reached a final state.", "state"),
    "rank_seconds": ("Seconds that each rank has spent in each state.", "rank", "state"),
    "verifications": ("Clips made again on one device and compared, by result.", "result"),
    "http_requests": ("HTTP requests.", "method", "route", "status"),
}
#: Buckets, help text and labels of each histogram, by the histogram's name.
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str, *tuple[str, ...]]] = {
    "clip_seconds": (
        (0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 1200, 3600),
        "Seconds from when a clip is submitted to the ranks until its file is written.",
    ),
    "step_seconds": (
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120),
        "Seconds of one denoising step.",
        "rank",
    ),
    "http_request_seconds": (
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        "Seconds from the headers of a request to the headers of its response.",
        "route",
        "status",
    ),
    "eta_error_ratio": (
        (-0.9, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
        "Relative error of the ETA of completed clips: (actual - promised) / promised.",
    ),
}
#: Name and help text of each gauge of the ranks, by the field of `RankStats` that it shows. A rank
#: is left out of a gauge if its device does not report the value.
_RANK_GAUGES: dict[str, tuple[str, str]] = {
    "resident_bytes": ("rank_resident_bytes", "Bytes of the resident set of each rank's process."),
    "allocated_bytes": ("rank_gpu_allocated_bytes", "Bytes of tensors on each rank's GPU."),
    "reserved_bytes": (
        "rank_gpu_reserved_bytes",
        "Bytes that torch's allocator holds on each rank's GPU.",
    ),
    "peak_reserved_bytes": (
        "rank_gpu_peak_reserved_bytes",
        "Peak of the bytes that torch's allocator held on each rank's GPU.",
    ),
    "gpu_load": ("rank_gpu_load_ratio", "Fraction of time in which each rank's GPU ran a kernel."),
    "gpu_memory_bytes": (
        "rank_gpu_memory_bytes",
        "Bytes in use on each rank's GPU, by all processes.",
    ),
    "gpu_watts": ("rank_gpu_power_watts", "Power of each rank's GPU in watts."),
}
# Number of latest ETA errors in memory; see `Metrics.eta_error`. The web page shows their median.
_KEPT_ERRORS = 1000


class Metrics(Collector):
    """Metrics of one server. Any thread may call any method.

    An instance is an observer of a `Pipeline`: it is called with (rank, event).

    Args:
        queue: Queue whose jobs are counted at each scrape.
        engine: Engine whose state and restarts are read at each scrape.
        num_streams: Function that returns the number of open event streams and archives.
        servers: Function that returns the servers of the queue, as `Fleet.servers` does.
        num_open_lines: Function that returns the number of batch lines whose jobs have not ended.
    """

    def __init__(
        self,
        queue: JobQueue,
        engine: Engine,
        num_streams: Callable[[], int] = lambda: 0,
        servers: Callable[[], list[dict[str, Any]]] = list,
        num_open_lines: Callable[[], int] = lambda: 0,
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._num_streams = num_streams
        self._servers = servers
        self._num_open_lines = num_open_lines
        disable_created_metrics()  # type: ignore[no-untyped-call]  # no unused `_created` series
        self._registry = CollectorRegistry()
        self._last_end: dict[int, float] = {}
        """Monotonic time on each rank's host at which the rank's last action ended."""
        self._eta_errors: deque[float] = deque(maxlen=_KEPT_ERRORS)
        self._has_mismatch = False
        # `_stats` has the latest sample of each rank. A restarted rank counts its bytes from 0, so
        # `_moved_before` has the bytes that earlier processes of the rank sent and received.
        self._stats: dict[int, RankStats] = {}
        self._moved_before: Counted[tuple[int, str]] = Counted()
        common: dict[str, Any] = {"namespace": "svdpp", "registry": self._registry}
        self._counters = {
            name: Counter(name, text, labels, **common)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, labels, buckets=buckets, **common)
            for name, (buckets, text, *labels) in _HISTOGRAMS.items()
        }
        for state in filter(lambda state: state.is_final, JobState):
            self._counters["clips"].labels(state)
        for result in ("equal", "different"):
            self._counters["verifications"].labels(result)
        self._registry.register(self)

    def __call__(self, rank: int, event: Event) -> None:
        """Update the ranks' metrics from a rank's event. Only the pipeline's thread calls this."""
        match event:
            case Joined():
                self._last_end.pop(rank, None)
            case RankStats():
                self._on_stats(rank, event)
            case StepDone():
                self._histograms["step_seconds"].labels(rank).observe(event.seconds)
            case ActionDone():
                self._add_rank_seconds(rank, "compute", event.end - event.start)
                self._add_rank_seconds(rank, "wait", event.waited)
                # Between its previous action and this one, the rank waited `event.waited` seconds
                # for an image, a packet, a send or a file writer. The rest of the time between the
                # two actions counts as idle: the rank had no work.
                begin = event.start - event.waited
                self._add_rank_seconds(rank, "idle", begin - self._last_end.get(rank, begin))
                self._last_end[rank] = event.end
            case _:
                pass

    def _on_stats(self, rank: int, stats: RankStats) -> None:
        before = self._stats.get(rank)
        if before is not None and stats.sent_bytes < before.sent_bytes:
            # The rank was restarted, so its counts began at 0 again.
            for direction in ("sent", "received"):
                moved = getattr(before, f"{direction}_bytes")
                self._moved_before[rank, direction] += moved
        # The dictionary is replaced, because another thread may be iterating over the old one.
        self._stats = {**self._stats, rank: stats}

    def _add_rank_seconds(self, rank: int, state: str, seconds: float) -> None:
        self._counters["rank_seconds"].labels(rank, state).inc(max(0.0, seconds))

    def count_final_job(self, job: Job) -> None:
        """Count an ended job by state; if it is completed, record its duration and ETA error."""
        self._counters["clips"].labels(job.state).inc()
        if job.state is not JobState.COMPLETED or job.finished_at is None:
            return
        if job.started_at is not None:
            seconds = max(0.0, job.finished_at - job.started_at)
            self._histograms["clip_seconds"].observe(seconds)
        if job.eta_seconds:
            actual = job.finished_at - job.created_at
            ratio = (actual - job.eta_seconds) / job.eta_seconds
            self._histograms["eta_error_ratio"].observe(ratio)
            self._eta_errors.append(ratio)

    def count_cancelled(self, number: int) -> None:
        """Add jobs that were cancelled with their batch to the count of cancelled clips.

        Args:
            number: Number of cancelled jobs.
        """
        self._counters["clips"].labels(JobState.CANCELLED).inc(number)

    def count_verification(self, status: VerificationStatus) -> None:
        """Count a verification by its result; `different` also sets the mismatch gauge to 1."""
        self._counters["verifications"].labels(status).inc()
        self._has_mismatch |= status == "different"

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request, and record the time until its response.

        Args:
            method: HTTP method, or `other`.
            route: Path of the route with its placeholders, or `other`.
            status: HTTP status of the response; 499 if the client disconnected before the response.
            seconds: Seconds from the headers of the request to the headers of the response.
        """
        self._counters["http_requests"].labels(method, route, status).inc()
        self._histograms["http_request_seconds"].labels(route, status).observe(seconds)

    def eta_error(self) -> dict[str, float | int | None]:
        """Return the number and the median of the latest ETA errors; median None: no errors yet.

        An ETA error is (actual - promised) / promised, such as 0.1 if a clip took 10% longer.
        """
        ratios = self._eta_errors.copy()
        median = round(statistics.median(ratios), 4) if ratios else None
        return {"clips": len(ratios), "median": median}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics that are computed at each scrape: jobs, queue age, servers, ranks."""
        engine, jobs, oldest = self._engine, self._queue.counts(), self._queue.oldest_waiting()
        num_ranks = engine.config.world_size if engine.state == "ready" else 0
        age = 0.0 if oldest is None else max(0.0, self._queue.now() - oldest)
        yield _gauge_by(
            "state",
            "jobs",
            "Stored jobs by state, without queued jobs that this server cannot make.",
            jobs,
        )
        for name, text, value in (
            ("queue_age_seconds", "Seconds since the request of the oldest waiting job.", age),
            (
                "unreadable_jobs",
                "Jobs skipped since the start, because a newer svdpp has written them.",
                self._queue.num_unreadable,
            ),
            (
                "open_batch_lines",
                "Batch lines whose jobs have not ended, including lines still being checked.",
                self._num_open_lines(),
            ),
            ("live_ranks", "Number of live ranks.", num_ranks),
            ("event_streams", "Number of open event streams and archives.", self._num_streams()),
            (
                "verification_mismatch",
                "1 if a verified clip has differed from its reference, otherwise 0.",
                self._has_mismatch,
            ),
        ):
            yield GaugeMetricFamily(f"svdpp_{name}", text, value)
        servers = {server["id"]: server for server in self._servers()}
        for name, text in (
            ("seen_seconds", "Seconds since each server last reported to the queue."),
            ("ranks", "Number of ranks of each server."),
            ("claims", "Number of clips that each server has claimed."),
        ):
            values = {id: server[name] for id, server in servers.items()}
            yield _gauge_by("server", f"server_{name}", text, values)
        yield CounterMetricFamily(
            "svdpp_restarts", "Number of restarts of the ranks.", engine.restarts
        )
        yield from self._collect_ranks(num_ranks)

    def _collect_ranks(self, num_ranks: int) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield metrics from the ranks' latest samples; gauges only while the ranks are ready."""
        stats = self._stats
        moved = CounterMetricFamily(
            "svdpp_rank_moved_bytes",
            "Bytes of tensors that each rank has sent to or received from other ranks.",
            labels=["rank", "direction"],
        )
        for rank, each in stats.items():
            for direction in ("sent", "received"):
                number = self._moved_before[rank, direction] + getattr(each, f"{direction}_bytes")
                moved.add_metric([str(rank), direction], number)
        yield moved
        for field, (name, text) in _RANK_GAUGES.items():
            values = {rank: getattr(each, field) for rank, each in stats.items()}
            known = {rank: value for rank, value in values.items() if value is not None}
            yield _gauge_by("rank", name, text, known if num_ranks else {})

    def render(self) -> bytes:
        """Return all metrics in the text format 0.0.4 of Prometheus."""
        return generate_latest(self._registry)


def _gauge_by(label: str, name: str, text: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"svdpp_{name}", text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([str(value_of_label)], value)
    return family
