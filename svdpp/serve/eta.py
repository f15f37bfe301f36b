"""Places and ETAs of the open jobs, by replay of the real schedule with measured costs.

The replay is the recurrence of `plan.forecast`, which equals a replay of the action lists and
takes a microsecond a visit.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.driver.resolve import ClipWork
from svdpp.driver.trace import work_of
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Route
from svdpp.plan.costs import PRESETS, Costs, measured_costs
from svdpp.plan.forecast import Way, clip_times, way_of
from svdpp.serve.clips import RunningClip
from svdpp.serve.feeder import Feeder
from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, Event

#: Clips that are replayed; later ones follow at the rate of the second half of these.
MAX_REPLAYED = 1000

_MAX_AGE = 0.5
# While no costs are known.
_RETRY_SECONDS = 5.0

_MAX_SIZES = 32
_MAX_SAMPLES = 128
_PRESET = PRESETS["svd-xt-a100"]
_PRESET_VOLUME = 576 * 1024 * 25 * 2


class MeasuredCosts:
    """Costs of the latest sizes of clips; of an unknown size, scaled from the latest known.

    Each is the median of the latest measurements, so that ranks that warm up count little.

    Args:
        assumed: costs of a clip of `sampling`, before a measurement; None: none are known, and what
            is not measured has the ratio to a step that it has on an A100.
        sampling: of the pipeline.
        in_pairs: whether pairs of ranks do the steps.
    """

    def __init__(
        self, assumed: Costs | None, sampling: SamplingConfig, *, in_pairs: bool = False
    ) -> None:
        self._in_pairs = in_pairs
        self._is_given = assumed is not None
        self._assumed = assumed or _PRESET
        self._assumed_volume = _PRESET_VOLUME if assumed is None else _volume(sampling)
        self._lock = threading.Lock()
        self._samples: OrderedDict[int, dict[str, deque[float]]] = OrderedDict()
        """The latest seconds of each kind of work, by the volume of the clips."""

    def add(self, event: Event, sampling: SamplingConfig) -> None:
        """Records an event about a clip of `sampling`; ignores events without a time."""
        if (work := work_of(event)) is None:
            return
        kind, seconds = work
        if isinstance(event, ActionDone):  # the clip also waits for an image not prepared ahead
            seconds += event.waits.get("image", 0.0)
        volume = _volume(sampling)
        with self._lock:
            new: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MAX_SAMPLES))
            self._samples.setdefault(volume, new)[kind].append(seconds)
            self._samples.move_to_end(volume)
            if len(self._samples) > _MAX_SIZES:
                self._samples.popitem(last=False)

    @property
    def are_known(self) -> bool:
        """Whether costs are measured, or were given; those of an A100 say little about others."""
        with self._lock:
            return self._is_given or any("step" in samples for samples in self._samples.values())

    def costs(self, sampling: SamplingConfig) -> Costs:
        """The costs of a clip of `sampling`."""
        volume = _volume(sampling)
        with self._lock:
            for known in (volume, *reversed(self._samples)):
                if "step" in (samples := self._samples.get(known, {})):
                    seconds = {kind: statistics.median_low(own) for kind, own in samples.items()}
                    assumed = self._assumed_of(known)
                    costs = measured_costs(seconds, assumed, in_pairs=self._in_pairs)
                    return _scaled(costs, volume / known)
        return self._assumed_of(volume)

    def _assumed_of(self, volume: int) -> Costs:
        return _scaled(self._assumed, volume / self._assumed_volume)


def _volume(sampling: SamplingConfig) -> int:
    """What the time of a step is taken to be proportional to."""
    return sampling.height * sampling.width * sampling.frames * (2 if sampling.guided else 1)


def _scaled(costs: Costs, scale: float) -> Costs:
    """`costs` with other times of the device's work; transfers and all else stay."""
    work = costs.scaled(scale)
    return replace(
        costs,
        step_seconds=work.step_seconds,
        encode_seconds=work.encode_seconds,
        decode_seconds=work.decode_seconds,
    )


@dataclass(frozen=True, kw_only=True)
class ClipAhead:
    """An unfinished clip, with the rest of its route and the costs of a clip of its size."""

    id: str
    route: Route
    costs: Costs
    has_begun: bool = False
    begun_seconds: float = 0.0
    """Seconds of the current step that have passed."""


@dataclass(frozen=True)
class Estimate:
    """When a clip will be finished."""

    place: int | None
    """Number of clips that begin before it; None once it has begun."""
    eta_seconds: float | None
    """None before the costs are known."""


def estimate(clips: Sequence[ClipAhead], *, delay: float = 0.0) -> dict[str, Estimate]:
    """The estimate of each clip, by its job's id.

    `clips` are all unfinished ones, in the order in which the ranks take them; `delay` is until the
    ranks are ready.
    """
    if not clips:
        return {}
    ways = [_way(clip) for clip in clips[:MAX_REPLAYED]]
    ends = [end for _, end in clip_times(ways, clips[0].costs.transfer)]
    if num_later := len(clips) - len(ways):
        half, last = len(ways) // 2, max(ends)
        seconds_per_clip = (last - max(ends[:half])) / (len(ways) - half)
        ends += [last + seconds_per_clip * number for number in range(1, num_later + 1)]
    estimates: dict[str, Estimate] = {}
    num_waiting = 0
    for clip, end in zip(clips, ends, strict=True):
        estimates[clip.id] = Estimate(None if clip.has_begun else num_waiting, delay + end)
        num_waiting += not clip.has_begun
    return estimates


def _way(clip: ClipAhead) -> Way:
    """The clip's visits at ranks, without the part of the first one that is done.

    That is at most what its next event ends: a step, with an encode before it, or a decode.
    """
    (rank, seconds), *others = way_of(clip.route, clip.costs)
    until_event = seconds
    if clip.route.ranges[0].num_steps:
        until_event = clip.costs.step_on(rank)
        until_event += 0.0 if clip.route.start else clip.costs.encode_on(rank)
    passed = min(clip.begun_seconds, until_event, seconds)
    return ((rank, seconds - passed), *others)


class JobEstimates:
    """Estimates of all open jobs, computed at most twice a second. Any thread may call it.

    `feeder` has the clips in the pipeline, `delay` returns the seconds until the ranks are ready.
    """

    def __init__(
        self,
        config: PipelineConfig,
        queue: JobQueue,
        feeder: Feeder,
        costs: MeasuredCosts,
        delay: Callable[[], float],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._layout = config.layout
        self._work = ClipWork(config, checkpoint)
        self._queue = queue
        self._feeder = feeder
        self._costs = costs
        self._delay = delay
        self._lock = threading.Lock()
        self.others: Callable[[], int] = lambda: 0
        """How many other servers take the jobs that wait."""
        self._made_at = -_MAX_AGE
        self._latest: dict[str, Estimate] = {}

    def of(self, job_id: str) -> Estimate | None:
        """The estimate of an open job as of now; None if it is not open."""
        found = self.all().get(job_id) or self.all(max_age=0.0).get(job_id)
        if found is None or found.eta_seconds is None:
            return found
        age = time.monotonic() - self._made_at
        return replace(found, eta_seconds=max(0.0, found.eta_seconds - age))

    def seconds_until_room(self) -> float:
        """Seconds until the next clip is finished: when a full queue is worth another request."""
        etas = [clip.eta_seconds for clip in self.all().values()]
        return min((eta for eta in etas if eta is not None), default=_RETRY_SECONDS)

    def all(self, max_age: float = _MAX_AGE) -> dict[str, Estimate]:
        """The estimate of each open job, by its id; at most `max_age` seconds old."""
        oldest = time.monotonic() - max_age
        # While another thread computes, an answer that is a little older will do.
        if not self._lock.acquire(blocking=max_age == 0):
            return self._latest
        try:
            # Of the threads that waited here, the first computes for all.
            if self._made_at <= oldest:
                now = time.monotonic()
                self._latest = self._estimate()
                self._made_at = now
            return self._latest
        finally:
            self._lock.release()

    def _estimate(self) -> dict[str, Estimate]:
        number = 1 + self.others()
        waiting = self._queue.waiting()  # read first, so that a job that moves is not missed
        estimates = estimate(self._clips(waiting[::number]), delay=self._delay())
        shared: dict[str, Estimate] = {}
        for position, (id, _) in enumerate(waiting):  # as many clips begin at about the same time
            turn, later = divmod(position, number)
            first = estimates[waiting[position - later][0]]
            taken = (first.place or 0) - turn  # clips that this server has taken, and not begun
            shared[id] = replace(first, place=taken + position)
        estimates |= shared
        if self._costs.are_known:
            return estimates
        return {id: replace(clip, eta_seconds=None) for id, clip in estimates.items()}

    def elsewhere(self, job: Job) -> float | None:
        """Seconds until a clip of another server is finished, if that one is as fast as this."""
        if not self._costs.are_known:
            return None
        route, costs = self._route(0, job.sampling), self._costs.costs(job.sampling)
        route = route.resumed(job.step) if job.step else route
        clip = ClipAhead(id=job.id, route=route, costs=costs, has_begun=True)
        return estimate([clip])[job.id].eta_seconds

    def _clips(self, waiting: list[tuple[str, SamplingConfig]]) -> list[ClipAhead]:
        """The open clips: those in the pipeline, those on the way to it, those that wait."""
        running, preparing = self._feeder.clips(), self._feeder.preparing
        # Others go before a large image until it is prepared.
        first = 0 if preparing is None else self._feeder.num_free
        costs_of = functools.cache(self._costs.costs)
        clips = {clip.job.id: self._in_pipeline(clip) for clip in running}
        next_clip = running[-1].clip + 1 if running else 0
        taken = [(job.id, job.sampling) for job in self._queue.claimed()]
        for id, sampling in (*waiting[:first], *taken, *waiting[first:]):
            if id not in clips:
                route, costs = self._route(next_clip, sampling), costs_of(sampling)
                if preparing is not None and id == preparing.job.id:
                    encode = costs.encode_on(route.ranges[0].rank) + preparing.prepare_seconds_left
                    costs = replace(costs, encode_seconds=encode)
                clips[id] = ClipAhead(id=id, route=route, costs=costs)
                next_clip += 1
        return list(clips.values())

    def _in_pipeline(self, clip: RunningClip) -> ClipAhead:
        sampling, done = clip.job.sampling, clip.progress.steps_done
        route = self._route(clip.clip, sampling)
        return ClipAhead(
            id=clip.job.id,
            route=route.resumed(done) if done else route,
            costs=self._costs.costs(sampling),
            has_begun=clip.has_begun,
            begun_seconds=time.monotonic() - clip.moved_at if clip.has_begun else 0.0,
        )

    def _route(self, clip: int, sampling: SamplingConfig) -> Route:
        try:
            request = self._work.resolved(ClipRequest(seed=0, sampling=sampling))
            return self._work.route(clip, request)
        except RequestError:  # it will fail
            return self._layout.route(clip)
