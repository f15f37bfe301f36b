"""Forecast of a run: a simulation of the action lists, or a recurrence for very many clips."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.actions import SENDS, Action, Kind, Route, Schedule
from svdpp.plan.costs import CostModel
from svdpp.plan.layout import Layout
from svdpp.plan.split import Cuts

#: The most visits (one clip at one rank) that a forecast computes, which takes about two seconds.
#: Further clips continue at the rate of those before.
MAX_VISITS = 2**21

# Clips for each rank in a queue that is long enough for a constant rate.
_QUEUED_PER_RANK = 16
# The most clips that a choice between layouts computes of each.
_LARGE_SAMPLE = 65_536

#: The path of one clip: each rank that it visits, and the seconds of work there.
StageTimes = tuple[tuple[int, float], ...]


class Span(NamedTuple):
    """The time in which one rank did one action, in seconds from the start of the run."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def clip(self) -> int:
        """The action's clip."""
        return self.action.clip


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The times of a run of `clips` clips, in seconds or in the unit of the costs."""

    clips: int
    makespan: float
    """Seconds from the first action's start, or the first arrival, to the last action's end."""
    first_clip: float
    """Seconds until the first clip is finished."""
    seconds_per_clip: float
    """Mean time between finished clips, over the second half of the clips, in order.

    A clip counts as finished when all clips before it are finished too. If G ranks finish clips, as
    in data parallel, clips finish in groups of G. The mean then covers whole groups.
    """
    jitter: float
    """Standard deviation of the times between the same clips."""
    latency: float
    """Mean of a clip, from its arrival, or else its first action, to its end."""
    bubble: float
    """Fraction of the time of all ranks in which they are idle, 0 to 1."""
    computed_clips: int
    """Number of clips that were computed; the others continue at `seconds_per_clip`."""

    def extended(self, num_clips: int) -> Forecast:
        """Return the forecast of more clips, which continue at the rate of these.

        Args:
            num_clips: Number of all clips, at least `clips`.
        """
        makespan = self.makespan + (num_clips - self.clips) * self.seconds_per_clip
        busy = (1 - self.bubble) * self.makespan * num_clips / self.clips
        bubble = max(0.0, 1 - busy / makespan) if makespan else 0.0
        return replace(self, clips=num_clips, makespan=makespan, bubble=bubble)

    def to_json(self) -> dict[str, float]:
        """Return the main times in seconds, and the bubble."""
        return {
            "makespan_seconds": self.makespan,
            "first_clip_seconds": self.first_clip,
            "seconds_per_clip": self.seconds_per_clip,
            "bubble": self.bubble,
        }


class DeadlockError(ValueError):
    """Every rank with work left waits for another: the action lists cannot be performed."""


#: Sender, receiver, and whether the link is for a decode by several ranks.
_LinkId = tuple[int, int, bool]
#: A link, and the number of earlier transfers on it; below -1 for a DENOISE of the pair.
_TransferId = tuple[_LinkId, int]


class _Simulation:
    """Performs all lists at once; a rank that waits is resumed at the end of its transfer.

    A transfer starts when it is sent, its receive is posted, and the previous transfer on the link
    has ended. A SEND returns at once unless the previous transfer on its link is still running.
    """

    def __init__(self, schedule: Schedule, costs: CostModel, sizes: Sequence[float]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.sizes = sizes
        self.spans: list[Span] = []
        self.current: dict[int, Action] = {}
        self.begun: Counter[tuple[str, _LinkId]] = Counter()
        self.half_open: dict[_TransferId, tuple[Action, float]] = {}
        self.ends: dict[_TransferId, float] = {}
        self.sleepers: defaultdict[_TransferId, list[int]] = defaultdict(list)
        self.ready = list(range(len(schedule)))

    def run(self) -> list[Span]:
        ranks = [self._perform(rank) for rank in range(len(self.schedule))]
        while self.ready:
            rank = self.ready.pop()
            awaited = next(ranks[rank], None)
            if awaited is not None:
                self.sleepers[awaited].append(rank)
        if self.current:
            stuck = (f"rank {rank} at {action}" for rank, action in sorted(self.current.items()))
            raise DeadlockError(f"deadlock: {', '.join(stuck)}")
        return self.spans

    def _perform(self, rank: int) -> Iterator[_TransferId]:
        """Perform the rank's actions; yields each transfer that it has to wait for."""
        clock = 0.0
        arrivals: dict[tuple[int, int], _TransferId] = {}  # by clip, and sender of frames
        for action in self.schedule[rank]:
            self.current[rank] = action
            place = action.clip, action.peer if action.kind is Kind.RECV_FRAMES else -1
            if action.kind is Kind.RECV or (
                action.kind is Kind.RECV_FRAMES and place not in arrivals
            ):
                arrivals[place] = self._begin("recv", action, (action.peer, rank), clock)
            if action.kind is Kind.RECV:
                continue
            awaited = arrivals.get(place)
            if awaited is not None:
                if awaited not in self.ends:
                    yield awaited
                clock = max(clock, self.ends[awaited])
            if action.kind in SENDS:
                link = rank, action.peer, action.frames is not None
                before = link, self.begun["send", link] - 1
                if before[1] >= 0:
                    if before not in self.ends:
                        yield before
                    clock = max(clock, self.ends[before])
                self._begin("send", action, link[:2], clock)
            elif action.kind not in (Kind.FINISH, Kind.FREE):  # in the background, or negligible
                if action.kind is Kind.DENOISE and action.peer >= 0:
                    first, second = sorted((rank, action.peer))
                    meeting = (first, second, False), -2 - action.clip
                    self._meet(meeting, action, clock)
                    if meeting not in self.ends:
                        yield meeting
                    clock = self.ends[meeting]
                seconds = self.costs.action_seconds(action, rank)
                seconds *= self.sizes[action.clip] if self.sizes else 1.0
                start, clock = clock, clock + seconds
                self.spans.append(Span(rank, action, start, clock))
        self.current.pop(rank, None)

    def _begin(self, end: str, action: Action, ranks: tuple[int, int], at: float) -> _TransferId:
        """One end of the next transfer on the link between `ranks`."""
        link = *ranks, action.frames is not None
        transfer = link, self.begun[end, link]
        self.begun[end, link] += 1
        self._meet(transfer, action, at)
        return transfer

    def _meet(self, transfer: _TransferId, action: Action, at: float) -> None:
        """Register one end of a transfer, or of a pair's DENOISE; the second end completes it."""
        other = self.half_open.pop(transfer, None)
        if other is None:
            self.half_open[transfer] = action, at
            return
        (source, target, _), index = transfer
        is_transfer = index >= 0
        length = slice(1, 3 if is_transfer else 4)  # clip and start, of a DENOISE also its end
        if other[0][length] != action[length]:
            raise DeadlockError(f"rank {source} to {target}: {other[0]} does not match {action}")
        self.ends[transfer] = max(other[1], at)
        if is_transfer:
            before = self.ends.get((transfer[0], index - 1), 0.0)
            seconds = self.costs.transfer(source, target)
            self.ends[transfer] = max(self.ends[transfer], before) + seconds
        self.ready += self.sleepers.pop(transfer, [])


def simulate_schedule(
    schedule: Schedule, costs: CostModel, sizes: Sequence[float] = ()
) -> list[Span]:
    """Forecast when each rank does its actions, transfers excepted.

    Args:
        schedule: Action list of each rank.
        costs: Seconds of each kind of work.
        sizes: Work of each clip relative to one of the costs, by index; empty: all are equal.

    Returns:
        The spans, in no order of ranks.

    Raises:
        DeadlockError: Each rank with work left waits for another, or two ends of a transfer differ.
        RequestError: The costs lack the time of a transfer between hosts.
    """
    return _Simulation(schedule, costs, sizes).run()


#: Old name, until the next version.
replay = simulate_schedule


def summarise(spans: Iterable[Span], world_size: int) -> Forecast:
    """Sum up spans, forecast or measured.

    Args:
        spans: Work of all ranks, in any order.
        world_size: Number of ranks W.

    Raises:
        ValueError: `spans` is empty.
    """
    # A span that takes no time comes after the one at whose end it starts.
    spans = sorted(spans, key=lambda span: (span.end, span.start))
    if not spans:
        raise ValueError("no spans to sum up")
    starts = {span.clip: span.start for span in sorted(spans, key=lambda each: -each.start)}
    ends = {span.clip: span.end for span in spans}
    finishers = {span.clip: span.rank for span in spans if not span.action.helps}
    return sum_up(
        [(starts[clip], ends[clip]) for clip in sorted(starts)],
        busy=sum(span.end - span.start for span in spans),
        world_size=world_size,
        num_finishers=len(set(finishers.values())),
    )


def sum_up(
    clips: Sequence[tuple[float, float]], *, busy: float, world_size: int, num_finishers: int
) -> Forecast:
    """Sum up clips as `summarise` does spans.

    Args:
        clips: Start and end of each clip in seconds, in order; the start is that of its first
            action, or its arrival.
        busy: Seconds of work of all ranks together.
        world_size: Number of ranks W.
        num_finishers: Number of ranks that finish clips, by which clips come in groups.
    """
    begin = min(begun for begun, _ in clips)
    in_order = [0.0, *itertools.accumulate((end - begin for _, end in clips), max)]
    makespan = in_order[-1]
    # The last clips in whole groups: about half of them, at least one group.
    half = (len(clips) - len(clips) // 2) // num_finishers * num_finishers
    window = min(len(clips), max(num_finishers, half))
    gaps = [after - before for before, after in itertools.pairwise(in_order[-window - 1 :])]
    seconds_per_clip = (makespan - in_order[-window - 1]) / window
    return Forecast(
        clips=len(clips),
        makespan=makespan,
        first_clip=min(end for _, end in clips) - begin,
        seconds_per_clip=seconds_per_clip,
        jitter=math.sqrt(math.fsum((gap - seconds_per_clip) ** 2 for gap in gaps) / window),
        latency=math.fsum(end - begun for begun, end in clips) / len(clips),
        bubble=max(0.0, 1 - busy / (makespan * world_size)) if makespan else 0.0,
        computed_clips=len(clips),
    )


# --- the recurrence, without action lists --------------------------------------------------------


def forecast_layout(layout: Layout, num_clips: int) -> Forecast:
    """Forecast clips in a layout, by the costs of the layout.

    The result equals a simulation of the action lists, which takes 15 to 20 times as long: a visit
    of a clip at a rank costs about a microsecond here, and `layout="auto"` compares dozens of
    layouts. Only one replica is computed if all replicas are alike. Beyond `MAX_VISITS` the further
    clips continue at the rate of those before; see `Forecast.computed_clips`.

    Args:
        layout: The layout.
        num_clips: Number of clips, all there from the start.

    Raises:
        RequestError: The pipeline is so long that its rate would take minutes to compute, or the
            costs lack the time of a transfer between hosts.
    """
    count = min(num_clips, _most_clips(layout))
    if count < min(num_clips, 2 * layout.num_stages):  # the ranks are not even all busy by then
        raise RequestError(
            f"{num_clips} clips on {layout.world_size} ranks in replicas of {layout.replica_size} "
            "are too many to forecast",
            f"use `clips` {count} or fewer, or replicas with fewer ranks",
            details={
                **{"clips": num_clips, "world_size": layout.world_size},
                "replica_size": layout.replica_size,
            },
        )
    return _forecast(layout, count).extended(num_clips)


def _most_clips(layout: Layout) -> int:
    """Return the number of clips that `MAX_VISITS` visits suffice for, in whole groups."""
    visits = MAX_VISITS
    if layout.decode_parallel_size > layout.cfg_parallel_size:  # simulated by its action lists
        visits //= 20
    each = max(1, visits // layout.num_stages)
    clips = each
    if layout.replicas_are_alike and layout.data_parallel_size > 1:
        # One of them is computed, or two if one has a clip more.
        clips = each * layout.data_parallel_size // 2
    group = layout.data_parallel_size * layout.num_decoders
    return max(1, clips // group) * group


def _forecast(layout: Layout, num_clips: int) -> Forecast:
    """Forecast all of the clips, however many they are."""
    if layout.decode_parallel_size > layout.cfg_parallel_size:
        return summarise(
            simulate_schedule(layout.schedule(num_clips), layout.costs), layout.world_size
        )
    alike = layout.replicas_are_alike
    known: dict[tuple[int, int, Cuts], tuple[StageTimes, float]] = {}

    def stage_times_and_work(clip: int) -> tuple[StageTimes, float]:
        kind = (
            clip % layout.data_parallel_size,
            clip // layout.data_parallel_size % layout.num_decoders,
            layout.cuts(clip),
        )
        if kind not in known:
            route = layout.route(clip)
            known[kind] = stage_times(route, layout.costs), _busy(route, layout.costs)
        return known[kind]

    clips = [(0.0, 0.0)] * num_clips
    times: list[tuple[float, float]] = []
    busy = seconds = 0.0
    for replica in range(min(layout.data_parallel_size, num_clips)):
        own = range(replica, num_clips, layout.data_parallel_size)
        if not alike or len(own) != len(times):
            pairs = [stage_times_and_work(clip) for clip in own]
            seconds = sum(work for _, work in pairs)
            times = list(clip_times((times for times, _ in pairs), layout.costs.transfer))
        clips[replica :: layout.data_parallel_size] = times
        busy += seconds
    return sum_up(
        clips,
        busy=busy,
        world_size=layout.world_size,
        num_finishers=min(layout.data_parallel_size * layout.num_decoders, num_clips),
    )


def makespan_and_latency(layout: Layout, num_clips: int) -> tuple[float, float]:
    """Return the seconds until all clips are finished, and the mean of one clip from its start.

    Args:
        layout: The layout, with its costs.
        num_clips: Number of clips. Beyond a sample the time per clip counts as constant.

    Raises:
        RequestError: As for `forecast_layout`.
    """
    many = min(_QUEUED_PER_RANK * layout.world_size, _LARGE_SAMPLE)
    sample = min(num_clips, max(2 * layout.world_size, many))
    forecast = forecast_layout(layout, sample).extended(num_clips)
    return forecast.makespan, forecast.latency


def steady_seconds_per_clip(layout: Layout) -> float:
    """Return the mean seconds between finished clips in a queue whose ends matter little.

    Args:
        layout: The layout, with its costs.
    """
    most = max(layout.data_parallel_size, MAX_VISITS // layout.num_stages // 10)
    num_clips = min(_QUEUED_PER_RANK * layout.world_size, most)
    return forecast_layout(layout, num_clips).seconds_per_clip


def stage_times(route: Route, costs: CostModel) -> StageTimes:
    """Return the ranks of a route, each with the seconds of its work on the clip.

    Args:
        route: Route of one clip.
        costs: Seconds of each kind of work.

    Returns:
        Pairs (rank, seconds), in order. A pair of ranks is its first one, which before its steps
        waits until the second has the packet.
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


def _seconds_to_decode(route: Route, costs: CostModel) -> float:
    """Time when the last rank has all frames; it gathers them from one rank after the other."""
    writer = route.ranges[-1].rank
    gathered, *others = _decode_seconds(route, costs)
    for (rank, _), seconds in zip(route.shares[1:], others, strict=True):
        sent = 0.0 if route.has_latent(rank) else costs.transfer(writer, rank)
        gathered = max(gathered, sent + seconds) + costs.transfer(rank, writer)
    return gathered


def _decode_seconds(route: Route, costs: CostModel) -> list[float]:
    shares = [costs.decode_on(rank) * frames.fraction for rank, frames in route.shares]
    return shares or [costs.decode_on(route.ranges[-1].rank)]


def _step_seconds(route: Route, costs: CostModel) -> list[float]:
    ranks = [part.rank for part in route.ranges]
    steps = [costs.step_on(rank, rank + 1 if route.paired else -1) for rank in ranks]
    return [part.num_steps * step for part, step in zip(route.ranges, steps, strict=True)]


def _busy(route: Route, costs: CostModel) -> float:
    ends = 0.0 if route.start else costs.encode_on(route.ranges[0].rank)
    ends += sum(_decode_seconds(route, costs)) if route.decodes else 0.0
    return ends + sum(_step_seconds(route, costs)) * (2 if route.paired else 1)


def clip_times(
    clips: Iterable[StageTimes], transfer: Callable[[int, int], float]
) -> Iterator[tuple[float, float]]:
    """Yield the start and end of each clip, in seconds.

    A visit waits only for earlier clips, or for its own clip at the previous rank, so clips can be
    computed one after the other. A transfer waits for its receive, which the target posts at the
    start of the visit before this one, and for the previous transfer on its link, as its sender
    does.

    Args:
        clips: Stage times of each clip, in order.
        transfer: Seconds of a transfer, by sender and receiver.
    """
    free: defaultdict[int, float] = defaultdict(float)  # when the rank is free for its next visit
    before: defaultdict[int, float] = defaultdict(float)  # and for the visit before that
    over: dict[tuple[int, int], float] = {}  # when the last transfer on a link ended
    for clip in clips:
        end = here = 0.0
        begun, source = free[clip[0][0]], -1
        for rank, seconds in clip:
            if source >= 0:
                link = source, rank
                free[source] = sent = max(end, over.get(link, 0.0))
                over[link] = here = max(sent, before[rank]) + transfer(source, rank)
            turned = free[rank]
            before[rank], free[rank] = turned, (end := max(turned, here) + seconds)
            source = rank
        yield begun, end


# --- the grid: a line for each rank, time from left to right -------------------------------------

_IDLE = "."
_ENDS = {Kind.ENCODE: "<", Kind.DECODE: ">"}
#: Signs of the clips, which repeat after 62.
_CLIP_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_grid(
    spans: Sequence[Span],
    world_size: int,
    *,
    width: int = 80,
    marks: Mapping[int, str] | None = None,
) -> list[str]:
    """Return one line for each rank; each column shows what the rank did for most of its time.

    A step shows the clip's sign, encode `<`, decode `>`, idle `.`:

        rank 0 |000111222......|
        rank 1 |...000>111>222>|

    Args:
        spans: Work of all ranks, forecast or measured.
        world_size: Number of ranks W.
        width: Most columns; fewer are drawn if the run is shorter than that many steps.
        marks: Remarks behind the lines of ranks, such as `died here`.
    """
    begin = min((span.start for span in spans), default=0.0)
    total = max((span.end for span in spans), default=0.0) - begin
    columns = _num_columns(spans, total, width)
    digits = len(str(world_size - 1))
    lines = []
    for rank in range(world_size):
        row = _cells([span for span in spans if span.rank == rank], begin, total, columns)
        mark = f"  <-- {marks[rank]}" if marks and rank in marks else ""
        lines.append(f"rank {rank:>{digits}} |{row}|{mark}")
    return lines


def _num_columns(spans: Sequence[Span], total: float, width: int) -> int:
    """A column for each step, or for each two, three and so on, so that `width` is enough."""
    steps = (
        (span.end - span.start) / (span.action.end - span.action.start)
        for span in spans
        if span.action.kind is Kind.DENOISE and span.end > span.start
    )
    step = min(steps, default=0.0)
    # A step can be negligible compared with a decode.
    whole = round(total / step) if step * 1e6 > total else width
    return max(1, whole // max(1, math.ceil(whole / width)))


def _cells(spans: Sequence[Span], begin: float, total: float, columns: int) -> str:
    if not total:
        return _IDLE * columns
    column = total / columns
    share = [{_IDLE: 0.0} for _ in range(columns)]
    for span in spans:
        low, high = (span.start - begin) / column, (span.end - begin) / column
        sign = _ENDS.get(span.action.kind, _CLIP_SIGNS[span.clip % len(_CLIP_SIGNS)])
        for index in range(max(0, int(low)), min(columns, int(high) + 1)):
            covered = min(high, index + 1) - max(low, index)
            share[index][sign] = share[index].get(sign, 0.0) + max(covered, 0.0)
    for cell in share:
        cell[_IDLE] = 1.0 - sum(cell.values())
    return "".join(max(cell, key=lambda sign: round(cell[sign], 9)) for cell in share)
