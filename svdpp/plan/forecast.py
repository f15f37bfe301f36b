"""What ranks do when: the replay of action lists against costs, its sums, and a grid in text."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from svdpp.plan.actions import SENDS, Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.schedule import Schedule


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


class Latency(NamedTuple):
    """Latency of clips in seconds, each from its arrival, or else its first action, to its end."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The times of a run of `clips` clips, in seconds or in the unit of the costs."""

    clips: int
    makespan: float
    """From the start of the first action, or the first arrival, to the end of the last action."""
    first_clip: float
    """Until the first clip is finished."""
    seconds_per_clip: float
    """Mean time between finished clips, over the second half of the clips, in order.

    A clip counts as finished when all clips before it are finished too. If G ranks finish clips, as
    in data parallel, clips finish in groups of G. The mean then covers whole groups, so that it
    does not depend on the place of the half within a group.
    """
    jitter: float
    """Standard deviation of the times between the same clips."""
    latency: Latency
    bubble: float
    """Fraction of the time of all ranks in which they are idle, 0 to 1."""

    def to_json(self) -> dict[str, float]:
        """Its main times, and the bubble."""
        return {
            "makespan_seconds": self.makespan,
            "first_clip_seconds": self.first_clip,
            "seconds_per_clip": self.seconds_per_clip,
            "bubble": self.bubble,
        }


class DeadlockError(ValueError):
    """Every rank with work left waits for another: the action lists cannot be performed."""


#: From rank, to rank, whether it is for a decode by several ranks.
Link = tuple[int, int, bool]
#: A link, and the number of earlier transfers on it; below -1 for a DENOISE of the pair.
Transfer = tuple[Link, int]


class _Replay:
    """Performs all lists at once; a rank that waits is resumed at the end of its transfer.

    A transfer starts when it is sent, its receive is posted, and the previous transfer on the link
    has ended. A SEND returns at once unless the previous transfer on its link is still running: a
    rank never holds more than one unsent packet for each neighbour.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.spans: list[Span] = []
        self.current: dict[int, Action] = {}
        self.begun: Counter[tuple[str, Link]] = Counter()
        self.half_open: dict[Transfer, tuple[Action, float]] = {}
        self.ends: dict[Transfer, float] = {}
        self.sleepers: defaultdict[Transfer, list[int]] = defaultdict(list)
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

    def _perform(self, rank: int) -> Iterator[Transfer]:
        """Perform the rank's actions; yields each transfer that it has to wait for."""
        clock = 0.0
        arrivals: dict[tuple[int, int], Transfer] = {}  # by clip, and sender of frames
        for action in self.schedule[rank]:
            self.current[rank] = action
            place = action.clip, action.peer if action.kind is Kind.GATHER else -1
            if action.kind is Kind.RECV or (action.kind is Kind.GATHER and place not in arrivals):
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
            elif action.kind not in (Kind.FINISH, Kind.DROP):  # in the background, or negligible
                if action.kind is Kind.DENOISE and action.peer >= 0:
                    first, second = sorted((rank, action.peer))
                    meeting = (first, second, False), -2 - action.clip
                    self._meet(meeting, action, clock)
                    if meeting not in self.ends:
                        yield meeting
                    clock = self.ends[meeting]
                start, clock = clock, clock + self.costs.of(action, rank)
                self.spans.append(Span(rank, action, start, clock))
        self.current.pop(rank, None)

    def _begin(self, end: str, action: Action, ranks: tuple[int, int], at: float) -> Transfer:
        """Register one end of the next transfer on the link between `ranks`."""
        link = *ranks, action.frames is not None
        transfer = link, self.begun[end, link]
        self.begun[end, link] += 1
        self._meet(transfer, action, at)
        return transfer

    def _meet(self, transfer: Transfer, action: Action, at: float) -> None:
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


def replay(schedule: Schedule, costs: Costs) -> list[Span]:
    """Forecast when each rank does its actions but transfers, in no order of ranks."""
    return _Replay(schedule, costs).run()


def summarise(spans: Iterable[Span], world_size: int) -> Forecast:
    """Sum up spans, forecast or measured."""
    spans = list(spans)
    if not spans:
        raise ValueError("no spans to sum up")
    first: dict[int, Span] = {}
    last: dict[int, Span] = {}
    finishers: dict[int, Span] = {}
    for span in spans:
        clip = span.action.clip
        first[clip] = min(first.get(clip, span), span, key=lambda each: each.start)
        last[clip] = max(last.get(clip, span), span, key=_end)
        if not span.action.helps:
            finishers[clip] = max(finishers.get(clip, span), span, key=_end)
    return sum_up(
        [(first[clip].start, last[clip].end) for clip in sorted(first)],
        busy=sum(span.end - span.start for span in spans),
        world_size=world_size,
        num_finishers=len({span.rank for span in finishers.values()}),
    )


def _end(span: Span) -> tuple[float, float]:
    """When it ends; a span that takes no time comes after the one at whose end it starts."""
    return span.end, span.start


def sum_up(
    clips: Sequence[tuple[float, float]], *, busy: float, world_size: int, num_finishers: int
) -> Forecast:
    """As `summarise`, from the start and end of each clip.

    Args:
        clips: (first action or arrival, end) of each clip, in order; at least one.
    """
    begin = min(begun for begun, _ in clips)
    in_order = [0.0, *itertools.accumulate((end - begin for _, end in clips), max)]
    makespan = in_order[-1]
    window = _last_whole_groups(len(clips), num_finishers)
    gaps = [after - before for before, after in itertools.pairwise(in_order[-window - 1 :])]
    seconds_per_clip = (makespan - in_order[-window - 1]) / window
    return Forecast(
        clips=len(clips),
        makespan=makespan,
        first_clip=min(end for _, end in clips) - begin,
        seconds_per_clip=seconds_per_clip,
        jitter=math.sqrt(math.fsum((gap - seconds_per_clip) ** 2 for gap in gaps) / window),
        latency=_latency([end - begun for begun, end in clips]),
        bubble=max(0.0, 1 - busy / (makespan * world_size)) if makespan else 0.0,
    )


def _last_whole_groups(num_clips: int, group: int) -> int:
    """The last clips in whole groups: about half of all clips, at least one group.

    All clips if they fit in one group.
    """
    if num_clips <= group:
        return num_clips
    return max(group, (num_clips - num_clips // 2) // group * group)


def _latency(seconds: Sequence[float]) -> Latency:
    ordered = sorted(seconds)
    mean = math.fsum(ordered) / len(ordered)
    return Latency(mean, *(percentile(ordered, percent) for percent in (50, 90, 99)))


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values do not exceed; 0 if empty."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else 0.0


# --- the grid: a line for each rank, time from left to right -------------------------------------

IDLE = "."
ENCODING = "<"
DECODING = ">"
_CLIP_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def clip_sign(clip: int) -> str:
    """The character of a clip; the characters repeat after 62 clips."""
    return _CLIP_SIGNS[clip % len(_CLIP_SIGNS)]


def draw_grid(
    spans: Sequence[Span],
    world_size: int,
    *,
    width: int = 80,
    marks: Mapping[int, str] | None = None,
) -> list[str]:
    """Draw one line for each rank; each column shows what the rank did for most of its time.

    Fewer than `width` columns are drawn if the run is shorter than that many steps. `marks` are
    remarks behind the lines of ranks, such as `died here`.

    Returns:
        The lines, without line ends. A step shows the clip's sign, encode `<`, decode `>`, idle
        `.`.
    """
    begin = min((span.start for span in spans), default=0.0)
    total = max((span.end for span in spans), default=0.0) - begin
    columns = _num_columns(spans, total, width)
    cells = [
        _cells([s for s in spans if s.rank == rank], begin, total, columns)
        for rank in range(world_size)
    ]
    digits = len(str(world_size - 1))
    lines = []
    for rank, row in enumerate(cells):
        mark = f"  <-- {marks[rank]}" if marks and rank in marks else ""
        lines.append(f"rank {rank:>{digits}} |{row}|{mark}")
    return lines


def _num_columns(spans: Sequence[Span], total: float, width: int) -> int:
    """A column for each step, or for each two, three and so on, so that `width` is enough."""
    step = min(
        (
            (span.end - span.start) / (span.action.end - span.action.start)
            for span in spans
            if span.action.kind is Kind.DENOISE and span.end > span.start
        ),
        default=0.0,
    )
    # A step can be negligible compared with a decode.
    whole = round(total / step) if step * 1e6 > total else width
    steps_a_column = max(1, math.ceil(whole / width))
    return max(1, whole // steps_a_column)


def _cells(spans: Sequence[Span], begin: float, total: float, columns: int) -> str:
    if not total:
        return IDLE * columns
    column = total / columns
    share = [{IDLE: 0.0} for _ in range(columns)]
    for span in spans:
        low, high = (span.start - begin) / column, (span.end - begin) / column
        for index in range(max(0, int(low)), min(columns, int(high) + 1)):
            covered = min(high, index + 1) - max(low, index)
            share[index][_sign(span)] = share[index].get(_sign(span), 0.0) + max(covered, 0.0)
    for cell in share:
        cell[IDLE] = 1.0 - sum(cell.values())
    return "".join(max(cell, key=lambda sign: round(cell[sign], 9)) for cell in share)


def _sign(span: Span) -> str:
    if span.action.kind is Kind.ENCODE:
        return ENCODING
    if span.action.kind is Kind.DECODE:
        return DECODING
    return clip_sign(span.action.clip)
