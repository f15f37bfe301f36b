"""Rules that split the denoising steps of a clip into ranges, one range for each stage.

`uniform` makes equal ranges. `balanced` makes the slowest stage as fast as possible with whole
steps. `alternating` varies the ranges from clip to clip, so that all stages have equal work on
average.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from svdpp.errors import RequestError, pluralize

#: Largest number of denoising steps of a clip in a plan. Runs have a lower limit,
#: `config.limits.MAX_STEPS`.
MAX_PLANNED_STEPS = 65_536
MAX_RANKS = 65_536

#: Names of the two denoisers (experts) that some models have: the high-noise expert runs the first
#: steps of a clip, and the low-noise expert runs the later steps.
EXPERTS = ("high-noise", "low-noise")

#: Division of a clip's steps into ranges: 0, followed by the number of finished steps after each
#: stage. The last element is the number of steps of the clip.
Cuts = tuple[int, ...]

# Steps may be divided at fractional positions. The positions are integers in units of 2^-64 steps
# and not floats, so that all machines compute the same division.
_UNIT_BITS = 64
_UNIT = 1 << _UNIT_BITS
# 2^64 / golden ratio. The phases of successive clips (see `ClipCuts`) differ by this number, modulo
# 2^64. Such phases are spread evenly, however many clips there are.
_GOLDEN = 0x9E3779B97F4A7C15
# A stage that encodes or decodes gets steps only if they raise the throughput by more than this
# fraction. A smaller gain is not worth the memory of the denoiser, which the ranks of the stage
# need to load only if they run steps.
_MIN_GAIN_OF_STEPS = 0.005


class StepRange(NamedTuple):
    """Range of a clip's steps that one rank runs."""

    rank: int
    start: int
    """First step of the range; also the number of finished steps before the range."""
    end: int
    """Step after the last step of the range; also the number of finished steps after the range."""

    @property
    def num_steps(self) -> int:
        """Number of denoising steps in a rank's range."""
        return self.end - self.start


@dataclass(frozen=True)
class Stage:
    """Stage of a replica: one rank, or several ranks that take turns.

    `ranks[q % len(ranks)]` processes clip q of the replica.
    """

    ranks: tuple[int, ...]
    step_seconds: tuple[float, ...]
    """Seconds of a denoising step on each rank of the stage."""
    fixed_seconds: tuple[float, ...]
    """Seconds that each rank of the stage needs for a clip's encode and decode; 0 if the stage does
    neither."""

    def seconds(self, num_steps: int) -> float:
        """Return the seconds between two clips that leave a stage, given its number of steps.

        The slowest rank determines the result. If k ranks take turns, a clip leaves the stage k
        times as often as one rank finishes a clip.

        Args:
            num_steps: Number of steps that the stage runs of each clip.
        """
        turns = zip(self.fixed_seconds, self.step_seconds, strict=True)
        return max(fixed + num_steps * step for fixed, step in turns) / len(self.ranks)

    def steps_within(self, seconds: float, most: int) -> list[float]:
        """Return how many steps of a clip each rank of a stage has time for; may be fractions.

        If k ranks take turns, each has k times `seconds` for a clip. The time that the rank needs
        for the clip's encode and decode is subtracted.

        Args:
            seconds: Seconds from one clip of the replica to the next.
            most: Upper limit of each number: the number of steps of a clip.
        """
        turns = zip(self.fixed_seconds, self.step_seconds, strict=True)
        left = seconds * len(self.ranks)
        return [min(most, max(0.0, (left - fixed) / step)) for fixed, step in turns]


@dataclass(frozen=True)
class StageGroup:
    """Stages of a replica among which steps are divided.

    The group has either all stages of the replica, or only the stages that run one of a model's two
    experts (denoisers).
    """

    num_steps: int
    """Number of steps of a clip that all stages of the group run together."""
    stages: Sequence[Stage]

    def slowest_seconds(self, cuts: Cuts) -> float:
        """Return the seconds between finished clips, which the slowest stage of a group determines.

        Stages without steps are ignored.

        Args:
            cuts: Division of the group's steps, counted from 0.
        """
        counts = (after - before for before, after in pairwise(cuts))
        pairs = zip(self.stages, counts, strict=True)
        return max(stage.seconds(count) for stage, count in pairs if count)


def join_cuts(each: Iterable[Cuts]) -> Cuts:
    """Join the divisions of successive groups of stages, such as (0, 2, 4) and (0, 3).

    The result for this example is (0, 2, 4, 7).

    Args:
        each: Division of each group's steps; each begins with 0.
    """
    whole = [0]
    for cuts in each:
        done = whole[-1]
        whole += [done + cut for cut in cuts[1:]]
    return tuple(whole)


def check_uniform(num_steps: int, num_stages: int, world_size: int) -> None:
    """Raise a `RequestError` unless a clip's steps can be split evenly over the stages.

    Args:
        num_steps: Number of steps of a clip.
        num_stages: Number of stages of a replica.
        world_size: Number of ranks. If it equals `num_stages`, the error says "ranks" in place of
            "stages".

    Raises:
        RequestError: The steps cannot be split evenly; the error names the nearest possible
            numbers.
    """
    if num_steps % num_stages == 0:
        return
    below = num_steps // num_stages * num_stages
    nearest = [count for count in (below, below + num_stages) if count]
    can = "can are" if below else "can is"
    are_ranks = num_stages == world_size
    fewer = f", or use `world_size` {largest_world(num_steps, num_stages)}" if are_ranks else ""
    noun = "ranks" if are_ranks else "stages"
    raise RequestError(
        f"{pluralize(num_steps, 'step')} cannot be split evenly over {num_stages} {noun}; "
        f"the nearest step count{'s' * (below > 0)} that {can} {' and '.join(map(str, nearest))}",
        f"use {' or '.join(f'`num_inference_steps` {count}' for count in nearest)}"
        f"{fewer}, or use `split` alternating",
        details={
            **{"field": "num_inference_steps", "steps": num_steps},
            **{"ranks": num_stages, "nearest": nearest},
        },
    )


def check_counts(num_steps: int, world_size: int) -> None:
    """Raise a `RequestError` unless the numbers of steps and ranks are within a plan's limits.

    Args:
        num_steps: Number of steps of a clip.
        world_size: Number of ranks.

    Raises:
        RequestError: A number is not positive, or is above its limit.
    """
    counts = (
        ("num_inference_steps", "steps", num_steps, MAX_PLANNED_STEPS),
        ("world_size", "ranks", world_size, MAX_RANKS),
    )
    for field, name, count, most in counts:
        if not 1 <= count <= most:
            raise RequestError(
                f"the number of {name} must be 1 to {most}, got {count}",
                details={"field": field, name: count, "minimum": 1, "maximum": most},
            )


def largest_world(num_steps: int, at_most: int) -> int:
    """Return the largest number of ranks, up to a limit, that divides a clip's number of steps.

    Args:
        num_steps: Number of steps of a clip.
        at_most: Upper limit of the result, 1 or more.
    """
    return max(world for world in range(1, at_most + 1) if num_steps % world == 0)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in increasing order.

    Args:
        number: Whole number, 1 or more.
    """
    return [each for each in range(1, number + 1) if number % each == 0]


def uniform_cuts(group: StageGroup) -> Cuts:
    """Divide the steps of every clip so that each stage gets the same number of steps.

    Args:
        group: Steps and stages; the number of stages must divide the number of steps.
    """
    count = group.num_steps // len(group.stages)
    return tuple(range(0, group.num_steps + 1, count))


def balanced_cuts(group: StageGroup) -> Cuts:
    """Divide the steps of every clip so that the slowest stage is as fast as possible.

    Each step goes to the stage that would be fastest with one more step. This greedy rule is
    optimal: when the slowest stage got its last step, any other stage would have been at least as
    slow with this step. A stage may get no steps. Example of 10 steps on 3 ranks, where the last
    rank also decodes, which takes as long as 2 steps:

        rank 0 |0000|        steps 0:4
        rank 1 |0000|        steps 4:8
        rank 2 |00>>|        steps 8:10, decode

    Args:
        group: Steps and stages.
    """
    stages = group.stages
    counts = [0] * len(stages)
    offers = [(stage.seconds(1), index) for index, stage in enumerate(stages)]
    heapq.heapify(offers)
    for _ in range(group.num_steps):
        index = offers[0][1]
        counts[index] += 1
        heapq.heapreplace(offers, (stages[index].seconds(counts[index] + 1), index))
    return (0, *accumulate(counts))


@dataclass(frozen=True)
class ClipCuts:
    """Division of the steps of a replica's clips among its stages.

    A cut is the number of finished steps after which a clip goes to the next stage. The ideal
    position of a cut may be a fraction, such as 3.5. So it is rounded up for some clips and down
    for others: a position c becomes the cut floor(c + phase), with a phase from 0 to 1.

    Each clip has one phase for all of its cuts, so the cuts stay in order. The phases of successive
    clips are spread evenly over 0 to 1, so the mean of the cuts is c, and the number of steps of a
    stage varies by at most one.
    """

    positions: tuple[Cuts, ...]
    """Positions of a clip's cuts, in units of 2^-64 steps. Entry q is for clips q, q + n and so on
    of the replica, where n is the number of entries."""

    def cuts(self, index: int) -> Cuts:
        """Return the cuts of one clip of a replica: its positions plus its phase, rounded down.

        The phase of clip 0 is 0.5, so its positions are rounded to the nearest cut. The phase grows
        by 0.618 with each clip, modulo 1.

        Args:
            index: Index of the clip among the clips of the replica.
        """
        return self._rounded(index % len(self.positions), index * _GOLDEN + _UNIT // 2)

    def all_cuts(self) -> list[tuple[int, Cuts]]:
        """Return all cuts that a replica's clips can have, as tuples (turn, cuts).

        `turn` is an index in `positions`. The cuts result from rounding `positions[turn]`.
        """
        return [
            (turn, self._rounded(turn, phase))
            for turn, positions in enumerate(self.positions)
            # Positions and phases are fixed-point numbers, in which `_UNIT` is one step. As the
            # phase grows, the cuts change only where a position plus the phase becomes a whole
            # number of steps, that is, at the phase `-position % _UNIT`. So these phases give all
            # possible cuts.
            for phase in sorted({-position % _UNIT for position in positions})
        ]

    def mean_steps(self, place: int, turn: int, num_turns: int) -> float:
        """Return the mean number of steps that a rank runs of a clip, over all clips of the rank.

        Args:
            place: Index of the stage, from 0.
            turn: Index of the rank in the stage, from 0.
            num_turns: Number of ranks of the stage.
        """
        own = self.positions[turn::num_turns]
        return sum(each[place + 1] - each[place] for each in own) / len(own) / _UNIT

    def _rounded(self, turn: int, phase: int) -> Cuts:
        phase %= _UNIT
        return tuple((position + phase) >> _UNIT_BITS for position in self.positions[turn])


def alternating_cuts(groups: Sequence[StageGroup]) -> ClipCuts:
    """Divide the steps of clips so that all stages of a group have equal work on average.

    The last stage of a group may have several ranks, which take turns. If these ranks differ in
    speed, the positions of the cuts depend on the rank that finishes the clip.

    Example of seven steps on two ranks of equal speed. The ideal position of the cut is 3.5, so
    some clips are cut after 4 steps and some after 3, and both ranks stay busy:

        clip  phase  cut = floor(3.5 + phase)
        0     0.50   4                           rank 0 |00001112222333....|
        1     0.12   3                           rank 1 |....00011112223333|
        2     0.74   4
        3     0.35   3                           phase = fraction of 0.5 + clip * 0.618

    Args:
        groups: Successive groups of stages, such as the stages of each of two experts. The cut
            between two groups is the same for all clips.
    """
    by_group = [_positions_by_turn(group) for group in groups]
    turns = math.lcm(*map(len, by_group))
    # The position between two groups is a whole number of steps, so rounding does not change it.
    joined = (join_cuts(each[turn % len(each)] for each in by_group) for turn in range(turns))
    return ClipCuts(tuple(joined))


def _positions_by_turn(group: StageGroup) -> list[Cuts]:
    """Return the positions of a clip's cuts, for each rank of the last stage.

    Only the last stage can have several ranks, which take turns in finishing clips. If one of these
    ranks is slower, earlier stages run more steps of the clips that it finishes. The first or the
    last stage gets no steps if its steps would raise the throughput by less than
    `_MIN_GAIN_OF_STEPS`.
    """
    free: list[int] = []
    stages, num_steps = group.stages, group.num_steps
    seconds = best = min_period(group)
    for index in (len(stages) - 1, 0) if len(stages) > 1 else ():
        if any(stages[index].fixed_seconds):
            without = min_period(group, [*free, index])
            if without <= best * (1 + _MIN_GAIN_OF_STEPS):
                free.append(index)
                seconds = without
    *body, last = (
        [0.0] * len(stage.ranks) if index in free else stage.steps_within(seconds, num_steps)
        for index, stage in enumerate(stages)
    )
    whole = math.fsum(share for (share,) in body) or 1.0
    return [
        _grid_positions(num_steps, [share * (num_steps - own) / whole for (share,) in body])
        for own in last
    ]


def min_period(group: StageGroup, free: Sequence[int] = ()) -> float:
    """Return the shortest period (seconds between clips) in which the stages can run all steps.

    Stages may run fractions of steps here. A stage gets no steps if its encode or decode takes
    longer than the period. The period is found by bisection.

    Args:
        group: Steps and stages.
        free: Indices of stages that must run no steps.

    Returns:
        Seconds between clips; infinity if no stage can run steps.
    """
    num_steps = group.num_steps
    working = [stage for index, stage in enumerate(group.stages) if index not in free]
    if not working:
        return math.inf
    low = 0.0
    high = sum(max(stage.fixed_seconds) for stage in working)
    high += num_steps * max(max(stage.step_seconds) for stage in working)
    while low < (middle := (low + high) / 2) < high:
        shares = [stage.steps_within(middle, num_steps) for stage in working]
        done = sum(math.fsum(each) / len(each) for each in shares)
        low, high = (low, middle) if done >= num_steps else (middle, high)
    return high


def _grid_positions(num_steps: int, shares: Sequence[float]) -> Cuts:
    """Return the positions of a clip's cuts, in units of 2^-64 steps as in `ClipCuts`.

    The positions are the cumulative sums of `shares`, rounded to 2^-32 steps. The rounding removes
    small errors that arise when floats are added.

    Args:
        num_steps: Number of steps of the clip, which is the last position.
        shares: Number of steps of each stage except the last; may be fractions.
    """
    sums = (min(round(each * 2**32), num_steps << 32) for each in accumulate(shares))
    return (0, *(each << 32 for each in sums), num_steps << _UNIT_BITS)


# --- division of the steps of a model with two experts -------------------------------------------


def cut_stages(split: str, whole: StageGroup, boundary: int | None) -> ClipCuts:
    """Divide the steps of one replica's clips among its stages.

    Args:
        split: Name of the rule: "uniform", "balanced" or "alternating".
        whole: Steps of a clip, and all stages of the replica.
        boundary: Number of steps after which the expert (denoiser) changes; all clips are cut
            there. None: the model has one denoiser, or ranks can hold both experts.
    """
    rule = uniform_cuts if split == "uniform" else balanced_cuts
    seconds_of = (
        min_period if split == "alternating" else lambda group: group.slowest_seconds(rule(group))
    )
    groups: tuple[StageGroup, ...] = (whole,)
    if boundary is not None:
        even = _even_divisions(whole.num_steps, len(whole.stages), boundary)
        groups = _divide(whole, boundary, seconds_of, even if split == "uniform" else None)
    if split == "alternating":
        return alternating_cuts(groups)
    cuts = tuple(cut << _UNIT_BITS for cut in join_cuts(map(rule, groups)))
    return ClipCuts((cuts,) * len(whole.stages[-1].ranks))


def check_expert_split(num_steps: int, num_stages: int, boundary: int) -> None:
    """Raise a `RequestError` unless each expert's steps can be split evenly over its own stages.

    The stages of a replica may be divided between the experts (denoisers) in any way.

    Args:
        num_steps: Number of steps of a clip.
        num_stages: Number of stages of a replica.
        boundary: Number of steps of the high-noise expert.

    Raises:
        RequestError: No division of the stages splits the steps of each expert evenly.
    """
    if _even_divisions(num_steps, num_stages, boundary):
        return
    first, second = EXPERTS
    raise RequestError(
        f"{boundary} {first} and {num_steps - boundary} {second} steps cannot be split evenly over "
        f"{num_stages} stages with one expert each",
        "use `split` balanced or `split` alternating",
        details={
            **{"steps": num_steps, "stages": num_stages, "expert_boundary": boundary},
            **{"first_steps": boundary, "second_steps": num_steps - boundary},
        },
    )


def _even_divisions(num_steps: int, num_stages: int, boundary: int) -> list[int]:
    """Return the possible numbers of stages of the high-noise expert, for the uniform split.

    With each of these numbers, the steps of both experts can be split evenly over their stages.
    """
    fewer = [count for count in divisors(boundary) if count < num_stages]
    return [count for count in fewer if (num_steps - boundary) % (num_stages - count) == 0]


def _divide(
    whole: StageGroup,
    boundary: int,
    seconds_of: Callable[[StageGroup], float],
    counts: Iterable[int] | None,
) -> tuple[StageGroup, StageGroup]:
    """Divide a replica's stages into a group for each expert; return both groups.

    Of all possible divisions, the result is the one whose slower group is fastest. `seconds_of`
    returns the seconds between finished clips of a group; the seconds must not grow if the group
    gets more stages. `counts` are the allowed numbers of stages for the high-noise expert; None:
    any number is allowed.
    """

    def groups(count: int) -> tuple[StageGroup, StageGroup]:
        first, second = whole.stages[:count], whole.stages[count:]
        return StageGroup(boundary, first), StageGroup(whole.num_steps - boundary, second)

    def is_first_faster(count: int) -> bool:
        first, second = map(seconds_of, groups(count))
        return first <= second

    if counts is None:
        # The more stages the first group has, the faster it is, and the slower the second group is.
        # The best count is the smallest one with which the first group is faster than the second,
        # or one less.
        last = len(whole.stages) - 1
        faster = 1 + bisect_left(range(1, last), True, key=is_first_faster)
        counts = range(max(1, faster - 1), faster + 1)
    return groups(min(counts, key=lambda count: max(map(seconds_of, groups(count)))))
