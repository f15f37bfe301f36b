"""Servers that share a queue: registration, renewal of claims, and ETAs of the jobs.

There is no coordinator. Each server renews its own claims, and requeues the jobs whose claims have
expired.
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

# Number of renewals during one lease: the lease survives two missed renewals.
_RENEWALS_PER_LEASE = 3
# Maximum seconds between two renewals.
_MAX_SECONDS = 10.0
# Maximum seconds of one wait for notifications from the queue.
_LISTEN_SECONDS = 0.5
# Mean number of free servers that a new job wakes in a large fleet. If none of the woken servers
# claims the job, the job waits until a free server next polls the queue.
_MAX_WOKEN = 16
# Mean number of servers in a large fleet that, after they have renewed their claims, also read the
# list of servers and requeue jobs with expired claims. The other servers skip this until their next
# renewal, to limit the database's load.
_MAX_REFRESHING = 64
# Numbers of latest measurements from which ETAs are computed: the first for encoding, decoding and
# writing, the second for denoising steps. The numbers are small, so that ETAs soon follow a change
# of the ranks' speed.
_MAX_CLIP_SAMPLES, _MAX_STEP_SAMPLES = 9, 32
# Maximum age in seconds of cached ETAs.
_MAX_AGE = 0.5
# Seconds after which clients should retry, while no ETA is known.
_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class Estimate:
    """Queue position and ETA of a job that has not ended."""

    queue_position: int | None
    """Number of waiting clips that begin before this job's clip; None once the clip has begun."""
    eta_seconds: float | None
    """Seconds until the clip is finished. None until this server has timed a denoising step."""


@dataclass(frozen=True)
class _WorkRates:
    """Seconds of work per pixel of a clip, by stage: encode, one denoising step, decode, write.

    The pixels of all frames count; see `_volume`.
    """

    encode: float
    step: float
    decode: float
    write: float = 0.0

    def remaining(self, sampling: SamplingConfig, steps_done: int = 0) -> float:
        """Return the seconds of work that remain for a clip after `steps_done` finished steps."""
        steps = sampling.num_inference_steps - steps_done
        seconds = (
            steps * self.step + self.decode + self.write + (0.0 if steps_done else self.encode)
        )
        return seconds * _volume(sampling)

    def remaining_of(self, clip: RunningClip) -> float:
        """Return the estimated seconds until a running clip is finished.

        The seconds of work that remain are reduced by the time since the clip's last progress, but
        at most by the time of the next step (after the last step: of decoding and writing).
        """
        sampling, done = clip.job.sampling, clip.progress.steps_done
        left = self.remaining(sampling, done)
        next_left = (
            self.remaining(sampling, done + 1) if done < sampling.num_inference_steps else 0.0
        )
        return left - min(time.monotonic() - clip.progressed_at, left - next_left)


class EtaEstimator:
    """Estimator of queue positions and ETAs, from the median times of this server's latest work.

    A waiting clip begins after the clips that are ahead of it. The work of those clips is divided
    among the ranks of all servers for this model. Each server is assumed to be as fast as this one.

    The pipeline calls an instance with each event of a rank. Any thread may call the other methods.

    Args:
        queue: Queue of the jobs.
        engine: Engine of this server.
        num_servers: Function that returns the number of live servers for this model.
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
        # Latest actions, each as (rank, seconds), of about 8 clips. A clip usually has an ENCODE,
        # a DECODE, and one DENOISE on each rank.
        self._recent_work = deque[tuple[int, float]](maxlen=8 * (self._num_ranks + 2))
        self._lock = threading.Lock()
        self._estimated_at = -_MAX_AGE
        self._latest: dict[str, Estimate] = {}

    def __call__(self, rank: int, event: Event) -> None:
        """Record how long a step, an action or writing a clip's file took, from a rank's event."""
        match event:
            case StepDone():
                self._add("step", event.clip, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                self._add(event.action.kind, event.action.clip, seconds)
                # Both ranks of a CFG pair work at the same time, so only the first rank is counted.
                if rank % self._cfg_parallel == 0:
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
        """Return a job's queue position and ETA; None: it has ended, or another server makes it."""
        return self.estimate_all().get(job_id) or self.estimate_all(max_age=0.0).get(job_id)

    def remote_eta(self, job: Job) -> float | None:
        """Return the estimated seconds until another server finishes a job.

        The result is None until this server has timed a denoising step.
        """
        rates = self._rates()
        return None if rates is None else rates.remaining(job.sampling, job.step)

    def seconds_until_slot(self) -> float:
        """Return the estimated seconds until the next clip ends and the queue takes another job.

        Until this server has timed a denoising step, 5 s are returned.
        """
        etas = [clip.eta_seconds for clip in self.estimate_all().values()]
        return min((eta for eta in etas if eta is not None), default=_RETRY_SECONDS)

    def estimate_all(self, max_age: float = _MAX_AGE) -> dict[str, Estimate]:
        """Return queue position and ETA of each waiting job and each job of this server, by job id.

        Args:
            max_age: Maximum age in seconds of the cached estimates that may be returned.
        """
        oldest = time.monotonic() - max_age
        with self._lock:
            if self._estimated_at <= oldest:
                now = time.monotonic()
                self._latest, self._estimated_at = self._estimate_all(), now
            return self._latest

    def _estimate_all(self) -> dict[str, Estimate]:
        # The waiting jobs are read before the running clips, so that a job that is claimed in
        # between is in both lists. In the opposite order, both lists could lack the job.
        waiting = self._queue.waiting()
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
        """Return the mean number of ranks that work at the same time in a full pipeline.

        The busiest rank sets the pace, and the other ranks wait for it. For example, if one of two
        ranks works half as long as the other, 1.5 ranks work at the same time on average. Until
        the work of each rank has been measured, the number of all ranks is returned.
        """
        seconds = defaultdict[int, float](float)
        for rank, each in self._recent_work.copy():
            seconds[rank] += each
        most = max(seconds.values(), default=0.0)
        if len(seconds) < self._num_ranks or not most:
            return self._num_ranks
        return sum(seconds.values()) / most

    def _until_free(self, rates: _WorkRates, latest: RunningClip) -> float:
        """Return the estimated seconds until the pipeline's first rank can begin another clip.

        Args:
            rates: Seconds of work per pixel.
            latest: Clip that the ranks began last. The first rank has to finish its part of this
                clip before it begins another clip.
        """
        of_others = rates.remaining(latest.job.sampling) * (1 - 1 / self._num_ranks)
        return max(0.0, rates.remaining_of(latest) - of_others)

    def _in_start_order(
        self, clips: list[RunningClip], waiting: list[tuple[str, SamplingConfig]]
    ) -> Iterator[tuple[str, SamplingConfig, int]]:
        """Yield id, sampling parameters and finished steps of jobs, in the order of their start."""
        for clip in clips:
            yield clip.job.id, clip.job.sampling, clip.progress.steps_done
        # While the ranks prepare the large image of a claimed job, waiting jobs start before this
        # job, one for each free slot.
        first = 0 if self._dispatcher.preparing is None else self._dispatcher.num_free_slots
        claimed = [(job.id, job.sampling) for job in self._queue.claimed()]
        for id, sampling in (*waiting[:first], *claimed, *waiting[first:]):
            yield id, sampling, 0

    def _rates(self) -> _WorkRates | None:
        """Return this server's median seconds per pixel of an encode, step, decode and write.

        The result is None until this server has timed a denoising step.
        """
        if not self._samples["step"]:
            return None
        encode, step, decode, write = (
            statistics.median(samples.copy() or [0.0]) for samples in self._samples.values()
        )
        return _WorkRates(encode, step, decode, write)


def _volume(sampling: SamplingConfig) -> int:
    """Return the amount of work in a clip for ETAs: its number of pixels, times two with CFG."""
    return sampling.height * sampling.width * sampling.frames * (2 if sampling.uses_guidance else 1)


class Fleet:
    """Servers that share a queue: this server, and the last reports of the other servers.

    If the queue is not shared, this server is the only one.
    """

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
        # Before this time, no job with an expired claim is requeued. After an outage of the queue,
        # the claims of all servers may have expired, so each server first gets `lease_seconds` to
        # renew its claims. This server also waits after its start, because an outage may have just
        # ended.
        self._requeue_expired_at = time.monotonic() + queue.lease_seconds
        error_message = "the claims of this server cannot be renewed"
        self.thread = PeriodicThread(
            "fleet", self._run_once, 0.0, error_message=error_message, on_close=queue.release
        )
        """Thread that renews this server's claims, and at its end requeues the unfinished jobs."""

    def servers(self) -> list[dict[str, Any]]:
        """Return descriptions of the queue's servers: this one, then the others' last reports.

        `seen_seconds` in each description is the age of the description in seconds.
        """
        return [self._describe_self(), *self._peers]

    def peers_for(self, model_key: str | None, loras: Iterable[Lora] = ()) -> list[dict[str, Any]]:
        """Return the other live servers that can make clips of a model with certain LoRAs.

        Args:
            model_key: Key of the model and its weights, as in `Job.model_key`.
            loras: LoRAs that the servers must have.
        """
        hashes = {lora.sha256 for lora in loras}
        live = (other for other in self._peers if other["is_live"])
        return [
            other
            for other in live
            if (other["weights"] or other["model"]) == model_key and hashes <= {*other["loras"]}
        ]

    def lora_hashes(self) -> dict[str, set[str]]:
        """Return the SHA-256 of each LoRA that a request may name, by name.

        A request may name this server's LoRAs, and those of other live servers with the same model.
        For the name of a LoRA that this server has, only the hash of this server's file is
        returned. A name that only other servers have gets several hashes if their files differ.
        """
        found: dict[str, set[str]] = {}
        for other in self.peers_for(self._queue.model_key):
            for name, sha256 in other["lora_hashes"].items():
                found.setdefault(name, set()).add(sha256)
        return found | {name: {sha256} for name, sha256 in self._capabilities.loras.hashes.items()}

    def _describe_self(self) -> dict[str, Any]:
        dispatcher, state = self._engine.dispatcher, self._engine.state
        return {
            "id": self._queue.server,
            "host": socket.gethostname(),
            "version": __version__,
            "model": self._capabilities.model,
            "weights": self._capabilities.weights,
            "loras": [each["sha256"] for each in self._capabilities.loras.to_json()],
            "lora_hashes": self._capabilities.loras.hashes,
            "sizes": [format_size(*size) for size in self._capabilities.sizes],
            "ranks": self._engine.config.world_size,
            "state": state,
            "free": dispatcher.num_free_slots if state == "ready" else 0,
            "claims": len(dispatcher.clips()),
            "seen_seconds": 0.0,
            "is_live": True,
        }

    # --- methods for the fleet's thread only ------------------------------------------------------

    def _run_once(self) -> None:
        try:
            if time.monotonic() >= self._renew_at:
                self._renew_claims()
                seconds = min(_MAX_SECONDS, self._queue.lease_seconds / _RENEWALS_PER_LEASE)
                self._renew_at = time.monotonic() + seconds
            self._listen(min(_LISTEN_SECONDS, max(0.0, self._renew_at - time.monotonic())))
        except BackendUnavailableError as error:
            if not self._is_queue_unavailable:
                logger.error("{}: clips in progress continue, and no new clip is accepted", error)
            self._is_queue_unavailable = True
            self._renew_at = 0.0
            self._requeue_expired_at = time.monotonic() + self._queue.lease_seconds
            raise
        if self._is_queue_unavailable:
            logger.warning("the queue is available again")
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
        """Log when this machine's clock and the queue's begin to differ, or agree again."""
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
        # Servers of the previous version of svdpp do not report `lora_hashes`.
        rows = [{"lora_hashes": {}, **row} for row in self._queue.servers()]
        self._peers = [
            {**row, "is_live": row["seen_seconds"] < self._queue.lease_seconds}
            for row in rows
            if row["id"] != description["id"]
            # servers whose version of svdpp does not report all of these values are ignored
            and description.keys() <= row.keys()
        ]
        if time.monotonic() >= self._requeue_expired_at:
            for job in self._queue.requeue_expired():
                logger.warning("{} is {}: its server did not renew the claim", job.id, job.state)

    def _listen(self, seconds: float) -> None:
        dispatcher = self._engine.dispatcher
        for payload in self._queue.backend.listen(seconds):
            if payload != QUEUED:
                dispatcher.request_cancel(payload)
                continue
            num_free = sum(other["free"] > 0 for other in self.peers_for(self._queue.model_key))
            if not dispatcher.num_free_slots or random.random() * num_free < _MAX_WOKEN:
                dispatcher.wake()
