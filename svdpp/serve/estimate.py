"""Owns the ETA: when each unfinished clip will be finished, by replay of the real schedule.

Pure: the caller brings routes, costs and progress. The replay is the recurrence of
`plan.large_forecast`, which equals a replay of the action lists and takes a microsecond a visit.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.large_forecast import Way, clip_times, way_of
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route

#: Clips that are replayed; later ones follow at the rate of the second half of these.
MAX_REPLAYED = 1000

_MAX_LAYOUTS = 64


@dataclass(frozen=True, kw_only=True)
class ClipAhead:
    """An unfinished clip.

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
    """The layout of clips with other numbers of steps, or steps of an expert, than the pipeline's.

    Args:
        layout: of the pipeline.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._of = functools.lru_cache(_MAX_LAYOUTS)(self._new)

    def route(
        self, clip: int, num_steps: int, steps_done: int = 0, expert_boundary: int | None = None
    ) -> Route:
        """The rest of a clip's route.

        Args:
            clip: its index.
            num_steps: of the clip.
            steps_done: after which the rest begins.
            expert_boundary: steps of the first of two experts; None: one expert.
        """
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

    Args:
        clips: all unfinished clips, in the order in which the ranks take them.
        delay: seconds until the ranks are ready for work.
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
