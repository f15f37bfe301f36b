"""The forecast: replays action lists against costs without processes, and sums them up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
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


class DeadlockError(ValueError):
    """Every rank with work left waits for another: the action lists cannot be performed."""


#: From rank, to rank, whether it is for a decode by several ranks.
Link = tuple[int, int, bool]
#: A link, and the number of earlier transfers on it; below 0 for a DENOISE of the pair.
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
        self.clock = [0.0] * len(schedule)
        self.next_action = [0] * len(schedule)
        self.sends_begun: dict[Link, int] = {}
        self.receives_posted: dict[Link, int] = {}
        self.half_open: dict[Transfer, tuple[Action, float]] = {}
        self.transfer_ends: dict[Transfer, float] = {}
        # A rank and a clip, and the sender of frames -> the transfer that carries it.
        self.arrivals: dict[tuple[int, ...], Transfer] = {}
        self.sleepers: dict[Transfer, list[int]] = {}

    def run(self) -> list[Span]:
        ready = list(range(len(self.schedule)))
        while ready:
            rank = ready.pop()
            while self.next_action[rank] < len(self.schedule[rank]):
                awaited = self._perform(rank, self.schedule[rank][self.next_action[rank]], ready)
                if awaited is not None:
                    self.sleepers.setdefault(awaited, []).append(rank)
                    break
                self.next_action[rank] += 1
        self._check_all_done()
        return self.spans

    def _perform(self, rank: int, action: Action, ready: list[int]) -> Transfer | None:
        """Perform the action, or return the transfer that it has to wait for."""
        place: tuple[int, ...] = rank, action.clip
        if action.kind is Kind.GATHER:
            place = *place, action.peer
        if action.kind is Kind.RECV or (action.kind is Kind.GATHER and place not in self.arrivals):
            link = action.peer, rank, action.frames is not None
            transfer = self.arrivals[place] = self._next_transfer(self.receives_posted, link)
            self._meet(transfer, action, self.clock[rank], ready)
        if action.kind is Kind.RECV:
            return None
        pending = self.arrivals.get(place)
        if pending is not None:
            if pending not in self.transfer_ends:
                return pending
            self.clock[rank] = max(self.clock[rank], self.transfer_ends[pending])
        if action.kind in SENDS:
            return self._send(rank, action, ready)
        if action.kind in (Kind.FINISH, Kind.DROP):
            return None  # in the background, or of negligible duration
        if action.kind is Kind.DENOISE and action.peer >= 0:
            pair = min(rank, action.peer), max(rank, action.peer), False
            meeting = pair, -1 - action.clip
            if meeting not in self.transfer_ends and not self._joined(meeting, rank, action, ready):
                return meeting
            self.clock[rank] = self.transfer_ends[meeting]
        start = self.clock[rank]
        self.clock[rank] = start + self.costs.of(action, rank)
        self.spans.append(Span(rank, action, start, self.clock[rank]))
        return None

    def _send(self, rank: int, action: Action, ready: list[int]) -> Transfer | None:
        link = rank, action.peer, action.frames is not None
        before = link, self.sends_begun.get(link, 0) - 1
        if before[1] >= 0:
            if before not in self.transfer_ends:
                return before
            self.clock[rank] = max(self.clock[rank], self.transfer_ends[before])
        transfer = self._next_transfer(self.sends_begun, link)
        self._meet(transfer, action, self.clock[rank], ready)
        return None

    def _joined(self, meeting: Transfer, rank: int, action: Action, ready: list[int]) -> bool:
        """Register a half of a pair's DENOISE; whether both are there, so that it begins."""
        other = self.half_open.pop(meeting, None)
        if other is None:
            self.half_open[meeting] = action, self.clock[rank]
            return False
        if other[0][:4] != action[:4]:
            raise DeadlockError(f"ranks {meeting[0][:2]}: {other[0]} does not match {action}")
        self.transfer_ends[meeting] = max(other[1], self.clock[rank])
        ready.extend(self.sleepers.pop(meeting, []))
        return True

    @staticmethod
    def _next_transfer(counts: dict[Link, int], link: Link) -> Transfer:
        index = counts.get(link, 0)
        counts[link] = index + 1
        return link, index

    def _meet(self, transfer: Transfer, action: Action, at: float, ready: list[int]) -> None:
        """Register one end of a transfer; the second end completes it."""
        other = self.half_open.pop(transfer, None)
        if other is None:
            self.half_open[transfer] = action, at
            return
        link, index = transfer
        if (other[0].clip, other[0].start) != (action.clip, action.start):
            raise DeadlockError(f"rank {link[0]} to {link[1]}: {other[0]} does not match {action}")
        before = self.transfer_ends.get((link, index - 1), 0.0)
        seconds = self.costs.transfer(link[0], link[1])
        self.transfer_ends[transfer] = max(other[1], at, before) + seconds
        ready.extend(self.sleepers.pop(transfer, []))

    def _check_all_done(self) -> None:
        stuck = [
            f"rank {rank} at {actions[self.next_action[rank]]}"
            for rank, actions in enumerate(self.schedule)
            if self.next_action[rank] < len(actions)
        ]
        if stuck:
            raise DeadlockError(f"deadlock: {', '.join(stuck)}")


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
