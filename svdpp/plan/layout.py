"""`Layout`: which ranks form replicas and stages, and which rank runs which steps of a clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from svdpp.errors import RequestError, pluralize
from svdpp.plan.actions import DecodeRange, DecodeShare, Route, Schedule, build_schedule
from svdpp.plan.costs import CostModel
from svdpp.plan.parallel import SPLITS, ParallelConfig
from svdpp.plan.roles import Roles
from svdpp.plan.split import (
    EXPERTS,
    ClipCuts,
    Cuts,
    Stage,
    StageGroup,
    StepRange,
    check_counts,
    check_expert_split,
    check_uniform,
    cut_stages,
    divisors,
)


class StepShare(NamedTuple):
    """Steps that one rank runs.

    A rank may run different steps of different clips, such as 3 to 6 of one clip and 4 to 7 of the
    next. The range from `start` to `end` then covers all of them, here 3 to 7.
    """

    rank: int
    start: int
    """First step that the rank runs in at least one clip."""
    end: int
    """Step after the last step that the rank runs in at least one clip."""
    mean_steps: float
    """Number of steps of one clip that the rank runs, averaged over the clips of the rank."""


@dataclass(frozen=True, kw_only=True)
class Layout(ParallelConfig):
    """Layout of the ranks: a `ParallelConfig` applied to a number of ranks, costs and clips.

    A replica is a group of ranks that makes whole clips: clip i runs on replica i mod
    `data_parallel_size`. The last `num_decoders` ranks of a replica take turns: each runs the last
    steps and the decode of every `num_decoders`-th clip. If replicas have one rank, the layout is
    data parallel. Every rank gets its clips in increasing order, so the action lists of a layout
    cannot deadlock.

    If the model has two experts (denoisers for different steps), each stage of a replica holds one
    of them, and the steps of all clips are divided where the expert changes. With `share_experts`,
    or in replicas of one rank, a rank may hold both experts.

    Examples with eight ranks and 28 steps. Each row shows the ranks and the steps of a replica:

        data_parallel_size=1    0  1  2  3  4  5  6  7     3 or 4 steps each (balanced)
        data_parallel_size=2    0  1  2  3                 7 steps each: clips 0, 2, 4 ...
                                4  5  6  7                 7 steps each: clips 1, 3, 5 ...
        data_parallel_size=8    0                          28 steps: clips 0, 8, 16 ...
        data_parallel_size=2,   0+1  2+3                   14 steps each, run by pairs
        cfg_parallel_size=2     4+5  6+7
        num_decoders=2          0  1  2  3  4  5  {6|7}    6 finishes even clips, 7 odd clips
    """

    num_steps: int
    world_size: int
    decode_parallel_size: int = 1
    """Largest number of ranks that decode a clip together; each rank decodes whole chunks or whole
    tiles."""
    costs: CostModel = field(default_factory=CostModel)
    """Cost model. The balanced and alternating splits use it to divide the steps, and every split
    uses it to divide the stages between two experts."""
    decodes: bool = True
    """Whether clips are decoded to frames."""
    expert_boundary: int | None = None
    """Number of steps that the high-noise expert (the first of two denoisers) runs, from 1 to
    `num_steps` - 1. None: the model has one denoiser."""
    chunks: tuple[int, ...] = ()
    """Sizes of the smallest pieces into which a decode can be divided: the number of frames in each
    chunk, or the number of latent positions in each tile. Empty: unknown; the decode is divided
    into equal parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self.num_steps, self.world_size)
        self._check_pairs()
        self._check_replicas()
        self._check_experts()
        if self.split not in SPLITS:
            raise RequestError(f"`split` must be one of {', '.join(SPLITS)}, got {self.split!r}")
        self.costs.check_world(self.world_size)
        if self.split == "uniform":
            self._check_uniform()

    def _check_pairs(self) -> None:
        if self.cfg_parallel_size not in (1, 2):
            raise RequestError(
                f"`cfg_parallel` must be 1 or 2, got {self.cfg_parallel_size}",
                details={"cfg_parallel": self.cfg_parallel_size, "allowed": [1, 2]},
            )
        for count, place in ((self.world_size, ""), (self.costs.ranks_per_host, " on each host")):
            if count is not None and count % self.cfg_parallel_size:
                raise RequestError(
                    f"`cfg_parallel` 2 needs an even number of ranks, got {count}{place}",
                    details={"cfg_parallel": self.cfg_parallel_size, "ranks": count},
                )

    def _check_replicas(self) -> None:
        units = self.world_size // self.cfg_parallel_size
        if self.data_parallel_size < 1 or units % self.data_parallel_size:
            what = (
                f"pairs of ranks is {units}" if self.cfg_parallel_size == 2 else f"ranks is {units}"
            )
            raise RequestError(
                "replicas of equal size cannot be formed: "
                f"`replicas` is {self.data_parallel_size}, and the number of {what}",
                f"use a divisor: `replicas` {', '.join(map(str, divisors(units)))}",
                details={
                    **{"world_size": self.world_size, "replicas": self.data_parallel_size},
                    **{"cfg_parallel": self.cfg_parallel_size, "units": units},
                },
            )
        ranks = self.cfg_parallel_size * (self.replica_size if self.num_decoders == 1 else 1)
        unit = "pairs" if self.cfg_parallel_size == 2 else "ranks"
        whole = "replica" if self.num_decoders == 1 else "decoder"
        for name, value, most, counted in (
            ("decoders", self.num_decoders, self.replica_size, f"{unit} of a replica"),
            ("decode_ranks", self.decode_parallel_size, ranks, f"ranks of a {whole}"),
        ):
            if not 1 <= value <= most:
                raise RequestError(
                    f"`{name}` must be {_up_to(most)}, the number of {counted}, got {value}",
                    details={name: value, "minimum": 1, "most": most},
                )

    def _check_experts(self) -> None:
        boundary = self.expert_boundary
        if boundary is not None and not 1 <= boundary < self.num_steps:
            raise RequestError(
                "`expert_boundary` must be 1 or more and less than the number of steps "
                f"({self.num_steps}), got {boundary}",
                details={"steps": self.num_steps, "expert_boundary": boundary, "minimum": 1},
            )
        if self.separates_experts and self.num_stages == 1:
            raise RequestError(
                f"`decoders` must be {_up_to(self.replica_size - 1)}, got {self.num_decoders}: all "
                f"decoders hold the {EXPERTS[1]} expert, so another rank must hold the "
                f"{EXPERTS[0]} expert",
                "use `layout` data-parallel, or use `share_experts`: a rank can then hold both "
                "experts",
                details={
                    "decoders": self.num_decoders,
                    "most": self.replica_size - 1,
                    "minimum": 1,
                },
            )

    def _check_uniform(self) -> None:
        if self.expert_boundary is not None and self.separates_experts:
            check_expert_split(self.num_steps, self.num_stages, self.expert_boundary)
        else:
            check_uniform(self.num_steps, self.num_stages, self.world_size)

    def __str__(self) -> str:
        pairs = self.cfg_parallel_size == 2
        if self.replica_size == 1:
            if self.data_parallel_size > 1:
                return "data parallel of pairs" if pairs else "data parallel"
            return "one pair of ranks" if pairs else "one rank"
        unit, many = "pairs" if pairs else "ranks", "s" * (self.data_parallel_size > 1)
        words = [
            f"{self.data_parallel_size} replica{many} of {self.replica_size} {unit}",
            self.split,
        ]
        words += [f"{self.num_decoders} decoders"] * (self.num_decoders > 1)
        words += [f"{self.decode_parallel_size} decode ranks"] * (self.decode_parallel_size > 1)
        words += ["shared experts"] * (self.share_experts and self.expert_boundary is not None)
        return ", ".join(words)

    @classmethod
    def of(cls, parallel: ParallelConfig, **facts: Any) -> Layout:
        """Return the `Layout` of a `ParallelConfig`, for a number of ranks, steps and costs.

        Args:
            parallel: Parallel configuration, in which a `decode_parallel_size` of None counts as 1.
            facts: All other fields of the layout.

        Raises:
            RequestError: The split is `uniform` and the stages cannot have equally many steps, or
                the fields contradict each other.
        """
        chosen = {each.name: getattr(parallel, each.name) for each in fields(ParallelConfig)}
        if chosen["decode_parallel_size"] is None:
            chosen["decode_parallel_size"] = 1
        return cls(**chosen, **facts)

    @property
    def parallel(self) -> ParallelConfig:
        """`ParallelConfig` of this layout: its options, without ranks, steps and costs."""
        names = (each.name for each in fields(ParallelConfig))
        return ParallelConfig(**{name: getattr(self, name) for name in names})

    @property
    def replica_size(self) -> int:
        """Number of ranks of each replica; two ranks that share each step (a pair) count as one."""
        return self.world_size // self.cfg_parallel_size // self.data_parallel_size

    @cached_property
    def replica_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, in the order in which they work on a clip.

        Of a pair (two ranks that share each step), only the first rank is listed.
        """
        size, per_host = self.cfg_parallel_size, self.costs.ranks_per_host
        of_units = assign_replicas(
            self.world_size // size, self.replica_size, per_host and per_host // size
        )
        return tuple(tuple(unit * size for unit in units) for units in of_units)

    def is_second(self, rank: int) -> bool:
        """Whether a rank is the second of a pair, that is, of two ranks that share each step.

        Args:
            rank: Any rank of the layout.
        """
        return rank % self.cfg_parallel_size == 1

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Ranks that share each step, as tuples of two; empty if each rank runs its steps alone.

        The two ranks exchange their predictions in each step.
        """
        return tuple((r - 1, r) for r in range(self.world_size) if self.is_second(r))

    @property
    def replicas_are_alike(self) -> bool:
        """Whether all replicas need the same time for a clip, including transfers between hosts."""
        hosts = ([self.costs.host_of(rank) for rank in ranks] for ranks in self.replica_ranks)
        crossed = {tuple(here != there for here, there in pairwise(each)) for each in hosts}
        return not self.costs.differ_by_rank and len(crossed) == 1

    @property
    def separates_experts(self) -> bool:
        """Whether the model has two experts, and no rank holds both of them.

        Each clip then goes to another rank at the step where the expert changes.
        """
        has_two = self.expert_boundary is not None
        return has_two and not self.share_experts and self.replica_size > 1

    def experts_of(self, part: StepRange) -> frozenset[int]:
        """Return the experts that a range of steps needs, as indices in `EXPERTS`.

        Args:
            part: Range of steps, possibly empty.
        """
        boundary = self.num_steps if self.expert_boundary is None else self.expert_boundary
        needs = part.start < min(part.end, boundary), max(part.start, boundary) < part.end
        return frozenset(expert for expert, is_needed in enumerate(needs) if is_needed)

    @property
    def num_stages(self) -> int:
        """Number of stages of a replica. The ranks that take turns in decoding are one stage."""
        return self.replica_size - self.num_decoders + 1

    def route(self, clip: int, *, all_stages: bool = False) -> Route:
        """Return the route of a clip, which depends only on the clip's index.

        Args:
            clip: Index of the clip.
            all_stages: Whether the route includes stages that run no steps of this clip.
        """
        replica, index = clip % self.data_parallel_size, clip // self.data_parallel_size
        return self._route(clip, replica, index, self.cuts(clip), all_stages=all_stages)

    def cuts(self, clip: int) -> Cuts:
        """Return the number of finished steps of a clip before and after each stage.

        Args:
            clip: Index of the clip.

        Returns:
            0, and then the number of finished steps after each stage, such as (0, 4, 8) for two
            stages of 4 steps.
        """
        return self._cuts_of(clip % self.data_parallel_size).cuts(clip // self.data_parallel_size)

    def schedule(self, num_clips: int) -> Schedule:
        """Return the action list of each rank of the layout, for a number of clips.

        Args:
            num_clips: Number of clips, which are made in the order of their indices.
        """
        return build_schedule([self.route(clip) for clip in range(num_clips)], self.world_size)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Sorted tuples (from, to) of ranks: `from` can send packets of clips to `to`."""
        return tuple(sorted({link for route in self._kinds_of_route() for link in route.links}))

    @cached_property
    def decode_links(self) -> tuple[tuple[int, int], ...]:
        """Sorted tuples (from, to) of ranks: `from` can send final latents or frames to `to`."""
        routes = self._kinds_of_route()
        return tuple(sorted({link for route in routes for link in route.decode_links}))

    @cached_property
    def roles(self) -> tuple[Roles, ...]:
        """Roles of each rank: the parts of the model that the rank needs for any of its clips."""
        encode, decode = set[int](), set[int]()
        experts: list[frozenset[int]] = [frozenset()] * self.world_size
        for route in self._kinds_of_route():
            encode.add(route.ranges[0].rank)
            decode.update([route.ranges[-1].rank] if route.decodes else [])
            decode.update(share.rank for share in route.shares)
            for part in route.ranges:
                for rank in range(part.rank, part.rank + self.cfg_parallel_size):
                    experts[rank] |= self.experts_of(part)
        return tuple(
            Roles(encode=rank in encode, denoise=bool(held), decode=rank in decode, experts=held)
            for rank, held in enumerate(experts)
        )

    @cached_property
    def peak_gib(self) -> tuple[float | None, ...]:
        """Peak memory of each of the layout's ranks in GiB; None if the costs lack a value."""
        return tuple(map(self.costs.peak_gib, self.roles))

    @cached_property
    def all_shares(self) -> tuple[StepShare, ...]:
        """Steps that each rank runs, in the order of the ranks.

        Clips may be divided at different steps. The range of a rank therefore covers all steps that
        the rank runs in at least one clip, and `mean_steps` is the mean over the rank's clips.
        """
        shares = []
        parts = [part for route in self._kinds_of_route() for part in route.ranges]
        starts = {part.rank: part.start for part in sorted(parts, reverse=True)}
        ends = {part.rank: part.end for part in sorted(parts, key=lambda part: part.end)}
        for replica in range(self.data_parallel_size):
            for place, stage in enumerate(self.stages(replica)):
                for turn, rank in enumerate(stage.ranks):
                    mean = self._cuts_of(replica).mean_steps(place, turn, len(stage.ranks))
                    steps = starts.get(rank, 0), ends.get(rank, 0), mean
                    shares += [
                        StepShare(rank + half, *steps) for half in range(self.cfg_parallel_size)
                    ]
        return tuple(sorted(shares))

    def stages(self, replica: int) -> list[Stage]:
        """Return the stages of a replica, in the order in which clips pass through them.

        Args:
            replica: Index of the replica.
        """
        ranks = self.replica_ranks[replica]
        body, tail = ranks[: -self.num_decoders], ranks[-self.num_decoders :]
        stages = []
        for unit in (*((rank,) for rank in body), tail):
            step_seconds, other_seconds = [], []
            for rank in unit:
                partner = rank + 1 if self.cfg_parallel_size == 2 else -1
                step_seconds.append(self.costs.step_on(rank, partner))
                encodes = unit[0] == ranks[0]
                encode_seconds = self.costs.encode_on(rank) if encodes else 0.0
                writer = rank if unit is tail else tail[0]
                other_seconds.append(encode_seconds + self._decode_seconds(rank, writer))
            stages.append(Stage(unit, tuple(step_seconds), tuple(other_seconds)))
        return stages

    def _decode_seconds(self, rank: int, writer: int) -> float:
        """Return the seconds that a rank needs for its part of a clip's decode.

        If ranks form pairs, `rank` is the first of two ranks, and the result is for the slower of
        the two. `writer` is the rank that finishes the clip.
        """
        if not self.decodes or (self.decode_parallel_size == 1 and rank != writer):
            return 0.0
        shares = self._decode_shares[writer]
        seconds = [
            self.costs.decode_on(share.rank) * share.part.fraction
            for share in shares
            if share.rank - rank in range(self.cfg_parallel_size)
        ]
        return max(seconds, default=0.0 if shares else self.costs.decode_on(rank))

    def decode_fraction(self, rank: int) -> float:
        """Return the fraction of a clip's decode that a rank does; 0 if it decodes no clips.

        Args:
            rank: A rank of the layout.
        """
        shares = [share for each in self._decode_shares.values() for share in each]
        own = [share.part.fraction for share in shares if share.rank == rank]
        return own[0] if own else float(self.roles[rank].decode)

    @cached_property
    def _decode_shares(self) -> dict[int, tuple[DecodeShare, ...]]:
        """Ranks that decode a clip, each with its part, by the number of the rank that finishes it.

        The rank that finishes the clip decodes the first part. If this rank is in a pair, the other
        rank of the pair decodes the next part. Earlier ranks of the replica decode the remaining
        parts.
        """
        chunks = self.chunks or (1,) * self.decode_parallel_size
        count = min(self.decode_parallel_size, len(chunks)) if self.decodes else 1
        parts = divide_chunks(chunks, count) if count > 1 else []
        shares = {}
        for ranks in self.replica_ranks:
            for writer in ranks[-self.num_decoders :]:
                units = ranks[::-1] if self.num_decoders == 1 else (writer,)
                each = (unit + half for unit in units for half in range(self.cfg_parallel_size))
                shares[writer] = tuple(map(DecodeShare, each, parts))
        return shares

    def _route(
        self, clip: int, replica: int, turn: int, cuts: Cuts, *, all_stages: bool = False
    ) -> Route:
        """Return a clip's route, which skips stages without steps, except the first and the last.

        With `all_stages`, no stage is skipped. `turn` says which of the ranks that take turns in
        decoding finishes the clip; it is taken modulo `num_decoders`.
        """
        ranks, body = self.replica_ranks[replica], self.replica_size - self.num_decoders
        ranges = [
            StepRange(ranks[index], cuts[index], cuts[index + 1])
            for index in range(body)
            if all_stages or index == 0 or cuts[index] < cuts[index + 1]
        ]
        last = StepRange(ranks[body + turn % self.num_decoders], cuts[body], cuts[body + 1])
        shares = self._decode_shares[last.rank]
        return Route(clip, (*ranges, last), self.decodes, self.cfg_parallel_size == 2, shares)

    def _cuts_of(self, replica: int) -> ClipCuts:
        return self._cuts[replica % len(self._cuts)]

    @cached_property
    def _cuts(self) -> tuple[ClipCuts, ...]:
        """Division of the steps in each replica.

        There is only one entry, for all replicas, if all ranks are equally fast.
        """
        replicas = range(self.data_parallel_size if self.costs.differ_by_rank else 1)
        boundary = self.expert_boundary if self.separates_experts else None
        wholes = (StageGroup(self.num_steps, self.stages(replica)) for replica in replicas)
        return tuple(cut_stages(self.split, whole, boundary) for whole in wholes)

    def _kinds_of_route(self) -> Iterator[Route]:
        """Yield every route that a clip of this layout can have; the field `clip` of each is 0."""
        for replica in range(self.data_parallel_size):
            for turn, cuts in self._cuts_of(replica).all_cuts():
                yield self._route(0, replica, turn, cuts)


def assign_replicas(
    world_size: int, replica_size: int, ranks_per_host: int | None
) -> tuple[tuple[int, ...], ...]:
    """Assign ranks to replicas so that as many replicas as possible lie within one host.

    Ranks that are left over on the hosts form the other replicas, in order. Example with replicas
    of 2 ranks on 2 hosts of 3 ranks each, where one replica has ranks on both hosts:

        host 0: ranks 0 1 2      replicas (0, 1), (2, 5), (3, 4)
        host 1: ranks 3 4 5

    Args:
        world_size: Number of ranks.
        replica_size: Number of ranks of each replica, a divisor of `world_size`.
        ranks_per_host: Number of ranks on each host, a divisor of `world_size`. None: there is only
            one host.
    """
    on_host = ranks_per_host or world_size
    whole = on_host // replica_size * replica_size
    # The ranks that form replicas within their host come first, then the ranks that are left over
    # on all hosts.
    ranks = sorted(range(world_size), key=lambda rank: rank % on_host >= whole)
    firsts = range(0, world_size, replica_size)
    return tuple(sorted(tuple(ranks[first : first + replica_size]) for first in firsts))


def frame_chunks(num_frames: int, size: int) -> tuple[int, ...]:
    """Return the number of frames of each chunk in which a clip is decoded.

    Args:
        num_frames: Number of frames of the clip.
        size: Number of frames that are decoded at once, `decode_chunk_size`.
    """
    return tuple(min(size, num_frames - first) for first in range(0, num_frames, size))


def divide_chunks(chunks: Sequence[int], count: int) -> list[DecodeRange]:
    """Divide the chunks of a decode, in order, into parts as equal as possible.

    Each cut lies between two chunks, at the place that is nearest to an equal division. If two
    places are equally near, the earlier one is taken. The first part is then the smaller one, which
    is useful, because the rank of the first part also writes the clip.

    Args:
        chunks: Size of each chunk.
        count: Number of parts, each of at least one chunk.
    """
    ends, cuts = (0, *accumulate(chunks)), [0]
    for index in range(1, count):
        possible = range(cuts[-1] + 1, len(chunks) - (count - index) + 1)
        ideal = index * ends[-1]
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] * count - ideal)))
    cuts.append(len(chunks))
    return [DecodeRange(ends[first], ends[end], ends[-1]) for first, end in pairwise(cuts)]


def check_chunks(decode_ranks: int, chunks: Sequence[int], *, are_tiles: bool = False) -> None:
    """Raise a `RequestError` if a clip has fewer chunks than ranks that decode it together.

    Args:
        decode_ranks: Number of ranks that decode each clip together.
        chunks: Number of frames in each chunk, or number of latent positions in each tile.
        are_tiles: Whether the chunks are tiles.

    Raises:
        RequestError: A clip has fewer chunks than ranks that decode it.
    """
    if are_tiles and decode_ranks > len(chunks):
        raise RequestError(
            f"`decode_ranks` {decode_ranks} needs {decode_ranks} tiles, but a clip of this size "
            f"has only {len(chunks)}",
            f"use `decode_ranks` {len(chunks)} or fewer",
            details={"decode_ranks": decode_ranks, "tiles": len(chunks)},
        )
    if decode_ranks > len(chunks):
        raise RequestError(
            f"`decode_ranks` {decode_ranks} needs {decode_ranks} chunks of frames, but a clip of "
            f"{pluralize(sum(chunks), 'frame')} has only {len(chunks)}",
            f"use `decode_ranks` {len(chunks)} or fewer, or use a smaller `decode_chunk_size`, "
            "which changes the bits of clips",
            details={"decode_ranks": decode_ranks, "frames": sum(chunks), "chunks": len(chunks)},
        )


def _up_to(most: int) -> str:
    """Return the text "1 to `most`", or "1" if `most` is 1."""
    return "1" if most == 1 else f"1 to {most}"
