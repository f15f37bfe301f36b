"""Owns forecasts without action lists: by recurrence, for thousands of ranks and clips."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, sum_up
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route
from svdpp.plan.split import Cuts

#: Visits of clips at ranks that one forecast walks: some seconds.
MAX_VISITS = 5_000_000

# Clips for each rank of a queue that counts as long.
_QUEUED_PER_RANK = 16

#: One clip's way: each rank it comes by, and the seconds of its work there.
Way = tuple[tuple[int, float], ...]


def forecast_layout(layout: Layout, num_clips: int, arrivals: Sequence[float] = ()) -> Forecast:
    """What `layout` makes of `num_clips` clips, at the costs that it is cut by.

    The replay of its action lists gives the same; this takes a microsecond for each visit of a clip
    at a rank, and where all replicas are alike walks one of them.

    Args:
        layout: who does what.
        num_clips: 1 or more.
        arrivals: when each clip is there to be begun, in rising order; empty: all from the start.

    Raises:
        RequestError: more visits than some seconds of work.
    """
    alike = layout.replicas_are_alike
    _check_size(layout, num_clips, walks_all=bool(arrivals) or not alike)
    known: dict[tuple[int, int, Cuts], Way] = {}
    clips = [(0.0, 0.0)] * num_clips
    walked: list[tuple[float, float]] = []
    busy = 0.0
    for replica in range(min(layout.replicas, num_clips)):
        own = range(replica, num_clips, layout.replicas)
        if arrivals or not alike or len(own) != len(walked):
            ways = list(_ways(layout, own, 0 if alike else replica, known))
            seconds = sum(work for way in ways for _, work in way)
            walked = list(walk(ways, layout.costs.transfer, arrivals[replica :: layout.replicas]))
        clips[replica :: layout.replicas] = walked
        busy += seconds
    return sum_up(
        clips,
        busy=busy,
        world_size=layout.world_size,
        num_finishers=min(layout.replicas * layout.decoders, num_clips),
    )


def steady_seconds_per_clip(layout: Layout) -> float:
    """Mean time between finished clips of a queue so long that its ends weigh little."""
    most = max(layout.replicas, MAX_VISITS // layout.num_stages // 10)
    num_clips = min(_QUEUED_PER_RANK * layout.world_size, most)
    return forecast_layout(layout, num_clips).seconds_per_clip


def _check_size(layout: Layout, num_clips: int, *, walks_all: bool) -> None:
    clips = num_clips if walks_all else min(num_clips, 2 * -(-num_clips // layout.replicas))
    if clips * layout.num_stages > MAX_VISITS:
        raise RequestError(
            f"{num_clips} clips on {layout.world_size} ranks in replicas of {layout.replica_size} "
            "are too many to forecast",
            f"--clips {max(1, MAX_VISITS // layout.num_stages)} or fewer show the same rate",
        )


def _ways(
    layout: Layout, clips: Iterable[int], replica: int, known: dict[tuple[int, int, Cuts], Way]
) -> Iterator[Way]:
    """The ways of one replica's clips, told apart by what they differ in."""
    for clip in clips:
        kind = replica, clip // layout.replicas % layout.decoders, layout.cuts(clip)
        way = known.get(kind)
        if way is None:
            way = known[kind] = way_of(layout.route(clip), layout.costs)
        yield way


def way_of(route: Route, costs: Costs) -> Way:
    """A route's ranks, each with the seconds of the clip's work there."""
    seconds = [part.num_steps * costs.step_on(part.rank) for part in route.ranges]
    if not route.start:
        seconds[0] += costs.encode_on(route.ranges[0].rank)
    if route.decodes:
        seconds[-1] += costs.decode_on(route.ranges[-1].rank)
    return tuple(zip((part.rank for part in route.ranges), seconds, strict=True))


def walk(
    ways: Iterable[Way], transfer: Callable[[int, int], float], arrivals: Sequence[float] = ()
) -> Iterator[tuple[float, float]]:
    """Yields each clip's beginning (or pending, where there are any) and end.

    By the rules of the replay. All that a visit waits for belongs to clips before it, or to its own
    clip at the rank before: so clips can be walked one after the other. A transfer waits for its
    receive, which the target posts when it turns to the visit before this one, and for the transfer
    before it on its link; for that one its sender waits too.
    """
    free: defaultdict[int, float] = defaultdict(float)  # when the rank turned to its next visit
    before: defaultdict[int, float] = defaultdict(float)  # and to the one before that
    over: dict[tuple[int, int], float] = {}  # when the last transfer of a link was over
    for index, way in enumerate(ways):
        end = here = arrivals[index] if arrivals else 0.0
        begun = here if arrivals else free[way[0][0]]
        source = -1
        for rank, seconds in way:
            if source >= 0:
                link = source, rank
                free[source] = sent = max(end, over.get(link, 0.0))
                over[link] = here = max(sent, before[rank]) + transfer(source, rank)
            turned = free[rank]
            before[rank], free[rank] = turned, (end := max(turned, here) + seconds)
            source = rank
        yield begun, end


def poisson_arrivals(num_clips: int, per_second: float, seed: int = 0) -> list[float]:
    """When clips arrive that know nothing of each other, `per_second` of them on average."""
    gaps = random.Random(seed)
    now, times = 0.0, []
    for _ in range(num_clips):
        now += gaps.expovariate(per_second)
        times.append(now)
    return times
