"""Actions as text, and action lists: golden text, properties, what `check_schedule` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import (
    Action,
    FrameRange,
    Kind,
    Route,
    Schedule,
    build_schedule,
    connect_rounds,
)
from svdpp.plan.costs import Costs
from svdpp.plan.layout import Layout
from svdpp.plan.split import StepRange
from tests.plan.plans import check_receives, check_schedule, route_lists

counts = st.integers(0, 10**6)
alone = st.sampled_from([Kind.ENCODE, Kind.LOAD, Kind.DROP, Kind.FINISH])
any_action = st.one_of(
    st.builds(Action.at, alone, counts, counts, st.just(-1), st.none()),
    st.builds(Action, st.just(Kind.DENOISE), *(counts,) * 3, st.integers(-1, 10**6), st.none()),
    st.builds(
        Action.at,
        st.sampled_from([Kind.RECV, Kind.SEND, Kind.SHARE, Kind.RETURN, Kind.GATHER]),
        *(counts, counts, counts),
        st.none() | st.builds(FrameRange, counts, counts, counts),
    ),
)


@given(any_action)
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert "\n" not in str(action)


@pytest.mark.parametrize(
    "text", ["", "ENCODE", "ENCODE c0", "PRAY c0 @0", "SEND c0 @7 >", "ENCODE c0 @0\n"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


# --- the lists -----------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent.parent / "golden"


def layout(num_steps: int, world_size: int, **options: Any) -> Layout:
    return Layout(num_steps=num_steps, world_size=world_size, **options)


def last_resumed(layout: Layout, num_clips: int, at: int) -> Schedule:
    *routes, last = map(layout.route, range(num_clips))
    return build_schedule([*routes, last.resumed(at)], layout.world_size)


PAIRS = layout(4, 4, cfg_parallel=2)
PAIR = layout(4, 2, cfg_parallel=2, decode_ranks=2, chunks=(8, 8, 8, 1))
GOLDEN_SCHEDULES = {
    "schedule_w4_n28_m3.txt": layout(28, 4).schedule(3),
    "schedule_w1_n4_m2.txt": layout(4, 1).schedule(2),
    "schedule_w2_n4_m2_no_decode.txt": layout(4, 2, decodes=False).schedule(2),
    "schedule_data_parallel_w2_n4_m3.txt": layout(4, 2, replicas=2).schedule(3),
    # A decode takes 2.5 steps: thirds of 10.5 give cuts 3.5 and 7, rounded for each clip.
    "schedule_alternating_w3_n8_m4.txt": layout(
        8, 3, split="alternating", costs=Costs(decode_seconds=2.5)
    ).schedule(4),
    # Rank 0 starts all clips; ranks 1 and 2 alternate to finish them.
    "schedule_two_decoders_w3_n8_m4.txt": layout(
        8, 3, split="balanced", decoders=2, costs=Costs(decode_seconds=4)
    ).schedule(4),
    # Ranks 0 and 1 are a pair, ranks 2 and 3 the next; the last clip was resumed after step 3.
    "schedule_pairs_w4_n4_m3.txt": last_resumed(PAIRS, 3, 3),
    # Both ranks of a pair decode; the last clip was resumed after its last step.
    "schedule_pair_decodes_w2_n4_m3.txt": last_resumed(PAIR, 3, 4),
    # All ranks decode, ranks 0 and 1 between their steps of later clips.
    "schedule_decode_ranks_w3_n6_m4.txt": layout(6, 3, decode_ranks=3, chunks=(8, 8, 8)).schedule(
        4
    ),
    # Rank 0 only encodes, rank 3 only decodes; two replicas share both.
    "schedule_two_replicas.txt": build_schedule(
        [
            Route(clip, (StepRange(0, 0, 0), StepRange(rank, 0, 4), StepRange(3, 4, 4)))
            for clip, rank in enumerate((1, 2, 1))
        ],
        4,
    ),
}


@pytest.mark.parametrize("name", GOLDEN_SCHEDULES)
def test_golden_text(name: str) -> None:
    lines = [
        f"rank {rank}: {action}\n"
        for rank, rank_actions in enumerate(GOLDEN_SCHEDULES[name])
        for action in rank_actions
    ]
    assert "".join(lines) == (GOLDEN / name).read_text(encoding="utf-8")


@given(route_lists())
def test_any_routes_give_lists_that_pass_the_check(case: tuple[list[Route], int]) -> None:
    """Each rank gets its clips in the order of the routes, and posts one receive ahead."""
    routes, _ = case
    schedule = build_schedule(*case)
    check_schedule(schedule, {route.clip: route.ranges[-1].end for route in routes})
    check_receives(schedule)
    decoded = [act.clip for acts in schedule for act in acts if act.kind is Kind.DECODE]
    assert sorted(decoded) == [route.clip for route in routes if route.decodes]
    for rank_actions in schedule:
        clips = [action.clip for action in rank_actions if action.kind is not Kind.RECV]
        assert clips == sorted(clips)


# --- check_schedule itself ------------------------------------------------------------------------

NUM_STEPS = 4
WHOLE, ALONE = layout(NUM_STEPS, 2).schedule(2), layout(NUM_STEPS, 1).schedule(2)
PAIRED = PAIRS.schedule(2)

Damage = Callable[[Action], tuple[Action, ...]]


def remove(_: Action) -> tuple[Action, ...]:
    return ()


def duplicate(action: Action) -> tuple[Action, ...]:
    return action, action


def damaged(schedule: Schedule, damage: Damage, *kinds: Kind) -> Iterator[Schedule]:
    """A copy of the schedule with one error, for each action of `kinds`."""
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            if action.kind in kinds:
                broken = (*actions[:index], *damage(action), *actions[index + 1 :])
                yield (*schedule[:rank], broken, *schedule[rank + 1 :])


# The check cannot find a missing DECODE, because clips can end with their latents.
MUTATIONS = [
    pytest.param(schedule, kind, damage, id=f"{kind}-{damage.__name__}-{len(schedule)}")
    for schedule in (WHOLE, ALONE, PAIRED)
    for kind in Kind
    for damage in (remove, duplicate)
    if any(action.kind is kind for actions in schedule for action in actions)
    and (kind, damage) != (Kind.DECODE, remove)
]


@pytest.mark.parametrize(("schedule", "kind", "damage"), MUTATIONS)
def test_check_catches_a_missing_or_doubled_action(
    schedule: Schedule, kind: Kind, damage: Damage
) -> None:
    for broken in damaged(schedule, damage, kind):
        with pytest.raises(ValueError, match=r"clip|transfer"):
            check_schedule(broken, NUM_STEPS)


LINKS = st.sets(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]),
    max_size=30,
)


@given(links=LINKS)
def test_links_open_in_rounds_of_disjoint_pairs(links: set[tuple[int, int]]) -> None:
    rounds = connect_rounds(links)
    assert sorted(pair for each in rounds for pair in each) == sorted(links)
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(set(ranks)) == len(ranks)
    busiest = max((sum(rank in pair for pair in links) for rank in range(10)), default=0)
    assert len(rounds) <= max(0, 2 * busiest - 1)


def test_a_chain_of_any_length_opens_in_two_rounds() -> None:
    rounds = connect_rounds((rank, rank + 1) for rank in range(7))
    assert rounds == [[(0, 1), (2, 3), (4, 5), (6, 7)], [(1, 2), (3, 4), (5, 6)]]
