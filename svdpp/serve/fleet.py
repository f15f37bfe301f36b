"""Servers that share a queue: their registration and leases, and the ETAs of the jobs.

There is no coordinator. Each server renews its own claims, and puts back those that nobody renews.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loguru import logger

from svdpp import __version__
from svdpp.config import Lora, SamplingConfig
from svdpp.plan.actions import Kind
from svdpp.serve.clips import RunningClip
from svdpp.serve.clock import ClockError
from svdpp.serve.engine import Engine
from svdpp.serve.job import Job
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import QUEUED, JobQueue
from svdpp.serve.request_schema import Capabilities
from svdpp.serve.schemas import format_size
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.worker.messages import ActionDone, ClipDone, Event, StepDone

# Two renewals can be late before a lease ends.
_RENEWALS_PER_LEASE = 3
_MAX_SECONDS = 10.0
_LISTEN_SECONDS = 0.5
# Free servers of a large fleet that a new job wakes, on average. A job that none of them takes
# waits for the next turn of a free server.
_MAX_WOKEN = 16
# Servers of a large fleet that look at the others and their claims in each turn, on average.
_MAX_REFRESHING = 64
# Latest samples of a clip's parts, and of its steps; few, so that ETAs follow ranks that become
# slower.
_MAX_CLIP_SAMPLES, _MAX_STEP_SAMPLES = 9, 32
_MAX_AGE = 0.5
# Advice to clients while no ETA is known.
_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class Estimate:
    """Queue position and ETA of an open job."""

    queue_position: int | None
    """Number of clips that begin before it; None once it has begun."""
    eta_seconds: float | None
    """Seconds until the clip is finished. None before the first steps are measured."""


@dataclass(frozen=True)
class _WorkRates:
    """Seconds of work for each pixel of a clip."""

    encode: float
    step: float
    decode: float
    write: float = 0.0

    def remaining(self, sampling: SamplingConfig, steps_done: int = 0) -> float:
        """Return the seconds of work that is left of a clip after some steps."""
        steps = sampling.num_inference_steps - steps_done
        seconds = (
            steps * self.step + self.decode + self.write + (0.0 if steps_done else self.encode)
        )
        return seconds * _volume(sampling)

    def remaining_of(self, clip: RunningClip) -> float:
        """Return the seconds left of a clip at work, less those since its last event."""
        sampling, done = clip.job.sampling, clip.progress.steps_done
        left = self.remaining(sampling, done)
        next_left = (
            self.remaining(sampling, done + 1) if done < sampling.num_inference_steps else 0.0
        )
        return left - min(time.monotonic() - clip.progressed_at, left - next_left)


class EtaEstimator:
    """Queue positions and ETAs of the open jobs, by the median times of this server's latest work.

    The work of the clips before one that waits is divided among the ranks of all servers that can
    make it, each of which is taken to be as fast as this one. An instance is an observer of a
    `Pipeline`; any thread may call the other methods.
    """

    def __init__(self, queue: JobQueue, engine: Engine, num_servers: Callable[[], int]) -> None:
        self._queue = queue
        self._dispatcher = engine.dispatcher
        self._cfg_parallel = engine.config.parallel.cfg_parallel_size
        self._num_ranks = engine.config.world_size // self._cfg_parallel
        self._num_servers = num_servers
        kinds = (Kind.ENCODE, "step", Kind.DECODE, "write")
        self._samples = {
            kind: deque[float](maxlen=_MAX_STEP_SAMPLES if kind == "step" else _MAX_CLIP_SAMPLES)
            for kind in kinds
        }
        # Ranks and seconds of the latest actions; a clip has about one on each rank.
        self._recent_work = deque[tuple[int, float]](maxlen=8 * (self._num_ranks + 2))
        self._lock = threading.Lock()
        self._estimated_at = -_MAX_AGE
        self._latest: dict[str, Estimate] = {}

    def __call__(self, rank: int, event: Event) -> None:
        """Take an event of `rank`."""
        match event:
            case StepDone():
                self._add("step", event.clip, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                self._add(event.action.kind, event.action.clip, seconds)
                if rank % self._cfg_parallel == 0:  # both ranks of a pair work at once
                    self._recent_work.append((rank, seconds))
            case ClipDone():
                self._add("write", event.clip, event.write_seconds)
            case _:
                pass

    def _add(self, kind: str, index: int, seconds: float) -> None:
        job = self._dispatcher.recent_jobs.get(index)
        if job is not None and kind in self._samples:
            self._samples[kind].append(seconds / _volume(job.sampling))

    def estimate(self, job_id: str) -> Estimate | None:
        """Return the estimate of an open job; None if it is not open."""
        return self.estimate_all().get(job_id) or self.estimate_all(max_age=0.0).get(job_id)

    def remote_eta(self, job: Job) -> float | None:
        """Return the seconds until a clip of another server is finished. None: unknown yet."""
        rates = self._rates()
        return None if rates is None else rates.remaining(job.sampling, job.step)

    def seconds_until_slot(self) -> float:
        """Return the seconds until the next clip is finished, and a full queue has room."""
        etas = [clip.eta_seconds for clip in self.estimate_all().values()]
        return min((eta for eta in etas if eta is not None), default=_RETRY_SECONDS)

    def estimate_all(self, max_age: float = _MAX_AGE) -> dict[str, Estimate]:
        """Return the estimate of each open job, by its id; at most `max_age` seconds old."""
        oldest = time.monotonic() - max_age
        with self._lock:
            if self._estimated_at <= oldest:
                now = time.monotonic()
                self._latest, self._estimated_at = self._estimate_all(), now
            return self._latest

    def _estimate_all(self) -> dict[str, Estimate]:
        waiting = self._queue.waiting()  # read first, so that a job that moves is not missed
        clips, preparing = self._dispatcher.clips(), self._dispatcher.preparing
        rates = self._rates()
        rates_or_zero = rates or _WorkRates(0.0, 0.0, 0.0)
        started = [clip for clip in clips if clip.has_started]
        etas = {clip.job.id: rates_or_zero.remaining_of(clip) for clip in started}
        positions: dict[str, int] = {}
        ahead = self._until_free(rates_or_zero, started[-1]) if started else 0.0
        num_ranks = self._num_busy_ranks() * self._num_servers()
        for id, sampling, steps_done in self._in_start_order(clips, waiting):
            if id not in etas:
                seconds = rates_or_zero.remaining(sampling, steps_done)
                if preparing is not None and id == preparing.job.id:
                    seconds += max(0.0, preparing.prepared_at - time.monotonic())
                positions[id], etas[id] = len(positions), ahead + seconds
                ahead += seconds / num_ranks
        is_known = rates is not None
        return {
            id: Estimate(positions.get(id), eta if is_known else None) for id, eta in etas.items()
        }

    def _num_busy_ranks(self) -> float:
        """Return the mean number of ranks that work at once while clips wait.

        The busiest rank sets the pace of a full pipeline, and the others wait for it: of two ranks
        of which one works half as long, 1.5 work at once. All of them until each has worked.
        """
        seconds = defaultdict[int, float](float)
        for rank, each in self._recent_work.copy():
            seconds[rank] += each
        most = max(seconds.values(), default=0.0)
        if len(seconds) < self._num_ranks or not most:
            return self._num_ranks
        return sum(seconds.values()) / most

    def _until_free(self, rates: _WorkRates, latest: RunningClip) -> float:
        """Return the seconds until the first rank has done its part of the latest clip."""
        of_others = rates.remaining(latest.job.sampling) * (1 - 1 / self._num_ranks)
        return max(0.0, rates.remaining_of(latest) - of_others)

    def _in_start_order(
        self, clips: list[RunningClip], waiting: list[tuple[str, SamplingConfig]]
    ) -> Iterator[tuple[str, SamplingConfig, int]]:
        """Yield id, parameters and done steps of the open jobs, in the order of their begin."""
        for clip in clips:
            yield clip.job.id, clip.job.sampling, clip.progress.steps_done
        # Others go before a large image until it is prepared.
        first = 0 if self._dispatcher.preparing is None else self._dispatcher.num_free_slots
        claimed = [(job.id, job.sampling) for job in self._queue.claimed()]
        for id, sampling in (*waiting[:first], *claimed, *waiting[first:]):
            yield id, sampling, 0

    def _rates(self) -> _WorkRates | None:
        """Return the medians of the latest work; None before the first step."""
        if not self._samples["step"]:
            return None
        encode, step, decode, write = (
            statistics.median(samples.copy() or [0.0]) for samples in self._samples.values()
        )
        return _WorkRates(encode, step, decode, write)


def _volume(sampling: SamplingConfig) -> int:
    """Return the number of pixels that the time of a step is taken to be proportional to."""
    return sampling.height * sampling.width * sampling.frames * (2 if sampling.uses_guidance else 1)


class Fleet:
    """Server among those that share its queue; alone if nobody shares it."""

    def __init__(self, queue: JobQueue, engine: Engine, capabilities: Capabilities) -> None:
        self._queue = queue
        self._engine = engine
        self._capabilities = capabilities
        self._peers: list[dict[str, Any]] = []
        self._renew_at = 0.0
        self._is_queue_unavailable = False
        self._has_skew = False
        self.estimates = EtaEstimator(
            queue, engine, lambda: 1 + len(self.peers_for(queue.model_key))
        )
        """Queue positions and ETAs of the open jobs."""
        engine.observe(self.estimates)
        # After an outage all leases may have ended: their holders first get the time to renew them.
        self._requeue_expired_at = time.monotonic() + queue.lease_seconds
        error_message = "the server cannot look after its claims"
        self.thread = PeriodicThread(
            "fleet", self._run_once, 0.0, error_message=error_message, on_close=queue.release
        )
        """Thread that renews the claims, and at its end hands back what is not finished."""

    def servers(self) -> list[dict[str, Any]]:
        """Return this server, then the others as each has described itself `seen_seconds` ago."""
        return [self._describe_self(), *self._peers]

    def peers_for(self, model_key: str | None, loras: Iterable[Lora] = ()) -> list[dict[str, Any]]:
        """Return the other live servers that make the clips of a model (`Job.model_key`).

        Args:
            model_key: Key of the model and its weights.
            loras: LoRAs that they must have.
        """
        hashes = {lora.sha256 for lora in loras}
        live = (other for other in self._peers if other["is_live"])
        return [
            other
            for other in live
            if (other["weights"] or other["model"]) == model_key and hashes <= {*other["loras"]}
        ]

    def _describe_self(self) -> dict[str, Any]:
        dispatcher, state = self._engine.dispatcher, self._engine.state
        return {
            "id": self._queue.server,
            "host": socket.gethostname(),
            "version": __version__,
            "model": self._capabilities.model,
            "weights": self._capabilities.weights,
            "loras": [each["sha256"] for each in self._capabilities.loras.to_json()],
            "sizes": [format_size(*size) for size in self._capabilities.sizes],
            "ranks": self._engine.config.world_size,
            "state": state,
            "free": dispatcher.num_free_slots if state == "ready" else 0,
            "claims": len(dispatcher.clips()),
            "seen_seconds": 0.0,
            "is_live": True,
        }

    # --- the fleet's thread -----------------------------------------------------------------------

    def _run_once(self) -> None:
        try:
            if time.monotonic() >= self._renew_at:
                self._renew_claims()
                seconds = min(_MAX_SECONDS, self._queue.lease_seconds / _RENEWALS_PER_LEASE)
                self._renew_at = time.monotonic() + seconds
            self._listen(min(_LISTEN_SECONDS, max(0.0, self._renew_at - time.monotonic())))
        except BackendUnavailableError as error:
            if not self._is_queue_unavailable:
                logger.error("{}: the clips in progress go on, and none is taken", error)
            self._is_queue_unavailable = True
            self._renew_at = 0.0
            self._requeue_expired_at = time.monotonic() + self._queue.lease_seconds
            raise
        if self._is_queue_unavailable:
            logger.warning("the queue is back")
        self._is_queue_unavailable = False

    def _renew_claims(self) -> None:
        dispatcher = self._engine.dispatcher
        revoked, to_cancel = self._queue.renew(dispatcher.steps_done)
        dispatcher.revoke(revoked)
        for id in to_cancel:
            dispatcher.request_cancel(id)
        description = self._describe_self()
        self._queue.register(description)
        self._check_clock()
        if random.random() * len(self._peers) < _MAX_REFRESHING:
            self._refresh_peers(description)
        dispatcher.wake()

    def _check_clock(self) -> None:
        """Report once that this machine's clock differs from the database's, the one for ages."""
        try:
            self._queue.check_clock()
        except ClockError as error:
            if not self._has_skew:
                logger.error("{}", error)
            self._has_skew = True
            return
        if self._has_skew:
            logger.warning("the clock of this machine agrees with the database's again")
        self._has_skew = False

    def _refresh_peers(self, description: dict[str, Any]) -> None:
        self._peers = [
            {**row, "is_live": row["seen_seconds"] < self._queue.lease_seconds}
            for row in self._queue.servers()
            if row["id"] != description["id"]
            and description.keys() <= row.keys()  # else of another version
        ]
        if time.monotonic() >= self._requeue_expired_at:
            for job in self._queue.requeue_expired():
                logger.warning("{} is {}: its server did not renew its claim", job.id, job.state)

    def _listen(self, seconds: float) -> None:
        dispatcher = self._engine.dispatcher
        for payload in self._queue.backend.listen(seconds):
            if payload != QUEUED:
                dispatcher.request_cancel(payload)
                continue
            num_free = sum(other["free"] > 0 for other in self.peers_for(self._queue.model_key))
            if not dispatcher.num_free_slots or random.random() * num_free < _MAX_WOKEN:
                dispatcher.wake()
