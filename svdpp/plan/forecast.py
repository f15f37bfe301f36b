"""Forecast of the times of a run, by a simulation of all actions or by a faster recurrence."""

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

#: Largest number of visits that a forecast computes, which takes about two seconds. A visit is the
#: work of one rank on one clip. Further clips are assumed to finish at the same rate.
MAX_VISITS = 2**21

# The forecast of a long queue computes this many clips for each rank. They are enough for clips to
# finish at a constant rate.
_QUEUED_PER_RANK = 16
# Largest number of clips that are computed for each layout when layouts are compared.
_LARGE_SAMPLE = 65_536

#: Ranks that work on a clip, in order, each with the seconds of its work.
StageTimes = tuple[tuple[int, float], ...]


class Span(NamedTuple):
    """Start and end of one action on one rank, in seconds from the start of the run."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def clip(self) -> int:
        """Index of the clip of the span's action."""
        return self.action.clip


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast or measured times of a run, in seconds or in the unit of the costs."""

    clips: int
    """Number of clips."""
    makespan: float
    """Seconds from the start of the run to the end of its last action. The run starts with its
    first action, or with the first clip's arrival if arrivals are known."""
    first_clip: float
    """Seconds from the start of the run until the first clip is finished."""
    seconds_per_clip: float
    """Mean seconds between finished clips, over the second half of the clips.

    A clip counts as finished when all earlier clips are finished, too. If G ranks finish clips (as
    in data parallel), clips finish in groups of G. The mean then covers a whole number of groups.
    """
    jitter: float
    """Standard deviation of the seconds between finished clips, over the same clips as
    `seconds_per_clip`."""
    latency: float
    """Mean seconds from the arrival of a clip (or from its first action, if arrivals are unknown)
    until the clip is finished."""
    bubble: float
    """Idle time of all ranks, as a fraction (0 to 1) of `makespan` times the number of ranks."""
    computed_clips: int
    """Number of clips whose times were computed, at most `clips`. All later clips are assumed to
    finish at the same rate."""

    def extended(self, num_clips: int) -> Forecast:
        """Extend a forecast to more clips, which are assumed to finish at the same rate.

        Args:
            num_clips: Total number of clips, at least `clips`.
        """
        makespan = self.makespan + (num_clips - self.clips) * self.seconds_per_clip
        busy = (1 - self.bubble) * self.makespan * num_clips / self.clips
        bubble = max(0.0, 1 - busy / makespan) if makespan else 0.0
        return replace(self, clips=num_clips, makespan=makespan, bubble=bubble)

    def to_json(self) -> dict[str, float]:
        """Return a forecast's times and its bubble (the ranks' idle fraction), by JSON key."""
        return {
            "makespan_seconds": self.makespan,
            "first_clip_seconds": self.first_clip,
            "seconds_per_clip": self.seconds_per_clip,
            "bubble": self.bubble,
        }


class DeadlockError(ValueError):
    """Error for a schedule that cannot run to its end.

    Either ranks wait for each other, or the two actions of a transfer or of a shared DENOISE do not
    match, for example because they are for different clips.
    """


#: Id of a link: sender, receiver, and whether the link is only for clips that several ranks decode.
#: Such a link carries final latents and decoded frames, and no other packets.
_LinkId = tuple[int, int, bool]
#: Id of a transfer: the link, and the number of earlier transfers on the link. A DENOISE that two
#: ranks run together also has an id, because each rank waits for the other. Its number is -2 minus
#: the clip's index, so it is never the number of a transfer.
_TransferId = tuple[_LinkId, int]


class _Simulation:
    """Simulation of the action lists of all ranks.

    A transfer starts when the sender has begun its SEND, the receiver has posted its RECV, and the
    previous transfer on the link has ended. A SEND also waits for the end of the previous transfer,
    but not for the end of its own transfer. The simulation of a rank that waits for a transfer is
    paused until the end of the transfer is known.
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
        """Simulate a rank's actions; yield the id of each transfer for which the rank waits."""
        clock = 0.0
        # Ids of the transfers for which later actions wait, by (clip, sender). Several ranks can
        # send frames of one clip, so the key of a RECV_FRAMES has the sender. All other keys have
        # -1 in place of the sender.
        arrivals: dict[tuple[int, int], _TransferId] = {}
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
                link = rank, action.peer, action.part is not None
                before = link, self.begun["send", link] - 1
                if before[1] >= 0:
                    if before not in self.ends:
                        yield before
                    clock = max(clock, self.ends[before])
                self._begin("send", action, link[:2], clock)
            elif action.kind not in (Kind.FINISH, Kind.FREE):  # FINISH and FREE take no time
                if action.kind is Kind.DENOISE and action.peer >= 0:
                    first, second = sorted((rank, action.peer))
                    meeting = (first, second, False), -2 - action.clip
                    self._meet(meeting, action, clock)
                    if meeting not in self.ends:
                        yield meeting
                    clock = self.ends[meeting]
                seconds = self.costs.action_seconds(action, rank)
                if self.sizes:
                    seconds *= self.sizes[action.clip]
                start, clock = clock, clock + seconds
                self.spans.append(Span(rank, action, start, clock))
        self.current.pop(rank, None)

    def _begin(self, end: str, action: Action, ranks: tuple[int, int], at: float) -> _TransferId:
        """Record when a simulated sender or receiver begins the next transfer on a link.

        Args:
            end: End of the link at which the rank is: "send" or "recv".
            action: Action of the rank that begins.
            ranks: Sender and receiver.
            at: Time at which the rank begins.

        Returns:
            Id of the transfer: the same for the sender and the receiver.
        """
        link = *ranks, action.part is not None
        transfer = link, self.begun[end, link]
        self.begun[end, link] += 1
        self._meet(transfer, action, at)
        return transfer

    def _meet(self, transfer: _TransferId, action: Action, at: float) -> None:
        """Record when one of two simulated ranks begins a transfer or a shared DENOISE.

        If the other rank has begun before, the end of the transfer is computed and recorded, and
        ranks that wait for it are resumed. For a DENOISE, the time at which both ranks have begun
        is recorded instead.
        """
        other = self.half_open.pop(transfer, None)
        if other is None:
            self.half_open[transfer] = action, at
            return
        (source, target, _), index = transfer
        is_transfer = index >= 0
        # Fields 1 to 3 of an action are `clip`, `start` and `end`. The actions of the two ranks
        # must agree in `clip` and `start`, and for a shared DENOISE also in `end`.
        length = slice(1, 3 if is_transfer else 4)
        if other[0][length] != action[length]:
            raise DeadlockError(
                f"the actions of rank {source} and rank {target} do not match: one is "
                f"`{other[0]}`, the other is `{action}`"
            )
        self.ends[transfer] = max(other[1], at)
        if is_transfer:
            before = self.ends.get((transfer[0], index - 1), 0.0)
            seconds = self.costs.transfer(source, target)
            self.ends[transfer] = max(self.ends[transfer], before) + seconds
        self.ready += self.sleepers.pop(transfer, [])


def simulate_schedule(
    schedule: Schedule, costs: CostModel, sizes: Sequence[float] = ()
) -> list[Span]:
    """Simulate the action lists of all ranks, and return the times of the actions.

    Args:
        schedule: Action list of each rank.
        costs: Seconds of each kind of work.
        sizes: Factor for the seconds of each clip's encode, steps and decode, by the clip's index;
            transfers are not scaled. Empty: 1 for all clips.

    Returns:
        Spans in no particular order: of each ENCODE, DENOISE and DECODE, and spans of no length for
        LOAD_CHECKPOINT and RECV_FRAMES. Other actions have no span.

    Raises:
        DeadlockError: Ranks wait for each other, or a sender's action does not match the action of
            the receiver.
        RequestError: The costs lack the time of a transfer between hosts.
    """
    return _Simulation(schedule, costs, sizes).run()


#: Former name of `simulate_schedule`, kept until the next version.
replay = simulate_schedule


def summarise(spans: Iterable[Span], world_size: int) -> Forecast:
    """Compute the times of a run from the spans of its actions, which are forecast or measured.

    Args:
        spans: Spans of the actions of all ranks, in any order.
        world_size: Number of ranks.

    Raises:
        ValueError: `spans` is empty.
    """
    # The spans are sorted by their ends, so that `ends` and `finishers` keep the values of each
    # clip's last span. If several spans of a clip end at the same time, the last one to start wins.
    spans = sorted(spans, key=lambda span: (span.end, span.start))
    if not spans:
        raise ValueError("the list of spans is empty, so there are no times to compute")
    starts = {span.clip: span.start for span in sorted(spans, key=lambda each: -each.start)}
    ends = {span.clip: span.end for span in spans}
    finishers = {span.clip: span.rank for span in spans if not span.action.helps}
    return summarise_clips(
        [(starts[clip], ends[clip]) for clip in sorted(starts)],
        busy=sum(span.end - span.start for span in spans),
        world_size=world_size,
        num_finishers=len(set(finishers.values())),
    )


def summarise_clips(
    clips: Sequence[tuple[float, float]], *, busy: float, world_size: int, num_finishers: int
) -> Forecast:
    """Compute the times of a run from the start and end of each of its clips.

    Args:
        clips: Start and end of each clip in seconds, in order. The start is the start of the clip's
            first action, or the arrival of the clip.
        busy: Total seconds of work of all ranks.
        world_size: Number of ranks.
        num_finishers: Number of ranks that finish clips. Clips are counted in groups of this
            number, because these ranks may finish their clips at about the same time.
    """
    begin = min(begun for begun, _ in clips)
    in_order = [0.0, *itertools.accumulate((end - begin for _, end in clips), max)]
    makespan = in_order[-1]
    # The mean covers about the last half of the clips, as a whole number of groups and at least one
    # group.
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


# --- forecast by a recurrence, without action lists ----------------------------------------------


def forecast_layout(layout: Layout, num_clips: int) -> Forecast:
    """Forecast the times of clips in a layout, with the costs of the layout.

    The times are those of `simulate_schedule`, which takes 15 to 20 times as long to compute them.
    The speed matters because `layout="auto"` compares dozens of layouts. A visit (the work of one
    rank on one clip) takes about a microsecond to compute. If all replicas are alike, only one
    replica is computed. At most `MAX_VISITS` visits are computed; further clips are assumed to
    finish at the same rate.

    Args:
        layout: Layout with its costs.
        num_clips: Number of clips, all of which are queued at the start.

    Raises:
        RequestError: A replica has too many ranks for a forecast of this many clips, or the costs
            lack the time of a transfer between hosts.
    """
    count = min(num_clips, _most_clips(layout))
    # If `count` clips are too few to fill the pipeline, the rate of further clips would be wrong.
    if count < min(num_clips, 2 * layout.num_stages):
        raise RequestError(
            f"{num_clips} clips on {layout.world_size} ranks in replicas of {layout.replica_size} "
            "are too many to forecast",
            f"use `clips` {count} or fewer, or use replicas with fewer ranks",
            details={
                **{"clips": num_clips, "world_size": layout.world_size},
                "replica_size": layout.replica_size,
            },
        )
    return _forecast(layout, count).extended(num_clips)


def _most_clips(layout: Layout) -> int:
    """Return the largest number of clips that a forecast computes within `MAX_VISITS`.

    The result is a multiple of the number of ranks that finish clips, and at least that number.
    """
    visits = MAX_VISITS
    # If more ranks decode a clip than the one rank (or pair) that runs its last steps, `_forecast`
    # simulates the action lists, which takes up to 20 times as long for each visit.
    if layout.decode_parallel_size > layout.cfg_parallel_size:
        visits //= 20
    each = max(1, visits // layout.num_stages)
    clips = each
    if layout.replicas_are_alike and layout.data_parallel_size > 1:
        # All replicas need the same time for a clip, so replicas with the same number of clips are
        # computed only once. Some replicas may get one clip more than others, so at most two
        # replicas are computed, each with half of the visits.
        clips = each * layout.data_parallel_size // 2
    group = layout.data_parallel_size * layout.num_decoders
    return max(1, clips // group) * group


def _forecast(layout: Layout, num_clips: int) -> Forecast:
    """Forecast the times of clips in a layout by computing every clip."""
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
    return summarise_clips(
        clips,
        busy=busy,
        world_size=layout.world_size,
        num_finishers=min(layout.data_parallel_size * layout.num_decoders, num_clips),
    )


def makespan_and_latency(layout: Layout, num_clips: int) -> tuple[float, float]:
    """Return the seconds until all clips are finished, and the mean latency of a clip in seconds.

    Args:
        layout: Layout with its costs.
        num_clips: Number of clips. If there are many, only the first clips are computed, and the
            other clips are assumed to finish at the same rate.

    Raises:
        RequestError: The layout cannot be forecast; see `forecast_layout`.
    """
    many = min(_QUEUED_PER_RANK * layout.world_size, _LARGE_SAMPLE)
    sample = min(num_clips, max(2 * layout.world_size, many))
    forecast = forecast_layout(layout, sample).extended(num_clips)
    return forecast.makespan, forecast.latency


def steady_seconds_per_clip(layout: Layout) -> float:
    """Forecast a layout's mean seconds between finished clips in a long queue.

    Args:
        layout: Layout with its costs.
    """
    most = max(layout.data_parallel_size, MAX_VISITS // layout.num_stages // 10)
    num_clips = min(_QUEUED_PER_RANK * layout.world_size, most)
    return forecast_layout(layout, num_clips).seconds_per_clip


def stage_times(route: Route, costs: CostModel) -> StageTimes:
    """Return the ranks of a route, each with the seconds for which it works on the clip.

    Args:
        route: Route of one clip.
        costs: Seconds of each kind of work.

    Returns:
        Tuples (rank, seconds), in the order of the route. For a pair (two ranks that share each
        step), only the first rank is returned. For the first pair that runs steps, the seconds
        include the transfer of the packet to the second rank.
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
    """Return the seconds from a clip's last step until the last rank has all frames of the clip.

    If several ranks decode the clip, the result includes the transfer of the latent from the last
    rank to the others, and the transfer of the frames back to the last rank.
    """
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
    """Return the seconds for which devices work on a clip, summed over all ranks of its route."""
    ends = 0.0 if route.start else costs.encode_on(route.ranges[0].rank)
    ends += sum(_decode_seconds(route, costs)) if route.decodes else 0.0
    return ends + sum(_step_seconds(route, costs)) * (2 if route.paired else 1)


def clip_times(
    clips: Iterable[StageTimes], transfer: Callable[[int, int], float]
) -> Iterator[tuple[float, float]]:
    """Yield the start and end of each clip in seconds, computed from its stage times.

    Clips can be computed one after the other, because no rank waits for a later clip. A rank begins
    a clip when it has finished its previous clip and has the packet from the previous rank. A rank
    posts the receive of a clip when it begins the previous clip. A transfer starts when the sender
    has finished its work, the receive is posted, and the previous transfer on the link has ended.
    The sender can begin its next clip as soon as this previous transfer has ended; it does not wait
    for the end of the new transfer.

    Args:
        clips: Stage times of each clip, in order.
        transfer: Function that gets a sender and a receiver, and returns the seconds of a transfer
            between them.
    """
    # time at which each rank finishes its latest clip
    free: defaultdict[int, float] = defaultdict(float)
    # time at which each rank finishes the clip before its latest clip
    before: defaultdict[int, float] = defaultdict(float)
    # time at which the latest transfer on each link ends
    over: dict[tuple[int, int], float] = {}
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


# --- grid: one line for each rank, with the time from left to right -------------------------------

_IDLE = "."
_ENDS = {Kind.ENCODE: "<", Kind.DECODE: ">"}
#: Characters that stand for clips in a grid; they repeat after 62 clips.
_CLIP_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_grid(
    spans: Sequence[Span],
    world_size: int,
    *,
    width: int = 80,
    marks: Mapping[int, str] | None = None,
) -> list[str]:
    """Draw a run as text: a line for each rank, with the time from left to right.

    A column shows what the rank did for most of the column's time: a step as the character of its
    clip, an encode as `<`, a decode as `>`, idle time as `.`:

        rank 0 |000111222......|
        rank 1 |...000>111>222>|

    Args:
        spans: Spans of the actions of all ranks, forecast or measured.
        world_size: Number of ranks.
        width: Maximum number of columns. A run with fewer steps has fewer columns.
        marks: Texts for the ends of lines, by rank, such as `died here`; None: no texts.
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
    """Return the number of columns of a run's grid, at most `width`; each covers whole steps."""
    steps = (
        (span.end - span.start) / (span.action.end - span.action.start)
        for span in spans
        if span.action.kind is Kind.DENOISE and span.end > span.start
    )
    step = min(steps, default=0.0)
    # If there are no steps, or if they are extremely short, columns cannot be whole steps: the
    # result is `width`.
    whole = round(total / step) if step * 1e6 > total else width
    return max(1, whole // max(1, math.ceil(whole / width)))


def _cells(spans: Sequence[Span], begin: float, total: float, columns: int) -> str:
    """Return a rank's line of a run's grid: in each column, the character of the longest work.

    `begin` is the start of the run, and `total` is the run's duration, both in seconds.
    """
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
