"""The division of ranks into replicas, and of a replica's stages between two experts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from svdpp.errors import RequestError
from svdpp.plan.split import (
    ClipCuts,
    Part,
    alternating_cuts,
    balanced_cuts,
    fair_seconds,
    fixed_cuts,
    join_cuts,
    uniform_cuts,
)

#: Names of the experts: the first does the steps before the boundary, the second the others.
EXPERTS = ("high-noise", "low-noise")


def assign_replicas(
    world_size: int, replica_size: int, ranks_per_host: int | None
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each replica; as many replicas as possible are within one host.

    Each host gets as many whole replicas as fit. The remaining ranks of all hosts form the other
    replicas, in order. On a single host replica 0 has the first ranks, replica 1 the next ones, and
    so on.

    `replica_size` and `ranks_per_host` divide `world_size`; None: all ranks are on one host.
    """
    on_host = ranks_per_host or world_size
    replica_ranks: list[tuple[int, ...]] = []
    left: list[int] = []
    for first in range(0, world_size, on_host):
        whole = on_host // replica_size * replica_size
        for begin in range(first, first + whole, replica_size):
            replica_ranks.append(tuple(range(begin, begin + replica_size)))
        left += range(first + whole, first + on_host)
    replica_ranks += [
        tuple(left[at : at + replica_size]) for at in range(0, len(left), replica_size)
    ]
    return tuple(sorted(replica_ranks))


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in increasing order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def cut_stages(split: str, whole: Part, boundary: int | None) -> ClipCuts:
    """The cuts of the clips of one replica.

    `boundary` is the number of steps of the first expert if every clip is cut there; else None.
    """
    rule = uniform_cuts if split == "uniform" else balanced_cuts
    seconds_of = (
        fair_seconds if split == "alternating" else lambda part: part.slowest_seconds(rule(part))
    )
    parts: tuple[Part, ...] = (whole,)
    if boundary is not None:
        even = _even_divisions(whole.num_steps, len(whole.stages), boundary)
        parts = _divide(whole, boundary, seconds_of, even if split == "uniform" else None)
    if split == "alternating":
        return alternating_cuts(parts)
    return fixed_cuts(join_cuts(map(rule, parts)), len(whole.stages[-1].ranks))


def check_even(num_steps: int, num_stages: int, boundary: int) -> None:
    """Checks that some division of the stages lets `uniform` split the steps of each expert."""
    if _even_divisions(num_steps, num_stages, boundary):
        return
    first, second = EXPERTS
    raise RequestError(
        f"{boundary} {first} and {num_steps - boundary} {second} steps cannot be split evenly over "
        f"{num_stages} stages with one expert each",
        "use --split balanced or --split alternating",
        details={"steps": num_steps, "stages": num_stages},
    )


def _even_divisions(num_steps: int, num_stages: int, boundary: int) -> list[int]:
    """Numbers of stages of the first expert with which each expert's steps can be split evenly."""
    return [
        count
        for count in divisors(boundary)
        if count < num_stages and (num_steps - boundary) % (num_stages - count) == 0
    ]


def _divide(
    whole: Part, boundary: int, seconds_of: Callable[[Part], float], counts: Iterable[int] | None
) -> tuple[Part, Part]:
    """Divide the stages between the experts so that the slower part is as fast as possible.

    `seconds_of` gives the seconds that a part takes for each clip; more stages do not make it
    slower. `counts` are the possible numbers of stages of the first expert; None: any.
    """

    def parts(count: int) -> tuple[Part, Part]:
        first, second = whole.stages[:count], whole.stages[count:]
        return Part(boundary, first), Part(whole.num_steps - boundary, second)

    def is_first_faster(count: int) -> bool:
        first, second = map(seconds_of, parts(count))
        return first <= second

    if counts is None:
        # With more stages the first part gets faster and the second slower. The best count is at
        # one side of the point where the first part becomes the faster one.
        last = len(whole.stages) - 1
        faster = 1 + bisect_left(range(1, last), True, key=is_first_faster)
        counts = range(max(1, faster - 1), faster + 1)
    return parts(min(counts, key=lambda count: max(map(seconds_of, parts(count)))))
