"""The forecast by recurrence, without action lists, for thousands of ranks and clips."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, replay, sum_up, summarise
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route
from svdpp.plan.split import Cuts

#: The most visits (one clip at one rank) in a forecast; that many take a few seconds.
MAX_VISITS = 5_000_000

# Clips for each rank in a queue that is long enough for a constant rate.
_QUEUED_PER_RANK = 16
# A makespan is forecast for this many clips for each rank, at most `_LARGE_SAMPLE` in all, and
# extrapolated at a constant time per clip.
_SAMPLE_PER_RANK = 16
_LARGE_SAMPLE = 65_536

#: The path of one clip: each rank that it visits, and the seconds of work there.
Way = tuple[tuple[int, float], ...]


def forecast_layout(layout: Layout, num_clips: int) -> Forecast:
    """Forecast `num_clips` clips in `layout` with the costs of the layout.

    The result equals a replay of the action lists. It takes about a microsecond for each visit of a
    clip at a rank, and computes one replica only if all replicas are alike.
    """
    if layout.decode_ranks > layout.cfg_parallel:
        return summarise(replay(layout.schedule(num_clips), layout.costs), layout.world_size)
    alike = layout.replicas_are_alike
    _check_size(layout, num_clips, all_replicas=not alike)
    known: dict[tuple[int, int, Cuts], tuple[Way, float]] = {}
    clips = [(0.0, 0.0)] * num_clips
    times: list[tuple[float, float]] = []
    busy = 0.0
    for replica in range(min(layout.replicas, num_clips)):
        own = range(replica, num_clips, layout.replicas)
        if not alike or len(own) != len(times):
            pairs = list(_ways(layout, own, 0 if alike else replica, known))
            ways, seconds = [way for way, _ in pairs], sum(work for _, work in pairs)
            times = list(clip_times(ways, layout.costs.transfer))
        clips[replica :: layout.replicas] = times
        busy += seconds
    return sum_up(
        clips,
        busy=busy,
        world_size=layout.world_size,
        num_finishers=min(layout.replicas * layout.decoders, num_clips),
    )


def makespan_and_latency(layout: Layout, num_clips: int) -> tuple[float, float]:
    """Seconds until all clips are finished, and the mean of one clip from its start.

    Beyond a sample the time per clip is constant.
    """
    world_size = layout.world_size
    sample = max(2 * world_size, min(_SAMPLE_PER_RANK * world_size, _LARGE_SAMPLE))
    sample = min(num_clips, sample)
    forecast = forecast_layout(layout, sample)
    more = (num_clips - sample) * forecast.seconds_per_clip
    return forecast.makespan + more, forecast.latency.mean


def steady_seconds_per_clip(layout: Layout) -> float:
    """Mean time between finished clips in a queue so long that its ends matter little."""
    most = max(layout.replicas, MAX_VISITS // layout.num_stages // 10)
    num_clips = min(_QUEUED_PER_RANK * layout.world_size, most)
    return forecast_layout(layout, num_clips).seconds_per_clip


def _check_size(layout: Layout, num_clips: int, *, all_replicas: bool) -> None:
    clips = num_clips if all_replicas else min(num_clips, 2 * -(-num_clips // layout.replicas))
    if clips * layout.num_stages > MAX_VISITS:
        raise RequestError(
            f"{num_clips} clips on {layout.world_size} ranks in replicas of {layout.replica_size} "
            "are too many to forecast",
            f"use --clips {max(1, MAX_VISITS // layout.num_stages)} or fewer: the rate is the same",
        )


def _ways(
    layout: Layout,
    clips: Iterable[int],
    replica: int,
    known: dict[tuple[int, int, Cuts], tuple[Way, float]],
) -> Iterator[tuple[Way, float]]:
    """The path and the work of all ranks for each clip of one replica; equal ones computed once."""
    for clip in clips:
        kind = replica, clip // layout.replicas % layout.decoders, layout.cuts(clip)
        way = known.get(kind)
        if way is None:
            route = layout.route(clip)
            way = known[kind] = way_of(route, layout.costs), _busy(route, layout.costs)
        yield way


def way_of(route: Route, costs: Costs) -> Way:
    """The ranks of a route, each with the seconds of work on the clip.

    Of a pair it is the first rank; before its steps it waits until the second has the packet.
    """
    seconds = _step_seconds(route, costs)
    if not route.start:
        seconds[0] += costs.encode_on(route.ranges[0].rank)
    if route.decodes:
        seconds[-1] += _seconds_to_decode(route, costs)
    ranks = [part.rank for part in route.ranges]
    first = next((at for at, part in enumerate(route.ranges) if part.num_steps), None)
    if route.paired and first is not None:
        seconds[first] += costs.transfer(ranks[first], ranks[first] + 1)
    return tuple(zip(ranks, seconds, strict=True))


def _seconds_to_decode(route: Route, costs: Costs) -> float:
    """Until the last rank has all frames; it gathers them from one rank after the other."""
    writer = route.ranges[-1].rank
    gathered, *others = _decode_seconds(route, costs)
    for (rank, _), seconds in zip(route.shares[1:], others, strict=True):
        sent = 0.0 if route.has_latent(rank) else costs.transfer(writer, rank)
        gathered = max(gathered, sent + seconds) + costs.transfer(rank, writer)
    return gathered


def _decode_seconds(route: Route, costs: Costs) -> list[float]:
    shares = [costs.decode_on(rank) * frames.fraction for rank, frames in route.shares]
    return shares or [costs.decode_on(route.ranges[-1].rank)]


def _step_seconds(route: Route, costs: Costs) -> list[float]:
    if not route.paired:
        return [part.num_steps * costs.step_on(part.rank) for part in route.ranges]
    return [part.num_steps * costs.pair_step(part.rank, part.rank + 1) for part in route.ranges]


def _busy(route: Route, costs: Costs) -> float:
    ends = 0.0 if route.start else costs.encode_on(route.ranges[0].rank)
    ends += sum(_decode_seconds(route, costs)) if route.decodes else 0.0
    return ends + sum(_step_seconds(route, costs)) * (2 if route.paired else 1)


def clip_times(
    ways: Iterable[Way], transfer: Callable[[int, int], float]
) -> Iterator[tuple[float, float]]:
    """Yield the start and end of each clip.

    The rules are those of the replay. A visit waits only for earlier clips, or for its own clip at
    the previous rank, so clips can be computed one after the other. A transfer waits for its
    receive, which the target posts at the start of the visit before this one, and for the previous
    transfer on its link. The sender waits for that transfer too.
    """
    free: defaultdict[int, float] = defaultdict(float)  # when the rank is free for its next visit
    before: defaultdict[int, float] = defaultdict(float)  # and for the visit before that
    over: dict[tuple[int, int], float] = {}  # when the last transfer on a link ended
    for way in ways:
        end = here = 0.0
        begun, source = free[way[0][0]], -1
        for rank, seconds in way:
            if source >= 0:
                link = source, rank
                free[source] = sent = max(end, over.get(link, 0.0))
                over[link] = here = max(sent, before[rank]) + transfer(source, rank)
            turned = free[rank]
            before[rank], free[rank] = turned, (end := max(turned, here) + seconds)
            source = rank
        yield begun, end
