"""The uniform rule and its errors; balanced equals brute force; properties of alternating."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.split import Part, Stage, alternating_cuts, balanced_cuts, check_uniform
from tests.plan.plans import steps_in


@given(st.integers(1, 400), st.integers(1, 60))
def test_uneven_splits_name_the_nearest_counts(num_steps: int, world_size: int) -> None:
    if num_steps % world_size == 0 or world_size > num_steps:
        return
    with pytest.raises(RequestError) as caught:
        check_uniform(num_steps, world_size, world_size)

    below = max(n for n in range(1, num_steps) if n % world_size == 0)
    above = min(n for n in range(num_steps, num_steps + world_size + 1) if n % world_size == 0)
    assert caught.value.message == (
        f"{num_steps} steps cannot be split evenly over {world_size} ranks; "
        f"the nearest step counts that can are {below} and {above}"
    )
    world = max(w for w in range(1, world_size) if num_steps % w == 0)
    assert caught.value.hint == (
        f"use --steps {below} or --steps {above}, or --world {world}, or --split alternating"
    )


def test_more_ranks_than_steps() -> None:
    with pytest.raises(RequestError) as caught:
        check_uniform(4, 5, 5)
    assert caught.value.message == (
        "4 steps cannot be split evenly over 5 ranks; the nearest step count that can is 5"
    )
    assert caught.value.hint == "use --steps 5, or --world 4, or --split alternating"


def test_fewer_stages_of_several_ranks_are_not_fewer_ranks() -> None:
    with pytest.raises(RequestError, match="over 8 stages; ") as caught:
        check_uniform(28, 8, 16)
    assert "--world" not in caught.value.hint


# --- balanced and alternating ---------------------------------------------------------------------


@st.composite
def replica_ranks(draw: st.DrawFn) -> list[Stage]:
    """A few stages of one rank or several alternating ranks, at any speeds."""
    seconds = st.integers(0, 32).map(lambda quarters: quarters / 4)
    step = st.integers(1, 12).map(lambda quarters: quarters / 4)
    stages = []
    for index in range(length := draw(st.integers(1, 4))):
        turns = draw(st.integers(1, 3)) if index == length - 1 else 1
        stages.append(
            Stage(
                tuple(range(index, index + turns)),
                tuple(draw(step) for _ in range(turns)),
                tuple(draw(seconds) for _ in range(turns)),
            )
        )
    return stages


def slowest(stages: list[Stage], counts: tuple[int, ...]) -> float:
    return max(stage.seconds(count) for stage, count in zip(stages, counts, strict=True))


def counts_of(cuts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(after - before for before, after in itertools.pairwise(cuts))


@given(st.integers(1, 8), replica_ranks())
def test_balanced_is_as_good_as_any_split(num_steps: int, stages: list[Stage]) -> None:
    every = itertools.product(range(num_steps + 1), repeat=len(stages))
    best = min(slowest(stages, counts) for counts in every if sum(counts) == num_steps)
    counts = counts_of(balanced_cuts(Part(num_steps, stages)))

    assert sum(counts) == num_steps
    assert min(counts) >= 0
    assert slowest(stages, counts) == best


def one_rank_each(*fixed: float, step: float = 1.0) -> list[Stage]:
    return [Stage((rank,), (step,), (seconds,)) for rank, seconds in enumerate(fixed)]


@given(st.integers(1, 12), replica_ranks(), st.integers(0, 500))
def test_alternating_ranges_are_in_order_and_near_their_means(
    num_steps: int, stages: list[Stage], index: int
) -> None:
    alternating = alternating_cuts([Part(num_steps, stages)])
    cuts = alternating.cuts(index)

    assert (cuts[0], cuts[-1]) == (0, num_steps)
    assert list(cuts) == sorted(cuts)
    turns = len(alternating.positions)
    positions = [each / 2**64 for each in alternating.positions[index % turns]]
    assert all(abs(cut - real) < 1 + 1e-9 for cut, real in zip(cuts, positions, strict=True))


@given(st.integers(1, 30), replica_ranks())
def test_stages_that_do_steps_have_equal_work(num_steps: int, stages: list[Stage]) -> None:
    """On average over clips, and within half a percent of the optimum."""
    alternating = alternating_cuts([Part(num_steps, stages)])
    loads = []
    for place, stage in enumerate(stages):
        turns = len(stage.ranks)
        for turn in range(turns):
            steps = alternating.mean_steps(place, turn, turns)
            fixed, step = stage.fixed_seconds[turn], stage.step_seconds[turn]
            if steps > num_steps * (1 - 1e-9):
                continue  # a decoder that does all steps of a clip cannot do more
            if steps > 1e-9:
                loads.append((fixed + steps * step) / turns)
    if loads:
        assert max(loads) == pytest.approx(min(loads), rel=1e-6, abs=1e-6)
        assert steps_in(max(loads) / 1.00501 - 1e-6, Part(num_steps, stages)) < num_steps


@given(st.integers(1, 30), replica_ranks(), st.integers(1, 300))
def test_over_any_clips_a_stage_is_within_steps_of_its_mean(
    num_steps: int, stages: list[Stage], num_clips: int
) -> None:
    alternating = alternating_cuts([Part(num_steps, stages)])
    turns = len(alternating.positions)
    for turn, positions in enumerate(alternating.positions):
        means = [(after - each) / 2**64 for each, after in itertools.pairwise(positions)]
        own = [counts_of(alternating.cuts(index)) for index in range(turn, num_clips, turns)]
        for mean, counts in zip(means, zip(*own, strict=True), strict=False):
            assert abs(sum(counts) - mean * len(own)) < 3


@pytest.mark.parametrize("turns", [2, 4, 5, 6, 8, 13, 21])
def test_decoders_own_clips_are_spread_as_evenly_as_all(turns: int) -> None:
    """13 golden ratios are 8.034, so their phases at every 13th clip would hardly move."""
    tail = Stage(tuple(range(1, turns + 1)), (1.0,) * turns, (0.0,) * turns)
    alternating = alternating_cuts([Part(turns * 7 + 3, [Stage((0,), (1.0,), (0.63,)), tail])])
    steps = [counts_of(alternating.cuts(index)) for index in range(100 * turns)]
    for turn in range(turns):
        assert furthest([count for _, count in steps[turn::turns]]) < 2.2
    assert furthest([count for count, _ in steps]) < 4.9


def furthest(counts: list[int]) -> float:
    """The largest difference between the cumulative counts and their mean."""
    mean = sum(counts) / len(counts)
    return max(abs(total - (n + 1) * mean) for n, total in enumerate(itertools.accumulate(counts)))


def test_a_scrap_of_a_step_is_not_worth_the_unets_weights() -> None:
    """Decode takes 0.05 steps less than a fair share: a rank that only decodes costs little."""
    nearly = alternating_cuts([Part(24, one_rank_each(0, 0, 0, 0, 0, 0, 4 - 0.05))])
    assert nearly.mean_steps(6, 0, 1) == 0
    clearly = alternating_cuts([Part(24, one_rank_each(0, 0, 0, 0, 0, 0, 3.0))])
    assert clearly.mean_steps(6, 0, 1) == pytest.approx(27 / 7 - 3)


@given(st.integers(1, 12), st.integers(1, 12), replica_ranks())
def test_the_second_part_is_alternating_as_if_it_were_alone(
    first: int, second: int, stages: list[Stage]
) -> None:
    part = Part(second, stages)
    alone, both = alternating_cuts([part]), alternating_cuts([Part(first, one_rank_each(0)), part])
    turns = len(both.positions)

    for index in range(3 * turns):
        cuts = both.cuts(index)
        assert cuts == (0, *(first + cut for cut in alone.cuts(index)))
        assert (index % turns, cuts) in both.all_cuts()
