"""Owns the places and ETAs of the open jobs, from the queue, the ranks' progress and the costs."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from svdpp.config import PipelineConfig, SamplingConfig
from svdpp.errors import OutputError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.schedule import Route
from svdpp.serve.cost_book import CostBook
from svdpp.serve.estimate import ClipAhead, Estimate, Layouts, estimate
from svdpp.serve.running_clips import RunningClip, RunningClips
from svdpp.serve.store import JobStore

_MAX_AGE = 0.5
_MAX_BOUNDARIES = 64
_MAX_AGE_AT_HAND = 2.0
# While no costs are known.
_RETRY_SECONDS = 5.0


class JobEstimates:
    """Estimates of all open jobs, computed at most twice a second. Any thread may call it.

    Args:
        config: of the pipeline, resolved.
        store: the queue.
        running: the clips in the pipeline.
        costs: of clips by size.
        delay: seconds until the ranks are ready for work.
        checkpoint: of the pipeline's model; None for the dummy model.
    """

    def __init__(
        self,
        config: PipelineConfig,
        store: JobStore,
        running: RunningClips,
        costs: CostBook,
        delay: Callable[[], float],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._layouts = Layouts(config.layout)
        self._store = store
        self._running = running
        self._costs = costs
        self._delay = delay
        self._checkpoint = checkpoint
        self._boundary_of = functools.lru_cache(_MAX_BOUNDARIES)(self._new_boundary)
        self._lock = threading.Lock()
        self._made_at = -_MAX_AGE_AT_HAND
        self._is_wanted = False
        self._found: dict[str, Estimate] = {}

    def of(self, job_id: str) -> Estimate | None:
        """The estimate of a job; None if it is not open."""
        found = self.all().get(job_id)
        if found is None:  # a new job, or none
            job = self._store.get(job_id)
            if job is not None and not job.state.is_final:
                found = self.all(max_age=0.0).get(job_id)
        return found

    def at_hand(self, job_id: str) -> Estimate | None:
        """The estimate of a job if it needs no computing; None says nothing.

        `refresh` keeps these estimates new.
        """
        self._is_wanted = True
        is_new = time.monotonic() - self._made_at <= _MAX_AGE_AT_HAND
        return self._found.get(job_id) if is_new else None

    def refresh(self) -> None:
        """Computes the estimates again if `at_hand` was called since they were too old."""
        if self._is_wanted:
            self._is_wanted = False
            with contextlib.suppress(OutputError):  # the disk; whoever asks next gets the error
                self.all()

    def seconds_until_room(self) -> float:
        """Seconds until the next clip is finished: when a full queue is worth another request."""
        etas = [each.eta_seconds for each in self.all().values()]
        return min((eta for eta in etas if eta is not None), default=_RETRY_SECONDS)

    def all(self, max_age: float = _MAX_AGE) -> dict[str, Estimate]:
        """The estimate of each open job, by its id.

        Args:
            max_age: seconds for which an earlier answer may be used.
        """
        oldest = time.monotonic() - max_age
        # While another thread computes, an answer that is a little older will do.
        if not self._lock.acquire(blocking=max_age == 0):
            return self._found
        try:
            # Of the threads that waited here, the first computes for all.
            if self._made_at <= oldest:
                self._made_at = time.monotonic()
                self._found = self._estimate()
            return self._found
        finally:
            self._lock.release()

    def _estimate(self) -> dict[str, Estimate]:
        found = estimate(self._clips(), delay=self._delay())
        if self._costs.are_known:
            return found
        return {id: replace(each, eta_seconds=None) for id, each in found.items()}

    def _clips(self) -> list[ClipAhead]:
        """The open clips: those in the pipeline, those on the way to it, those in the queue."""
        waiting = self._store.waiting_clips()  # read first, so that a job that moves is not missed
        running = self._running.all()
        costs_of = functools.cache(self._costs.costs)
        clips = {clip.job.id: self._in_pipeline(clip) for clip in running}
        next_clip = running[-1].clip + 1 if running else 0
        taken = [(job.id, job.sampling) for job in self._store.running()]
        for id, sampling in (*taken, *waiting):
            if id not in clips:
                route = self._route(next_clip, sampling)
                clips[id] = ClipAhead(id=id, route=route, costs=costs_of(sampling))
                next_clip += 1
        return list(clips.values())

    def _in_pipeline(self, clip: RunningClip) -> ClipAhead:
        sampling = clip.job.sampling
        passed = time.monotonic() - clip.moved_at if clip.has_begun else 0.0
        return ClipAhead(
            id=clip.job.id,
            route=self._route(clip.clip, sampling, clip.progress.steps_done),
            costs=self._costs.costs(sampling),
            has_begun=clip.has_begun,
            begun_seconds=passed,
        )

    def _route(self, clip: int, sampling: SamplingConfig, steps_done: int = 0) -> Route:
        num_steps, boundary = sampling.num_inference_steps, self._boundary_of(sampling)
        return self._layouts.route(clip, num_steps, steps_done, boundary)

    def _new_boundary(self, sampling: SamplingConfig) -> int | None:
        """The number of steps of the first of two experts; None: one expert."""
        checkpoint = self._checkpoint
        return None if checkpoint is None else checkpoint.expert_boundary(sampling)
