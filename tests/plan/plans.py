"""Strategies for pipelines, layouts, costs and routes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from svdpp.plan.costs import Costs
from svdpp.plan.experts import divisors
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.schedule import Route, Schedule, build_schedule
from svdpp.plan.split import Part, StepRange, split_steps

# Binary fractions have exact sums in any order, so times can be compared with ==.
seconds = st.integers(0, 64).map(lambda quarters: quarters / 4)
costs = st.builds(
    Costs,
    step_seconds=st.integers(1, 32).map(lambda quarters: quarters / 4),
    encode_seconds=seconds,
    decode_seconds=seconds,
    transfer_seconds=seconds,
)


def memory(weights: tuple[float, float, float], work: tuple[float, float, float]) -> dict[str, Any]:
    """The GiB of encode, denoise and decode, as options of `Costs`."""
    parts = ("encode", "denoise", "decode")
    given = {f"{part}_weights_gib": gib for part, gib in zip(parts, weights, strict=True)}
    return given | {f"{part}_work_gib": gib for part, gib in zip(parts, work, strict=True)}


#: Wan 2.2 A14B in 40 steps, roughly; its first part is the text encoder, the second one expert.
WAN: dict[str, Any] = {
    "num_steps": 40,
    "expert_boundary": 13,
    "costs": Costs(
        step_seconds=4, encode_seconds=2, decode_seconds=10, **memory((11, 27, 0.5), (1, 9, 6))
    ),
}


def data_parallel_routes(
    num_steps: int, world_size: int, clips: Iterable[int], *, decodes: bool = True
) -> list[Route]:
    """Each clip on one rank, ranks in rotation: the usual way to run diffusers on several GPUs."""
    return [
        Route(clip, (StepRange(index % world_size, 0, num_steps),), decodes)
        for index, clip in enumerate(clips)
    ]


def pipeline_routes(
    ranges: tuple[StepRange, ...], clips: Iterable[int], *, decodes: bool = True
) -> list[Route]:
    """The routes of the step pipeline: every clip visits all ranks in order."""
    return [Route(clip, ranges, decodes) for clip in clips]


@dataclass(frozen=True)
class Pipeline:
    """A step pipeline: N steps over W ranks, M clips."""

    num_steps: int
    world_size: int
    num_clips: int
    decodes: bool = True

    @property
    def per_rank(self) -> int:
        return self.num_steps // self.world_size

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        return split_steps(self.num_steps, self.world_size)

    @property
    def schedule(self) -> Schedule:
        routes = pipeline_routes(self.ranges, range(self.num_clips), decodes=self.decodes)
        return build_schedule(routes, self.world_size)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    world_size = draw(st.integers(1, 9))
    return Pipeline(
        num_steps=world_size * draw(st.integers(1, 5)),
        world_size=world_size,
        num_clips=draw(st.integers(1, 12)),
        decodes=draw(st.booleans()),
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    experts: int | None = None,
    pairs: bool = False,
    hosts: bool = False,
) -> Layout:
    """Any layout that can be built.

    Args:
        experts: of the model; None: 1 or 2.
        pairs: whether a pair of ranks can stand for each rank.
        hosts: whether the ranks can be on several hosts.
    """
    replicas, replica_size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    cfg_parallel = draw(st.integers(1, 1 + pairs))
    world_size = replicas * replica_size * cfg_parallel
    has_two = draw(st.booleans()) if experts is None else experts == 2
    share = draw(st.booleans())
    apart = has_two and not share and replica_size > 1
    decoders = draw(st.integers(1, replica_size - apart))
    num_stages = replica_size - decoders + 1
    split = draw(st.sampled_from(SPLITS))
    boundary = None
    if apart and split == "uniform":
        first = draw(st.integers(1, num_stages - 1))
        boundary = first * draw(st.integers(1, 4))
        num_steps = boundary + (num_stages - first) * draw(st.integers(1, 4))
    elif split == "uniform":
        num_steps = num_stages * draw(st.integers(1 + has_two, 4))
    else:
        num_steps = draw(st.integers(1 + has_two, 12))
    if has_two and boundary is None:
        boundary = draw(st.integers(1, num_steps - 1))
    each = draw(costs)
    if draw(st.booleans()):
        steps = st.lists(st.integers(1, 8).map(lambda n: n / 2), min_size=world_size)
        each = replace(each, step_seconds=tuple(draw(steps)[:world_size]))
    if hosts:
        between = draw(seconds)
        each = replace(
            each,
            ranks_per_host=cfg_parallel
            * draw(st.sampled_from(divisors(world_size // cfg_parallel))),
            inter_host_transfer_seconds=between,
        )
    return Layout(
        num_steps=num_steps,
        world_size=world_size,
        split=split,
        replicas=replicas,
        decoders=decoders,
        costs=each,
        decodes=draw(st.booleans()),
        expert_boundary=boundary,
        share_experts=share,
        cfg_parallel=cfg_parallel,
        decode_ranks=draw(st.integers(1, cfg_parallel * (replica_size if decoders == 1 else 1))),
        chunks=draw(st.sampled_from([(8,), (8, 8), (8, 4, 4), (4,) * 4, (2,) * 8])),
    )


def steps_in(seconds: float, part: Part) -> float:
    """Steps that the stages could do of every clip in this time, if steps were divisible."""
    return sum(
        sum(min(part.num_steps, stage.steps_within(seconds, t)) for t in range(len(stage.ranks)))
        / len(stage.ranks)
        for stage in part.stages
    )


@st.composite
def route_lists(draw: st.DrawFn) -> tuple[list[Route], int]:
    """Any routes: each clip visits some ranks in some order, some of them for zero steps."""
    world_size = draw(st.integers(1, 6))
    routes = []
    for clip in range(draw(st.integers(1, 8))):
        ranks = draw(st.permutations(range(world_size)))
        done, ranges = 0, []
        for rank in ranks[: draw(st.integers(1, world_size))]:
            ranges.append(StepRange(rank, done, done + draw(st.integers(0, 4))))
            done = ranges[-1].end
        routes.append(Route(clip, tuple(ranges), draw(st.booleans())))
    return routes, world_size
