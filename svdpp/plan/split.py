"""Owns the rules that cut `num_steps` denoising steps into ranges, one for each stage of a replica.

A step's result does not depend on the rank that does it, so where the cuts lie is free, and for
each clip anew. `uniform` cuts into equal ranges; `balanced` into whole ranges whose slowest stage
is as fast as any can be; `dithered` into ranges that differ from clip to clip, so that over clips
every stage has the same work to a fraction of a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.limits import MAX_PLANNED_STEPS, MAX_RANKS

#: Cut positions of one clip: 0, the steps done after each stage, and so the number of steps last.
Cuts = tuple[int, ...]

# Cut positions and phases are whole numbers of 2^-64 steps: exact, and alike on every machine.
_UNIT_BITS = 64
_UNIT = 1 << _UNIT_BITS
# 2^64 / golden ratio: of all additive sequences its multiples fill the circle most evenly.
_GOLDEN = 0x9E3779B97F4A7C15
# An encode or decode stage gets no steps where they would speed the replica up by less than this:
# they would cost its rank the UNet's weights.
_WORTH_A_UNET = 0.005


class StepRange(NamedTuple):
    """Steps `start` to `end` (exclusive) of a clip, done by `rank`.

    `start` is also the number of steps already done when the latent arrives, and `end` when it
    leaves.
    """

    rank: int
    start: int
    end: int

    @property
    def num_steps(self) -> int:
        """Number of steps in the range."""
        return self.end - self.start


@dataclass(frozen=True)
class Stage:
    """One place in a replica: a rank, or several that take the replica's clips in turn.

    Args:
        ranks: who takes turns; the replica's clip q goes to `ranks[q % len(ranks)]`.
        step_seconds: of one step, for each of `ranks`.
        fixed_seconds: of what a clip needs here beside steps (encode, decode), for each of `ranks`.
    """

    ranks: tuple[int, ...]
    step_seconds: tuple[float, ...]
    fixed_seconds: tuple[float, ...]

    def seconds(self, num_steps: int) -> float:
        """What `num_steps` of every clip take here, for each clip of the replica: the slowest turn.

        A rank that takes every k-th clip has k times as long for it.
        """
        turns = zip(self.fixed_seconds, self.step_seconds, strict=True)
        return max(fixed + num_steps * step for fixed, step in turns) / len(self.ranks)

    def steps_within(self, seconds: float, turn: int) -> float:
        """Steps, as a real number, that this turn's rank can do where each clip has `seconds`."""
        left = seconds * len(self.ranks) - self.fixed_seconds[turn]
        return max(0.0, left / self.step_seconds[turn])


def split_steps(num_steps: int, world_size: int) -> tuple[StepRange, ...]:
    """The uniform rule: `start = rank * (num_steps // world_size)`, all ranges of one length.

    Raises:
        RequestError: counts that are not positive, more ranks than steps, or steps that the world
            does not divide; then the nearest step counts that it does are named.
    """
    check_counts(num_steps, world_size)
    if world_size > num_steps:
        raise RequestError(
            f"{world_size} ranks are more than {num_steps} steps: a rank would have nothing to do",
            f"use --steps {world_size} or more, or --world {num_steps} or fewer",
            details={"steps": num_steps, "ranks": world_size},
        )
    if num_steps % world_size:
        below = num_steps // world_size * world_size
        nearest = [below, below + world_size]
        raise RequestError(
            f"{num_steps} steps cannot be split evenly over {world_size} ranks; "
            f"the nearest step counts that can are {below} and {below + world_size}",
            f"use --steps {below} or --steps {below + world_size}, "
            f"or --world {largest_world(num_steps, world_size)}",
            details={"steps": num_steps, "ranks": world_size, "nearest": nearest},
        )
    count = num_steps // world_size
    return tuple(StepRange(rank, rank * count, (rank + 1) * count) for rank in range(world_size))


def check_counts(num_steps: int, world_size: int) -> None:
    """Refuses counts that are not positive, or beyond the limits of a plan.

    Raises:
        RequestError: naming the count.
    """
    counts = (("steps", num_steps, MAX_PLANNED_STEPS), ("ranks", world_size, MAX_RANKS))
    for name, count, most in counts:
        if count < 1:
            raise RequestError(f"the number of {name} must be 1 or more, got {count}")
        if count > most:
            raise RequestError(f"the number of {name} must be {most} or less, got {count}")


def largest_world(num_steps: int, at_most: int) -> int:
    """The largest number of ranks, 1 to `at_most`, that splits `num_steps` evenly."""
    return max(world for world in range(1, at_most + 1) if num_steps % world == 0)


def balanced_cuts(num_steps: int, stages: Sequence[Stage]) -> Cuts:
    """Whole ranges, the same for every clip, that make the slowest stage as fast as can be.

    Steps are given out one by one, each to the stage that will be done first with it. That is the
    best: the last step of the slowest stage went there because every other stage would have been as
    slow with it, and so in any other split one of them is. A stage may get no step at all.
    """
    counts = [0] * len(stages)
    offers = [(stage.seconds(1), index) for index, stage in enumerate(stages)]
    heapq.heapify(offers)
    for _ in range(num_steps):
        index = offers[0][1]
        counts[index] += 1
        heapq.heapreplace(offers, (stages[index].seconds(counts[index] + 1), index))
    return (0, *accumulate(counts))


@dataclass(frozen=True)
class FixedCuts:
    """The same cuts for every clip.

    Args:
        each: those cuts.
        num_turns: how many ranks the replica's last stage has.
    """

    each: Cuts
    num_turns: int

    def cuts(self, index: int) -> Cuts:  # noqa: ARG002  as in DitheredCuts
        """The cuts of the replica's clip `index`."""
        return self.each

    def all_cuts(self) -> list[tuple[int, Cuts]]:
        """Every (turn, cuts) that some clip may have."""
        return [(turn, self.each) for turn in range(self.num_turns)]

    def mean_steps(self, place: int, turn: int, num_turns: int) -> float:  # noqa: ARG002
        """Steps done at stage `place`."""
        return float(self.each[place + 1] - self.each[place])


class DitheredCuts:
    """Real cut positions, rounded for each clip with a phase of its own.

    A position c becomes floor(c + phase), the phase walking evenly over 0 to 1 as clips follow each
    other: its mean over clips is c, a stage's steps differ by one at most, and ranges stay in order
    since all positions of a clip share its phase.

    Args:
        num_steps: N, of each clip.
        stages: of the replica. Where one has several ranks of unequal speed, each of their turns
        has
            positions of its own.
    """

    def __init__(self, num_steps: int, stages: Sequence[Stage]) -> None:
        turns = math.lcm(*(len(stage.ranks) for stage in stages))
        shares = _shares_worth_a_unet(num_steps, stages, turns)
        self.positions = tuple(
            _grid_positions(num_steps, [share[turn] for share in shares]) for turn in range(turns)
        )
        self._phase_step = _phase_step(turns)

    def cuts(self, index: int) -> Cuts:
        """The cuts of the replica's clip `index`; clip 0 is rounded to the nearest step."""
        return self._rounded(index % len(self.positions), index * self._phase_step + _UNIT // 2)

    def all_cuts(self) -> list[tuple[int, Cuts]]:
        """Every (turn, cuts) that some clip may have."""
        return [
            (turn, self._rounded(turn, phase))
            for turn, positions in enumerate(self.positions)
            # The cuts change where a position steps over to the next whole number.
            for phase in sorted({-position % _UNIT for position in positions})
        ]

    def mean_steps(self, place: int, turn: int, num_turns: int) -> float:
        """Steps done at stage `place`, on average over every clip whose turn there is `turn`."""
        own = self.positions[turn::num_turns]
        return sum(each[place + 1] - each[place] for each in own) / len(own) / _UNIT

    def _rounded(self, turn: int, phase: int) -> Cuts:
        phase %= _UNIT
        return tuple((position + phase) >> _UNIT_BITS for position in self.positions[turn])


def _phase_step(turns: int) -> int:
    """How far the phase goes from clip to clip, in units, so that it fills the circle evenly.

    So must the phases of every turn's own clips: `turns` paces come to a golden one. Of the paces
    for which they do, the one whose continued fraction has the smallest terms is itself most even
    (Niederreiter, Random Number Generation and Quasi-Monte Carlo Methods, 1992, chapter 3).
    """
    paces = [
        (rounds * _UNIT + golden) // turns
        for rounds in range(turns)
        for golden in (_GOLDEN, _UNIT - _GOLDEN)
    ]
    return min(paces, key=lambda pace: (max(_terms(pace)), sum(_terms(pace)), -pace))


def _terms(pace: int) -> list[int]:
    """The first terms of the continued fraction of `pace` units."""
    terms: list[int] = []
    whole, part = _UNIT, pace
    while part and len(terms) < 12:
        terms.append(whole // part)
        whole, part = part, whole % part
    return terms


def _shares_worth_a_unet(
    num_steps: int, stages: Sequence[Stage], turns: int
) -> list[tuple[float, ...]]:
    """`_shares`, with no steps on an end of the replica where they would hardly matter."""
    free: list[int] = []
    seconds = best = _fair_seconds(num_steps, stages, free)
    for index in (len(stages) - 1, 0) if len(stages) > 1 else ():
        if any(stages[index].fixed_seconds):
            without = _fair_seconds(num_steps, stages, [*free, index])
            if without <= best * (1 + _WORTH_A_UNET):
                free.append(index)
                seconds = without
    return _shares(num_steps, stages, turns, seconds, free)


def _fair_seconds(num_steps: int, stages: Sequence[Stage], free: Sequence[int]) -> float:
    """The least time for each clip in which the stages can do all its steps, if steps could be cut.

    Stages in `free` do none, and neither does one whose encode or decode alone takes longer. By
    bisection: what can be done only grows with the time.
    """
    working = [stage for index, stage in enumerate(stages) if index not in free]
    if not working:
        return math.inf
    low = 0.0
    high = sum(max(stage.fixed_seconds) for stage in working)
    high += num_steps * max(max(stage.step_seconds) for stage in working)
    while low < (middle := (low + high) / 2) < high:
        done = sum(_mean_share(num_steps, stage, middle) for stage in working)
        low, high = (low, middle) if done >= num_steps else (middle, high)
    return high


def _mean_share(num_steps: int, stage: Stage, seconds: float) -> float:
    return math.fsum(
        min(num_steps, stage.steps_within(seconds, turn)) for turn in range(len(stage.ranks))
    ) / len(stage.ranks)


def _shares(
    num_steps: int, stages: Sequence[Stage], turns: int, seconds: float, free: Sequence[int]
) -> list[tuple[float, ...]]:
    """Steps of each stage in each turn, such that each turn's add up to `num_steps`.

    A turn whose last rank is slower leaves more to the stages before it, in their proportions.
    """
    *body, last = (
        [
            0.0 if index in free else min(num_steps, stage.steps_within(seconds, turn))
            for turn in range(len(stage.ranks))
        ]
        for index, stage in enumerate(stages)
    )
    whole = math.fsum(share[0] for share in body)
    shares = [
        tuple(
            share[0] * (num_steps - last[turn]) / whole if whole else 0.0 for turn in range(turns)
        )
        for share in body
    ]
    return [*shares, tuple(last)]


def _grid_positions(num_steps: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Sums of `shares` in units of 2^-64 steps, rounded so far that a float's errors vanish."""
    sums = (min(round(each * 2**32), num_steps << 32) for each in accumulate(shares[:-1]))
    return (0, *(each << 32 for each in sums), num_steps << _UNIT_BITS)
