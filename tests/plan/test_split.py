"""The uniform rule and what it says when it cannot be followed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.split import StepRange, largest_world, split_steps


@given(st.integers(1, 60), st.integers(1, 20))
def test_ranges_follow_the_rule(world_size: int, count: int) -> None:
    ranges = split_steps(world_size * count, world_size)

    assert ranges == tuple(
        StepRange(rank, rank * count, (rank + 1) * count) for rank in range(world_size)
    )
    assert {part.num_steps for part in ranges} == {count}


def test_seven_ranks_of_28_steps() -> None:
    assert split_steps(28, 7)[0] == (0, 0, 4)
    assert split_steps(28, 7)[6] == (6, 24, 28)


@given(st.integers(1, 400), st.integers(1, 60))
def test_uneven_splits_name_the_nearest_counts(num_steps: int, world_size: int) -> None:
    if num_steps % world_size == 0 or world_size > num_steps:
        return
    with pytest.raises(RequestError) as caught:
        split_steps(num_steps, world_size)

    below = max(n for n in range(1, num_steps) if n % world_size == 0)
    above = min(n for n in range(num_steps, num_steps + world_size + 1) if n % world_size == 0)
    assert caught.value.message == (
        f"{num_steps} steps cannot be split evenly over {world_size} ranks; "
        f"the nearest step counts that can are {below} and {above}"
    )
    world = max(w for w in range(1, world_size) if num_steps % w == 0)
    assert caught.value.hint == f"use --steps {below} or --steps {above}, or --world {world}"


@pytest.mark.parametrize(
    ("num_steps", "world_size", "message", "hint"),
    [
        (0, 1, "the number of steps must be 1 or more, got 0", ""),
        (-3, 1, "the number of steps must be 1 or more, got -3", ""),
        (28, 0, "the number of ranks must be 1 or more, got 0", ""),
        (28, -2, "the number of ranks must be 1 or more, got -2", ""),
        (
            4,
            5,
            "5 ranks are more than 4 steps: a rank would have nothing to do",
            "use --steps 5 or more, or --world 4 or fewer",
        ),
    ],
)
def test_impossible_counts(num_steps: int, world_size: int, message: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        split_steps(num_steps, world_size)

    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(("num_steps", "world_size"), [(4, 5), (3, 7), (1, 2), (25, 28)])
def test_every_count_that_the_hint_names_works(num_steps: int, world_size: int) -> None:
    """ "--steps 5 or more, or --world 4 or fewer": each of those has to be a mend."""
    with pytest.raises(RequestError) as caught:
        split_steps(num_steps, world_size)
    words = caught.value.hint.replace(",", "").split()
    steps, world = int(words[words.index("--steps") + 1]), int(words[words.index("--world") + 1])

    assert split_steps(steps, world_size)
    assert split_steps(num_steps, world)


@pytest.mark.parametrize(
    ("num_steps", "at_most", "world"),
    [(28, 8, 7), (28, 28, 28), (25, 7, 5), (29, 28, 1), (1, 1, 1)],
)
def test_largest_world(num_steps: int, at_most: int, world: int) -> None:
    assert largest_world(num_steps, at_most) == world
