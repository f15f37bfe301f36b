"""Schedule of a run: the route of each clip through the ranks, and the actions of each rank."""

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
    """Kind of work that an action of a rank does."""

    ENCODE = "ENCODE"
    """Encode the clip's image and prompt, and draw the initial latent."""
    LOAD_CHECKPOINT = "LOAD_CHECKPOINT"
    """Read the latent checkpoint, a file that an earlier run wrote after `start` steps."""
    RECV = "RECV"
    """Post the receive of the clip's packet, which is the clip's state, and return at once. The
    clip's next action waits for the packet."""
    DENOISE = "DENOISE"
    """Run steps `start` to `end` (exclusive) of the clip."""
    SHARE = "SHARE"
    """Send the clip's packet to `peer`, and keep the clip: this rank continues with it."""
    SEND = "SEND"
    """Send the clip's packet to `peer` in the background, and free the clip on this rank."""
    FREE = "FREE"
    """Free the clip's memory on the second rank of a pair (two ranks that run the same steps
    together). The first rank finishes the clip."""
    DECODE = "DECODE"
    """Decode the final latent to frames. With `part`, decode only that part of the frames or
    tiles."""
    SEND_FRAMES = "SEND_FRAMES"
    """Send the decoded frames or tiles to `peer`, then free the clip."""
    RECV_FRAMES = "RECV_FRAMES"
    """Wait for the frames or tiles that `peer` decodes. The clip's last RECV_FRAMES also joins all
    parts."""
    FINISH = "FINISH"
    """Hash the frames, write the clip in the background, and report it as finished."""


class DecodeRange(NamedTuple):
    """Part of a clip's decode: `first` (from 0) to `end` (exclusive), of `total`.

    The numbers count frames. If the VAE decodes in tiles, they count positions of the latent, tile
    by tile. A position that lies in several tiles counts once for each tile.
    """

    first: int
    end: int
    total: int

    @property
    def fraction(self) -> float:
        """Fraction of the clip's decode that this part is, 0 to 1."""
        return (self.end - self.first) / self.total


class Action(NamedTuple):
    """Work of one rank for one clip; an entry of the rank's action list."""

    kind: Kind
    clip: int
    """Index of the clip in the pipeline, from 0."""
    start: int
    """Number of finished steps of the clip before the action."""
    end: int
    """Number of finished steps of the clip after the action. It differs from `start` only in a
    DENOISE."""
    peer: int = -1
    """Rank at the other end of a transfer. In a DENOISE, the rank that runs the same steps for the
    other branch of the guidance. -1: no other rank takes part."""
    part: DecodeRange | None = None
    """Part of the clip's decode, if several ranks decode the clip. DECODE decodes the part;
    SEND_FRAMES and RECV_FRAMES transfer the frames of the part; SHARE and RECV transfer the latent
    to the rank that decodes the part. None: the whole clip."""

    def __str__(self) -> str:
        has_range = self.kind is Kind.DENOISE
        place = f"{self.start}:{self.end}" if has_range else f"@{self.start}"
        arrow = f" {_ARROWS[self.kind]}{self.peer}" if self.peer >= 0 else ""
        part = " {}:{}/{}".format(*self.part) if self.part else ""
        return f"{self.kind} c{self.clip} {place}{arrow}{part}"

    @staticmethod
    def at(
        kind: Kind, clip: int, step: int, peer: int = -1, part: DecodeRange | None = None
    ) -> Action:
        """Create an action that runs no denoising steps, after a number of finished steps.

        Args:
            kind: Any kind except DENOISE.
            clip: Index of the clip, from 0.
            step: Number of finished steps of the clip.
            peer: Rank at the other end of a transfer; -1: no other rank takes part.
            part: Part of the clip's decode, as in `Action.part`; None: the whole clip.
        """
        return Action(kind, clip, step, step, peer, part)

    @staticmethod
    def parse(text: str) -> Action:
        """Parse an action from the text that `str(action)` returns.

        Args:
            text: Text such as `DENOISE c3 7:14` or `SEND c3 @14 >2`.

        Raises:
            ValueError: The text is not of this form.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}")
        kind, clip, start, end, peer, *part = match.groups()
        return Action(
            Kind(kind),
            int(clip),
            int(start),
            int(end or start),
            int(peer or -1),
            DecodeRange(*map(int, part)) if part[0] else None,
        )

    @property
    def is_compute(self) -> bool:
        """Whether an action computes on the rank's device: ENCODE, DENOISE or DECODE."""
        return self.kind in (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)

    @property
    def fraction(self) -> float:
        """Fraction of the clip's decode that a DECODE action does; 1 for other actions."""
        return 1.0 if self.part is None else self.part.fraction

    @property
    def helps(self) -> bool:
        """Whether an action decodes a part of a clip for another rank, which finishes the clip."""
        return self.kind is Kind.DECODE and self.part is not None and self.part.first > 0


#: Kinds of actions that send a packet to another rank.
SENDS = (Kind.SEND, Kind.SHARE, Kind.SEND_FRAMES)

_ARROWS = {Kind.RECV: "<", Kind.RECV_FRAMES: "<", **dict.fromkeys(SENDS, ">"), Kind.DENOISE: "="}
_ACTION = re.compile(
    rf"({'|'.join(Kind)}) c(\d+) @?(\d+)(?::(\d+))?(?: [<>=](\d+))?(?: (\d+):(\d+)/(\d+))?"
)


# --- schedules, made from the routes of clips ----------------------------------------------------

#: Action list of each rank.
Schedule = tuple[tuple[Action, ...], ...]


class DecodeShare(NamedTuple):
    """Rank that decodes a part of a clip, with that part."""

    rank: int
    part: DecodeRange


@dataclass(frozen=True)
class Route:
    """Route of one clip: the ranks that work on it, and the steps of each."""

    clip: int
    ranges: tuple[StepRange, ...]
    """Ranks that work on the clip, in order, with the range of steps that each of them runs. Each
    range starts where the previous range ends, and the last range ends with the clip's last step. A
    rank with an empty range only encodes or only decodes. If the first range starts after step 0,
    the clip resumes from a latent checkpoint."""
    decodes: bool = True
    """Whether the clip is decoded to frames."""
    paired: bool = False
    """Whether the ranks form pairs: rank r in `ranges` and rank r + 1 run the same steps, each for
    one branch of the guidance. Only the first rank of a pair, rank r, is in `ranges`; it also
    encodes and finishes the clip."""
    shares: tuple[DecodeShare, ...] = ()
    """If several ranks decode the clip: each rank with its part, in the order of the parts. The
    route's last rank decodes the first part. Empty: the last rank decodes the whole clip."""

    @property
    def start(self) -> int:
        """Number of steps of a route's clip that an earlier run has finished; usually 0."""
        return self.ranges[0].start

    @property
    def links(self) -> set[tuple[int, int]]:
        """Tuples (from, to) of ranks: sender and receiver of each transfer of one clip's packet."""
        links = set(pairwise(part.rank for part in self.ranges))
        if self.paired:
            seconds = [part.rank + 1 for part in self.ranges if part.num_steps]
            links |= set(pairwise(seconds))
            links |= {(rank - 1, rank) for rank in seconds}
        return links

    @property
    def decode_links(self) -> set[tuple[int, int]]:
        """Tuples (from, to) of ranks that transfer the final latent or frames for a shared decode.

        In a shared decode, each of several ranks decodes a part of the clip.
        """
        writer = self.ranges[-1].rank
        links: set[tuple[int, int]] = set()
        for share in self.shares[1:]:
            links |= {(writer, share.rank), (share.rank, writer)}
        return links

    def has_latent(self, rank: int) -> bool:
        """Whether a rank other than the route's last rank computes the final latent, too.

        Only one rank can: if a pair (two ranks) runs the clip's last steps, the first rank of the
        pair is the route's last rank, and the second rank computes the same latent. So it does not
        need to receive the latent before it decodes a part of the clip.

        Args:
            rank: Any rank of the layout. The result is False for the route's last rank.
        """
        last = self.ranges[-1]
        return self.paired and last.num_steps > 0 and rank == last.rank + 1

    def stages_after(self, rank: int) -> int:
        """Return how many ranges of the clip's route come after the range of a rank.

        Args:
            rank: Any rank of the layout. It may be the second rank of a pair.

        Returns:
            Number of later entries of `ranges`. 0 for the route's last rank (or last pair), and for
            a rank that is not on the route.
        """
        for num_after, part in enumerate(reversed(self.ranges)):
            is_second = self.paired and rank == part.rank + 1
            if rank == part.rank or is_second:
                return num_after
        return 0

    def resumed(self, at: int) -> Route:
        """Return the part of a route that is left for a resumed clip, from step `at` on.

        The last rank is always part of the result, because that rank finishes the clip.

        Args:
            at: Number of steps of the clip that an earlier run has finished.
        """
        *before, last = self.ranges
        left = [part._replace(start=max(part.start, at)) for part in before if part.end > at]
        return replace(self, ranges=(*left, last._replace(start=max(last.start, at))))


@dataclass(frozen=True)
class _Visit:
    """Actions of one rank for one clip, in two parts: a RECV to post early, and all other work."""

    pending: Action | None
    """RECV of the clip's packet that the rank posts early, that is, before its work on the previous
    clip. None: no receive is posted early."""
    work: tuple[Action, ...]
    """All other actions, in order."""


def build_schedule(routes: Sequence[Route], world_size: int) -> Schedule:
    """Return the action list of each rank. A rank posts the receive of a clip one clip ahead.

    The transfer of a clip therefore overlaps with the rank's work on the previous clip. At most two
    packets are in flight to a rank: one whose receive is posted, and one that the sender still
    holds. Example of two clips with 4 steps on two ranks:

        rank 0   ENCODE c0 @0   DENOISE c0 0:2   SEND c0 @2 >1   ENCODE c1 @0   DENOISE c1 0:2 ...
        rank 1   RECV c0 @2 <0   RECV c1 @2 <0   DENOISE c0 2:4   DECODE c0 @4   FINISH c0 @4 ...

    A rank may also decode a part of a clip for the clip's last rank. While later ranks run the
    remaining steps of this clip, the rank does not wait, but runs its steps of the next clips.
    Example of three clips with 6 steps on three ranks, where ranks 1 and 2 each decode half of each
    clip. A digit is a step of the clip with this number, `>` is a decode, and `.` is idle time:

        rank 0 |001122.......|
        rank 1 |..0011>22>..>|
        rank 2 |....00>11>22>|

    If some clips of a schedule skip ranks that other clips use, a rank decodes its part of a clip
    before it begins the next clip. Otherwise ranks could wait for each other in a circle.

    Args:
        routes: Route of each clip, in the order in which the clips are made.
        world_size: Number of ranks.

    Returns:
        Action list of each rank; empty for a rank without work.
    """
    paths: defaultdict[int, set[tuple[tuple[int, bool], ...]]] = defaultdict(set)
    for route in routes:
        path = tuple((part.rank, part.num_steps > 0) for part in route.ranges)
        paths[route.ranges[-1].rank].add(path)
    visits: list[list[_Visit]] = [[] for _ in range(world_size)]
    # A visit is the work of one rank on one clip. For each rank, `helps` has the visits in which
    # the rank decodes a part of a clip for another rank, as tuples (n, visit). Finally, each of
    # them is inserted after the first n visits that the rank has in `visits`.
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
    """Yield the actions with which the last rank of a route decodes the clip.

    If other ranks decode parts, the last rank first sends them the latent. Then it decodes its own
    part, and receives the frames of the other parts.
    """
    clip, end = route.clip, route.ranges[-1].end
    helpers = route.shares[1:]
    for rank, part in helpers:
        if not route.has_latent(rank):
            yield Action.at(Kind.SHARE, clip, end, rank, part)
    if route.decodes:
        yield Action.at(Kind.DECODE, clip, end, part=route.shares[0].part if helpers else None)
    for rank, part in helpers:
        yield Action.at(Kind.RECV_FRAMES, clip, end, rank, part)


def _help_actions(route: Route, share: DecodeShare) -> tuple[Action, ...]:
    """Return the actions of a rank that helps: it decodes one part for the route's last rank."""
    clip, last = route.clip, route.ranges[-1]
    return (
        Action.at(Kind.DECODE, clip, last.end, part=share.part),
        Action.at(Kind.SEND_FRAMES, clip, last.end, last.rank, share.part),
    )


def _decode_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """Yield (rank, visit) for each rank that receives a clip's final latent and decodes a part.

    A visit has the rank's actions for this clip.
    """
    clip, last = route.clip, route.ranges[-1]
    for share in route.shares[1:]:
        if not route.has_latent(share.rank):
            receive = Action.at(Kind.RECV, clip, last.end, last.rank, share.part)
            yield share.rank, _Visit(None, (receive, *_help_actions(route, share)))


def _second_visits(route: Route) -> Iterator[tuple[int, _Visit]]:
    """Yield (rank, visit) for the second rank of each pair that runs steps of the clip.

    A visit has the rank's actions for this clip. Example of one clip with 4 steps on two pairs
    (`=1` is the peer of a DENOISE, rank 1):

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
                ends = _help_actions(route, share)
        if part is not parts[-1]:
            ends = (Action.at(Kind.SEND, route.clip, part.end, parts[index + 1].rank + 1),)
        denoise = Action(Kind.DENOISE, route.clip, part.start, part.end, part.rank)
        yield (
            part.rank + 1,
            _Visit(Action.at(Kind.RECV, route.clip, part.start, source), (denoise, *ends)),
        )


def _post_receives_ahead(visits: Sequence[_Visit]) -> tuple[Action, ...]:
    """Return the actions of a rank, with each RECV moved before the work on the previous clip."""
    ordered: list[Action] = []
    for index, visit in enumerate(visits):
        posted = visits[:2] if index == 0 else visits[index + 1 : index + 2]
        for each in posted:
            if each.pending is not None:
                ordered.append(each.pending)
        ordered += visit.work
    return tuple(ordered)


def connect_rounds(links: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group the links between ranks into rounds; all links of a round can be opened in parallel.

    No rank occurs twice in a round. The algorithm is greedy edge colouring. A pipeline of any
    length needs 2 rounds. If no rank has more than d links, at most 2d - 1 rounds are needed.

    Args:
        links: Tuples (from, to) of ranks.

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
