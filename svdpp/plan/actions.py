"""Actions of ranks, routes of clips, and the schedule: the list of actions of each rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from svdpp.plan.split import StepRange


class Kind(StrEnum):
    """Kind of an action."""

    ENCODE = "ENCODE"  # read the clip's image, encode it, draw its noise: the latent before step 0
    LOAD_CHECKPOINT = "LOAD_CHECKPOINT"  # read the latent that an earlier run kept at `start`
    RECV = "RECV"  # post the receive of the packet; the action that uses the latent waits for it
    DENOISE = "DENOISE"  # run steps `start` to `end` (exclusive) of the clip
    SHARE = "SHARE"  # send the clip's packet to `peer`, the other rank of the pair, and go on
    SEND = "SEND"  # send the clip's packet to `peer` in the background
    FREE = "FREE"  # free the clip: the other rank of the pair has its latent and finishes it
    DECODE = "DECODE"  # turn the final latent, or the part that `frames` names, into frames
    SEND_FRAMES = "SEND_FRAMES"  # send the decoded frames to `peer`, then free the clip
    RECV_FRAMES = "RECV_FRAMES"  # wait for the frames that `peer` decodes
    FINISH = "FINISH"  # hash the result, write it in the background, report the clip as finished


class FrameRange(NamedTuple):
    """Range of a clip's frames: `first` to `end` (exclusive), of `total`."""

    first: int
    end: int
    total: int

    @property
    def fraction(self) -> float:
        """Fraction of the clip's frames, 0 to 1."""
        return (self.end - self.first) / self.total


class Action(NamedTuple):
    """Work of a rank for one clip: an entry of its action list."""

    kind: Kind
    clip: int
    """Index of the clip in the pipeline, from 0."""
    start: int
    """Number of the clip's steps that are done before the action."""
    end: int
    """Number of the clip's steps that are done after the action; equal to `start` except for a
    DENOISE."""
    peer: int = -1
    """Other rank of a transfer, or for a DENOISE the other rank of the pair; -1: none."""
    frames: FrameRange | None = None
    """Frames that the action decodes or transfers, or for whose decode it sends the latent; None:
    all."""

    def __str__(self) -> str:
        has_range = self.kind is Kind.DENOISE
        place = f"{self.start}:{self.end}" if has_range else f"@{self.start}"
        arrow = f" {_ARROWS[self.kind]}{self.peer}" if self.peer >= 0 else ""
        frames = " {}:{}/{}".format(*self.frames) if self.frames else ""
        return f"{self.kind} c{self.clip} {place}{arrow}{frames}"

    @staticmethod
    def at(
        kind: Kind, clip: int, step: int, peer: int = -1, frames: FrameRange | None = None
    ) -> Action:
        """Return an action that does no steps.

        Args:
            kind: Any kind but DENOISE.
            clip: Index of the clip.
            step: Number of the clip's steps that are done.
            peer: Other rank of a transfer; -1: none.
            frames: Frames that the action decodes or transfers; None: all.
        """
        return Action(kind, clip, step, step, peer, frames)

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the output of `str()`.

        Args:
            text: Text such as `DENOISE c3 7:14` or `SEND c3 @14 >2`.

        Raises:
            ValueError: The text is not of this form.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}")
        kind, clip, start, end, peer, *frames = match.groups()
        return Action(
            Kind(kind),
            int(clip),
            int(start),
            int(end or start),
            int(peer or -1),
            FrameRange(*map(int, frames)) if frames[0] else None,
        )

    @property
    def is_compute(self) -> bool:
        """Whether the action keeps the rank's device busy."""
        return self.kind in (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)

    @property
    def fraction(self) -> float:
        """Fraction of the clip's frames that a DECODE makes; 1 for other actions."""
        return 1.0 if self.frames is None else self.frames.fraction

    @property
    def helps(self) -> bool:
        """Whether the action decodes frames for another rank, which finishes the clip."""
        return self.kind is Kind.DECODE and self.frames is not None and self.frames.first > 0


#: Actions that send a packet.
SENDS = (Kind.SEND, Kind.SHARE, Kind.SEND_FRAMES)

_ARROWS = {Kind.RECV: "<", Kind.RECV_FRAMES: "<", **dict.fromkeys(SENDS, ">"), Kind.DENOISE: "="}
_ACTION = re.compile(
    rf"({'|'.join(Kind)}) c(\d+) @?(\d+)(?::(\d+))?(?: [<>=](\d+))?(?: (\d+):(\d+)/(\d+))?"
)


# --- schedules, from the routes of clips ---------------------------------------------------------

#: Action list of each rank.
Schedule = tuple[tuple[Action, ...], ...]


class DecodeShare(NamedTuple):
    """Frames of a clip that one rank decodes."""

    rank: int
    frames: FrameRange


@dataclass(frozen=True)
class Route:
    """Route of one clip through the ranks."""

    clip: int
    ranges: tuple[StepRange, ...]
    """Steps of each rank, consecutive and up to the last step. A rank without steps only encodes or
    only decodes. A route that starts after step 0 starts from a latent checkpoint."""
    decodes: bool = True
    """Whether the clip is decoded."""
    paired: bool = False
    """Whether each rank r of the route and rank r + 1 are a pair, which does the same steps. The
    first rank of a pair encodes, decodes and finishes; the second starts from its packet."""
    shares: tuple[DecodeShare, ...] = ()
    """Frames that each of several ranks decodes, beginning with the last rank of the route; empty:
    the last rank decodes all."""

    @property
    def start(self) -> int:
        """Number of steps that an earlier run has done; usually 0."""
        return self.ranges[0].start

    @property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of ranks (from, to) between which packets of the clip are sent."""
        seconds = [part.rank + 1 for part in self.ranges if part.num_steps and self.paired]
        between = pairwise(part.rank for part in self.ranges)
        return {*between, *pairwise(seconds), *((rank - 1, rank) for rank in seconds)}

    @property
    def decode_links(self) -> set[tuple[int, int]]:
        """Pairs of ranks (from, to) between which its final latent and frames are sent."""
        writer = self.ranges[-1].rank
        helpers = [share.rank for share in self.shares[1:]]
        return {(writer, rank) for rank in helpers} | {(rank, writer) for rank in helpers}

    def has_latent(self, rank: int) -> bool:
        """Whether a rank has the final latent, because it is the second of the last pair.

        Args:
            rank: Any rank of the layout.
        """
        last = self.ranges[-1]
        return self.paired and last.num_steps > 0 and rank == last.rank + 1

    def stages_after(self, rank: int) -> int:
        """Return the number of stages of the route that follow the stage of a rank.

        Args:
            rank: Any rank of the layout, also the second of a pair.

        Returns:
            Number of ranges after the rank's own; 0 if the route does not visit the rank.
        """
        units = [range(part.rank, part.rank + 1 + self.paired) for part in reversed(self.ranges)]
        return next((after for after, unit in enumerate(units) if rank in unit), 0)

    def resumed(self, at: int) -> Route:
        """Return the rest of the route, from the rank that does step `at`.

        The last rank is always kept, because it finishes the clip.

        Args:
            at: Number of steps that an earlier run has done.
        """
        *before, last = self.ranges
        left = [part._replace(start=max(part.start, at)) for part in before if part.end > at]
        return replace(self, ranges=(*left, last._replace(start=max(last.start, at))))


@dataclass(frozen=True)
class _Visit:
    pending: Action | None
    work: tuple[Action, ...]


def build_schedule(routes: Sequence[Route], world_size: int) -> Schedule:
    """Return each rank's action list, with each receive posted one clip ahead.

    The transfer of the next clip then overlaps with the work on this one. At most two packets are
    in flight to a rank: the posted one, and one that its sender still holds. Two clips on two
    ranks, N = 4:

        rank 0   ENCODE c0 @0   DENOISE c0 0:2   SEND c0 @2 >1   ENCODE c1 @0   DENOISE c1 0:2 ...
        rank 1   RECV c0 @2 <0   RECV c1 @2 <0   DENOISE c0 2:4   DECODE c0 @4   FINISH c0 @4 ...

    A rank that helps to decode a clip first does its steps of the next clips, as many as keep it
    busy until the clip has passed the ranks in between. Three clips on three ranks, N = 6; ranks 1
    and 2 each decode half of the frames (`>`):

        rank 0 |001122.......|
        rank 1 |..0011>22>..>|
        rank 2 |....00>11>22>|

    If clips skip different ranks, a rank helps before it begins the next clip. Otherwise ranks
    could wait for each other in a circle.

    Args:
        routes: Route of each clip, in the order in which the clips are made.
        world_size: Number of ranks W.

    Returns:
        Action lists of the W ranks; that of a rank without work is empty.
    """
    paths: defaultdict[int, set[tuple[tuple[int, bool], ...]]] = defaultdict(set)
    for route in routes:
        path = tuple((part.rank, part.num_steps > 0) for part in route.ranges)
        paths[route.ranges[-1].rank].add(path)
    visits: list[list[_Visit]] = [[] for _ in range(world_size)]
    # Visits that help another rank, each with the number of visits that precede it.
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
    for own, helped in zip(visits, helps, strict=True):
        for earlier, (after, visit) in enumerate(helped):
            own.insert(after + earlier, visit)
    return tuple(map(_post_receives_ahead, visits))


def _visit(route: Route, index: int) -> _Visit:
    clip, part = route.clip, route.ranges[index]
    first, last = index == 0, index == len(route.ranges) - 1
    work: list[Action] = []
    if first:
        work = [Action.at(Kind.LOAD_CHECKPOINT if part.start else Kind.ENCODE, clip, part.start)]
    second = part.rank + 1 if route.paired else -1
    if part.num_steps and route.paired and part.start == route.start:
        work.append(Action.at(Kind.SHARE, clip, part.start, second))
    if part.num_steps:
        work.append(Action(Kind.DENOISE, clip, part.start, part.end, second))
    if last:
        work += [*_decode_actions(route), Action.at(Kind.FINISH, clip, part.end)]
    else:
        work.append(Action.at(Kind.SEND, clip, part.end, route.ranges[index + 1].rank))
    source = -1 if first else route.ranges[index - 1].rank
    return _Visit(None if first else Action.at(Kind.RECV, clip, part.start, source), tuple(work))


def _decode_actions(route: Route) -> Iterator[Action]:
    """Yield the decode by the last rank, and its exchange with the ranks that help."""
    clip, end = route.clip, route.ranges[-1].end
    helpers = route.shares[1:]
    for rank, frames in helpers:
        if not route.has_latent(rank):
            yield Action.at(Kind.SHARE, clip, end, rank, frames)
    if route.decodes:
        yield Action.at(Kind.DECODE, clip, end, frames=route.shares[0].frames if helpers else None)
    for rank, frames in helpers:
        yield Action.at(Kind.RECV_FRAMES, clip, end, rank, frames)


def _helps(route: Route, share: DecodeShare) -> tuple[Action, ...]:
    clip, last = route.clip, route.ranges[-1]
    return (
        Action.at(Kind.DECODE, clip, last.end, frames=share.frames),
        Action.at(Kind.SEND_FRAMES, clip, last.end, last.rank, share.frames),
    )


def _decode_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """Yield (rank, visit) of each rank that gets the final latent and decodes a part of it."""
    clip, last = route.clip, route.ranges[-1]
    for share in route.shares[1:]:
        if not route.has_latent(share.rank):
            receive = Action.at(Kind.RECV, clip, last.end, last.rank, share.frames)
            yield share.rank, _Visit(None, (receive, *_helps(route, share)))


def _second_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """Yield (rank, visit) of the second rank of each pair that does steps.

    One clip on two pairs, N = 4 (`=1` names the other rank of the pair):

        rank 0   ENCODE c0 @0    SHARE c0 @0 >1       DENOISE c0 0:2 =1   SEND c0 @2 >2
        rank 1   RECV c0 @0 <0                        DENOISE c0 0:2 =0   SEND c0 @2 >3
        rank 2   RECV c0 @2 <0   DENOISE c0 2:4 =3    DECODE c0 @4        FINISH c0 @4
        rank 3   RECV c0 @2 <1   DENOISE c0 2:4 =2    FREE c0 @4
    """
    parts = [part for part in route.ranges if part.num_steps] if route.paired else []
    for index, part in enumerate(parts):
        source = parts[index - 1].rank + 1 if index else part.rank
        ends: tuple[Action, ...] = (Action.at(Kind.FREE, route.clip, part.end),)
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
    for index, visit in enumerate(visits):
        posted = visits[:2] if index == 0 else visits[index + 1 : index + 2]
        ordered += [*(each.pending for each in posted if each.pending), *visit.work]
    return tuple(ordered)


def connect_rounds(links: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group links into rounds that share no rank, so that the links of a round open concurrently.

    This is a greedy edge colouring: a pipeline of any length needs 2 rounds, and no graph needs
    more than twice the largest number of links at one rank, minus 1.

    Args:
        links: Pairs (from, to) of ranks.

    Returns:
        Rounds, in the order in which all ranks open them.
    """
    rounds: list[list[tuple[int, int]]] = []
    ranks_of: list[set[int]] = []
    for link in sorted(links):
        for opened, ranks in zip(rounds, ranks_of, strict=True):
            if ranks.isdisjoint(link):
                opened.append(link)
                ranks.update(link)
                break
        else:
            rounds.append([link])
            ranks_of.append({*link})
    return rounds
