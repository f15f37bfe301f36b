"""Places and ETAs of the open jobs: when each will be finished, by replay of the real schedule.

The replay is the recurrence of `plan.large_forecast`, which equals a replay of the action lists and
takes a microsecond a visit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from svdpp.config import PipelineConfig, SamplingConfig
from svdpp.errors import OutputError, RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import Costs
from svdpp.plan.large_forecast import Way, clip_times, way_of
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route
from svdpp.serve.cost_book import CostBook
from svdpp.serve.running_clips import RunningClip, RunningClips
from svdpp.serve.store import JobStore

#: Clips that are replayed; later ones follow at the rate of the second half of these.
MAX_REPLAYED = 1000

_MAX_LAYOUTS = 64
_MAX_AGE = 0.5
_MAX_BOUNDARIES = 64
_MAX_AGE_AT_HAND = 2.0
# While no costs are known.
_RETRY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ClipAhead:
    """An unfinished clip, with the rest of its route.

    Args:
        id: of its job.
        route: the rest of its route through the ranks.
        costs: of a clip of its size.
        has_begun: whether a rank works on it, or has done so.
        begun_seconds: seconds of the current step that have passed.
    """

    id: str
    route: Route
    costs: Costs
    has_begun: bool = False
    begun_seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """When a clip will be finished.

    Args:
        place: number of clips that begin before it; None once it has begun.
        eta_seconds: until its last action ends; None before the costs are known.
    """

    place: int | None
    eta_seconds: float | None


class Layouts:
    """The layouts of clips with other numbers of steps, or steps of an expert, than `layout`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._of = functools.lru_cache(_MAX_LAYOUTS)(self._new)

    def route(
        self, clip: int, num_steps: int, steps_done: int = 0, expert_boundary: int | None = None
    ) -> Route:
        """The rest of a clip's route; `expert_boundary` is None if there is one expert."""
        route = self._of(num_steps, expert_boundary).route(clip)
        return route.resumed(steps_done) if steps_done else route

    def _new(self, num_steps: int, expert_boundary: int | None) -> Layout:
        layout = replace(self._layout, num_steps=num_steps, split="balanced", expert_boundary=None)
        for split in (self._layout.split, "balanced"):  # an even split may not exist
            with contextlib.suppress(RequestError):
                return replace(layout, split=split, expert_boundary=expert_boundary)
        return layout


def estimate(clips: Sequence[ClipAhead], *, delay: float = 0.0) -> dict[str, Estimate]:
    """The estimate of each clip, by its job's id.

    `clips` are all unfinished ones, in the order in which the ranks take them; `delay` is until the
    ranks are ready.
    """
    if not clips:
        return {}
    ways = [_way(clip) for clip in clips[:MAX_REPLAYED]]
    ends = [end for _, end in clip_times(ways, clips[0].costs.transfer)]
    if len(clips) > len(ways):
        ends += _extrapolated(clips, ways, ends)
    found: dict[str, Estimate] = {}
    num_waiting = 0
    for clip, end in zip(clips, ends, strict=True):
        place = None if clip.has_begun else num_waiting
        num_waiting += place is not None
        found[clip.id] = Estimate(place, delay + end)
    return found


def _way(clip: ClipAhead) -> Way:
    """The clip's visits at ranks, without the part of the first one that is done."""
    (rank, seconds), *others = way_of(clip.route, clip.costs)
    passed = min(clip.begun_seconds, clip.costs.step_on(rank), seconds)
    return ((rank, seconds - passed), *others)


def _extrapolated(
    clips: Sequence[ClipAhead], ways: Sequence[Way], ends: Sequence[float]
) -> list[float]:
    """The ends of the clips after the replayed ones, at their rate for each second of work."""
    half = len(ways) // 2
    latest = max(ends)
    work = math.fsum(_work(clip) for clip in clips[half : len(ways)])
    pace = (latest - max(ends[:half])) / work if work else 0.0
    later = []
    for clip in clips[len(ways) :]:
        latest += pace * _work(clip)
        later.append(latest)
    return later


def _work(clip: ClipAhead) -> float:
    """Seconds of all ranks for the clip, if all ranks are alike."""
    steps = sum(part.num_steps for part in clip.route.ranges)
    extra = 0.0 if clip.route.start else clip.costs.encode_on(0)
    extra += clip.costs.decode_on(0) if clip.route.decodes else 0.0
    return steps * clip.costs.step_on(0) + extra


class JobEstimates:
    """Estimates of all open jobs, computed at most twice a second. Any thread may call it.

    `delay` returns the seconds until the ranks are ready for work.
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
        """The estimate of each open job, by its id; at most `max_age` seconds old."""
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
        checkpoint = self._checkpoint
        return None if checkpoint is None else checkpoint.expert_boundary(sampling)
