"""The schedule: turns the routes of clips into one action list for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from svdpp.plan.actions import Action, FrameRange, Kind
from svdpp.plan.split import StepRange

#: The action list of each rank.
Schedule = tuple[tuple[Action, ...], ...]


class DecodeShare(NamedTuple):
    """The frames of a clip that `rank` decodes."""

    rank: int
    frames: FrameRange


@dataclass(frozen=True)
class Route:
    """The route of one clip: which rank does which steps, in order.

    Args:
        ranges: consecutive step ranges up to the last step; a rank with an empty range only
            encodes (first) or only decodes (last). A route that starts after step 0 starts from
            the latent checkpoint of an earlier run.
        paired: whether rank r + 1 does the same steps as each rank r of the route. The first rank
            of the pair encodes, decodes and finishes; the second starts from its packet.
        shares: the frames that each of several ranks decodes, the last rank's first; empty: the
            last rank decodes all.
    """

    clip: int
    ranges: tuple[StepRange, ...]
    decodes: bool = True
    paired: bool = False
    shares: tuple[DecodeShare, ...] = ()

    @property
    def start(self) -> int:
        """Steps done before the route starts; above 0 if an earlier run did them."""
        return self.ranges[0].start

    @property
    def links(self) -> set[tuple[int, int]]:
        """All pairs of ranks (from, to) between which its packets travel, also if it is resumed."""
        seconds = [part.rank + 1 for part in self.ranges if part.num_steps and self.paired]
        between = pairwise(part.rank for part in self.ranges)
        return {*between, *pairwise(seconds), *((rank - 1, rank) for rank in seconds)}

    @property
    def decode_links(self) -> set[tuple[int, int]]:
        """All pairs of ranks (from, to) between which final latents and frames travel."""
        writer = self.ranges[-1].rank
        helpers = [share.rank for share in self.shares[1:]]
        return {(writer, rank) for rank in helpers} | {(rank, writer) for rank in helpers}

    def has_latent(self, rank: int) -> bool:
        """Whether `rank` has done the last steps as the second of a pair."""
        last = self.ranges[-1]
        return self.paired and last.num_steps > 0 and rank == last.rank + 1

    def stages_after(self, rank: int) -> int:
        """The number of its ranges after that of `rank`, or of the pair; 0 if that has none."""
        units = [range(part.rank, part.rank + 1 + self.paired) for part in reversed(self.ranges)]
        return next((after for after, unit in enumerate(units) if rank in unit), 0)

    def resumed(self, at: int) -> Route:
        """The rest of the route after `at` steps, without the ranks that have no steps left.

        It starts with the rank that does step `at`. The last rank always stays, because it finishes
        the clip.
        """
        *before, last = self.ranges
        left = [part._replace(start=max(part.start, at)) for part in before if part.end > at]
        return replace(self, ranges=(*left, last._replace(start=max(last.start, at))))


@dataclass(frozen=True)
class _Visit:
    pending: Action | None
    work: tuple[Action, ...]


def build_schedule(routes: Sequence[Route], world_size: int) -> Schedule:
    """Each rank's action list: clips in the order of `routes`, each receive posted one clip ahead.

    A rank posts the receive of the next clip before it works on this one, so the transfer overlaps
    with denoising. At most two packets are in flight to a rank: the posted one, and one that its
    sender still holds. A rank that helps to decode a clip does so after its steps of the next
    clips that keep it busy until the clip has passed the ranks between. Where clips skip different
    ranks, it does so before the next clip: otherwise ranks could wait for each other in a circle.
    """
    paths: defaultdict[int, set[tuple[tuple[int, bool], ...]]] = defaultdict(set)
    for route in routes:
        path = tuple((part.rank, part.num_steps > 0) for part in route.ranges)
        paths[route.ranges[-1].rank].add(path)
    visits: list[list[_Visit]] = [[] for _ in range(world_size)]
    helps: list[list[tuple[int, _Visit]]] = [[] for _ in range(world_size)]
    for route in routes:
        for index, part in enumerate(route.ranges):
            visits[part.rank].append(_visit(route, index))
        for rank, visit in _second_visits(route):
            visits[rank].append(visit)
        for rank, visit in _decode_visits(route):
            earliest = helps[rank][-1][0] if helps[rank] else 0
            others = route.stages_after(rank) if len(paths[route.ranges[-1].rank]) == 1 else 0
            helps[rank].append((max(earliest, len(visits[rank]) + others), visit))
    merged = map(_merged, visits, helps)
    return tuple(_post_receives_ahead(rank_visits) for rank_visits in merged)


def _merged(visits: Sequence[_Visit], helps: Sequence[tuple[int, _Visit]]) -> list[_Visit]:
    """The visits of one rank, and each help behind as many visits as its number says."""
    placed = [*((after, 0, visit) for after, visit in helps)]
    placed += [(index, 1, visit) for index, visit in enumerate(visits)]
    return [visit for *_, visit in sorted(placed, key=lambda each: each[:2])]


def _visit(route: Route, index: int) -> _Visit:
    clip, part = route.clip, route.ranges[index]
    first, last = index == 0, index == len(route.ranges) - 1
    work: list[Action] = []
    if first:
        work = [Action.at(Kind.LOAD if part.start else Kind.ENCODE, clip, part.start)]
    second = part.rank + 1 if route.paired else -1
    if part.num_steps and route.paired and part.start == route.start:
        work.append(Action.at(Kind.SHARE, clip, part.start, second))
    if part.num_steps:
        work.append(Action(Kind.DENOISE, clip, part.start, part.end, second))
    if not last:
        work.append(Action.at(Kind.SEND, clip, part.end, route.ranges[index + 1].rank))
    else:
        work += [*_decode_actions(route), Action.at(Kind.FINISH, clip, part.end)]
    pending = (
        None if first else Action.at(Kind.RECV, clip, part.start, route.ranges[index - 1].rank)
    )
    return _Visit(pending, tuple(work))


def _decode_actions(route: Route) -> Iterator[Action]:
    """The last rank's decode, with what it sends to and gets from the ranks that help it."""
    clip, end = route.clip, route.ranges[-1].end
    helpers = route.shares[1:]
    for rank, frames in helpers:
        if not route.has_latent(rank):
            yield Action.at(Kind.SHARE, clip, end, rank, frames)
    if route.decodes:
        yield Action.at(Kind.DECODE, clip, end, frames=route.shares[0].frames if helpers else None)
    for rank, frames in helpers:
        yield Action.at(Kind.GATHER, clip, end, rank, frames)


def _helps(route: Route, share: DecodeShare) -> tuple[Action, ...]:
    clip, last = route.clip, route.ranges[-1]
    return (
        Action.at(Kind.DECODE, clip, last.end, frames=share.frames),
        Action.at(Kind.RETURN, clip, last.end, last.rank, share.frames),
    )


def _decode_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """The ranks that get the final latent in order to decode a share of it, each with its visit."""
    clip, last = route.clip, route.ranges[-1]
    for share in route.shares[1:]:
        if not route.has_latent(share.rank):
            receive = Action.at(Kind.RECV, clip, last.end, last.rank, share.frames)
            yield share.rank, _Visit(None, (receive, *_helps(route, share)))


def _second_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """The second ranks of the pairs, each with its visit; none where there are no steps."""
    parts = [part for part in route.ranges if part.num_steps] if route.paired else []
    for index, part in enumerate(parts):
        source = parts[index - 1].rank + 1 if index else part.rank
        ends: tuple[Action, ...] = (Action.at(Kind.DROP, route.clip, part.end),)
        for share in route.shares:
            if route.has_latent(share.rank):
                ends = _helps(route, share)
        if part is not parts[-1]:
            ends = (Action.at(Kind.SEND, route.clip, part.end, parts[index + 1].rank + 1),)
        denoise = Action(Kind.DENOISE, route.clip, part.start, part.end, part.rank)
        yield (
            part.rank + 1,
            _Visit(Action.at(Kind.RECV, route.clip, part.start, source), (denoise, *ends)),
        )


def _post_receives_ahead(visits: Sequence[_Visit]) -> tuple[Action, ...]:
    ordered: list[Action] = []
    if visits and visits[0].pending:
        ordered.append(visits[0].pending)
    for index, visit in enumerate(visits):
        upcoming = visits[index + 1].pending if index + 1 < len(visits) else None
        if upcoming:
            ordered.append(upcoming)
        ordered.extend(visit.work)
    return tuple(ordered)


def connect_rounds(links: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group links into rounds; the links of a round share no rank, so they can open concurrently.

    This is a greedy edge colouring: a pipeline of any length takes 2 rounds, and no graph takes
    more than twice the largest number of links at one rank, minus 1.
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for link in sorted(links):
        free = (index for index, ranks in enumerate(busy) if ranks.isdisjoint(link))
        index = next(free, len(rounds))
        if index == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[index].append(link)
        busy[index].update(link)
    return rounds
