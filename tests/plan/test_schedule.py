"""Action lists: golden text, properties, and errors that `check_schedule` finds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import (
    Route,
    Schedule,
    build_schedule,
    connect_rounds,
)
from svdpp.plan.split import StepRange, split_steps
from tests.plan.plans import Pipeline, data_parallel_routes, pipeline_routes, pipelines, route_lists
from tests.plan.schedule_check import check_schedule

GOLDEN = Path(__file__).parent.parent / "golden"


def as_text(schedule: Schedule) -> str:
    return "".join(
        f"rank {rank}: {action}\n"
        for rank, rank_actions in enumerate(schedule)
        for action in rank_actions
    )


def from_text(text: str, world_size: int) -> Schedule:
    lists: list[list[Action]] = [[] for _ in range(world_size)]
    for line in text.splitlines():
        rank, _, action = line.removeprefix("rank ").partition(": ")
        lists[int(rank)].append(Action.parse(action))
    return tuple(map(tuple, lists))


PAIRS = Layout(num_steps=4, world_size=4, cfg_parallel=2)
PAIR = Layout(num_steps=4, world_size=2, cfg_parallel=2, decode_ranks=2, chunks=(8, 8, 8, 1))

GOLDEN_SCHEDULES = {
    "schedule_w4_n28_m3.txt": Pipeline(28, 4, 3).schedule,
    "schedule_w1_n4_m2.txt": Pipeline(4, 1, 2).schedule,
    "schedule_w2_n4_m2_no_decode.txt": Pipeline(4, 2, 2, decodes=False).schedule,
    "schedule_data_parallel_w2_n4_m3.txt": build_schedule(data_parallel_routes(4, 2, range(3)), 2),
    # A decode takes 2.5 steps: thirds of 10.5 give cuts 3.5 and 7, rounded for each clip.
    "schedule_alternating_w3_n8_m4.txt": build_schedule(
        Layout(
            num_steps=8, world_size=3, split="alternating", costs=Costs(decode_seconds=2.5)
        ).routes(range(4)),
        3,
    ),
    # Rank 0 starts all clips; ranks 1 and 2 alternate to finish them.
    "schedule_two_decoders_w3_n8_m4.txt": build_schedule(
        Layout(
            num_steps=8, world_size=3, split="balanced", decoders=2, costs=Costs(decode_seconds=4)
        ).routes(range(4)),
        3,
    ),
    # Ranks 0 and 1 are a pair, ranks 2 and 3 the next; the last clip was resumed after step 3.
    "schedule_pairs_w4_n4_m3.txt": build_schedule(
        [*PAIRS.routes(range(2)), PAIRS.route(2).resumed(3)], 4
    ),
    # Both ranks of a pair decode; the last clip was resumed after its last step.
    "schedule_pair_decodes_w2_n4_m3.txt": build_schedule(
        [*PAIR.routes(range(2)), PAIR.route(2).resumed(4)], 2
    ),
    # All ranks decode, ranks 0 and 1 between their steps of later clips.
    "schedule_decode_ranks_w3_n6_m4.txt": build_schedule(
        Layout(num_steps=6, world_size=3, decode_ranks=3, chunks=(8, 8, 8)).routes(range(4)), 3
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
    text = (GOLDEN / name).read_text(encoding="utf-8")

    assert as_text(GOLDEN_SCHEDULES[name]) == text
    assert from_text(text, len(GOLDEN_SCHEDULES[name])) == GOLDEN_SCHEDULES[name]


@given(route_lists())
def test_any_routes_give_lists_that_pass_the_check(case: tuple[list[Route], int]) -> None:
    """Each rank gets its clips in the order of the routes, and posts one receive ahead.

    Each clip is encoded first, delivered last, and both once.
    """
    routes, _ = case
    schedule = build_schedule(*case)
    check_schedule(schedule, {route.clip: route.ranges[-1].end for route in routes})
    for rank_actions in schedule:
        posted: set[int] = set()
        for action in rank_actions:
            if action.kind is Kind.RECV:
                posted.add(action.clip)
            else:
                posted.discard(action.clip)
                assert len(posted) <= 1
        clips = [action.clip for action in rank_actions if action.kind is not Kind.RECV]
        assert clips == sorted(clips)
    for route in routes:
        own = {
            rank: [action for action in rank_actions if action.clip == route.clip]
            for rank, rank_actions in enumerate(schedule)
        }
        in_order = [action for part in route.ranges for action in own.pop(part.rank)]
        assert not any(own.values())
        kinds = [action.kind for action in in_order]
        assert kinds[0] is Kind.ENCODE
        assert kinds[-1] is Kind.FINISH
        assert kinds.count(Kind.ENCODE) == kinds.count(Kind.FINISH) == 1
        assert kinds.count(Kind.DECODE) == route.decodes
        assert [0, *(action.end for action in in_order)][:-1] == [a.start for a in in_order]
        assert in_order[-1].end == route.ranges[-1].end


@given(pipelines(), st.data())
def test_a_resumed_way_does_the_steps_that_are_left(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, pipeline.num_steps))
    routes = pipeline_routes(pipeline.ranges, range(pipeline.num_clips))
    resumed = [route.resumed(at) if route.clip % 2 else route for route in routes]
    schedule = build_schedule(resumed, pipeline.world_size)

    check_schedule(schedule, pipeline.num_steps)
    steps = dict.fromkeys(range(pipeline.num_clips), 0)
    loads = []
    for rank_actions in schedule:
        for action in rank_actions:
            steps[action.clip] += action.end - action.start
            loads += [(action.clip, action.start)] if action.kind is Kind.LOAD else []
    assert sorted(loads) == [(clip, at) for clip in steps if clip % 2]
    assert steps == {clip: pipeline.num_steps - at * (clip % 2) for clip in steps}


# --- errors that check_schedule finds -------------------------------------------------------------

NUM_STEPS = 4
WHOLE = build_schedule(pipeline_routes(split_steps(NUM_STEPS, 2), range(2)), 2)
ALONE = build_schedule(pipeline_routes(split_steps(NUM_STEPS, 1), range(2)), 1)
PAIRED = build_schedule(PAIRS.routes(range(2)), 4)

Damage = Callable[[list[Action], int], None]


def remove(actions: list[Action], index: int) -> None:
    del actions[index]


def duplicate(actions: list[Action], index: int) -> None:
    actions.insert(index, actions[index])


def damaged(schedule: Schedule, kind: Kind, damage: Damage) -> Iterator[Schedule]:
    """A copy of the schedule with one error, for each action of `kind`."""
    for rank, rank_actions in enumerate(schedule):
        for index, action in enumerate(rank_actions):
            if action.kind is kind:
                copy = [list(actions) for actions in schedule]
                damage(copy[rank], index)
                yield tuple(map(tuple, copy))


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
    for broken in damaged(schedule, kind, damage):
        with pytest.raises(ValueError, match=r"clip|transfer"):
            check_schedule(broken, NUM_STEPS)


def test_check_catches_neighbours_of_one_clip_in_the_wrong_order() -> None:
    kinds = set()
    for rank, rank_actions in enumerate(WHOLE):
        for index, pair in enumerate(itertools.pairwise(rank_actions)):
            if pair[0].clip == pair[1].clip:
                kinds.add((pair[0].kind, pair[1].kind))
                broken = (*rank_actions[:index], *pair[::-1], *rank_actions[index + 2 :])
                with pytest.raises(ValueError, match="clip"):
                    check_schedule((*WHOLE[:rank], broken, *WHOLE[rank + 1 :]), NUM_STEPS)
    assert len(kinds) == 4


def test_check_catches_work_before_its_receive() -> None:
    work = tuple(action for action in WHOLE[1] if action.kind is not Kind.RECV)
    receives = tuple(action for action in WHOLE[1] if action.kind is Kind.RECV)
    with pytest.raises(ValueError, match="clip"):
        check_schedule((WHOLE[0], work + receives), NUM_STEPS)


def prove(schedule: Schedule, num_steps: int) -> None:
    """All checks of a schedule before it is performed."""
    check_schedule(schedule, num_steps)
    replay(schedule, Costs())


def test_receives_in_another_order_than_the_sends_are_caught() -> None:
    """Packets on one link arrive in the order in which they are sent."""
    first, second, *work = WHOLE[1]
    assert first.kind is second.kind is Kind.RECV
    with pytest.raises(ValueError, match="c0 @2"):
        prove((WHOLE[0], (second, first, *work)), NUM_STEPS)


def test_check_catches_every_change_of_one_number() -> None:
    text = as_text(WHOLE)
    for found in re.finditer(r"(?<!rank )\b\d|(?<=c)\d", text):
        for digit in set("0123456789") - {found[0]}:
            changed = text[: found.start()] + digit + text[found.end() :]
            with pytest.raises(ValueError, match=r"clip|transfer"):
                check_schedule(from_text(changed, 2), NUM_STEPS)


def test_check_wants_all_steps() -> None:
    with pytest.raises(ValueError, match="rank 1 cannot do DECODE c0 @4"):
        check_schedule(WHOLE, 6)


@given(pipelines(), st.data())
def test_a_list_with_two_actions_swapped_is_caught_or_is_as_good(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    lists = [list(rank_actions) for rank_actions in pipeline.schedule]
    swapped = lists[data.draw(st.integers(0, pipeline.world_size - 1))]
    places = st.integers(0, len(swapped) - 1)
    one, other = data.draw(places), data.draw(places)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    schedule = tuple(map(tuple, lists))
    try:
        prove(schedule, pipeline.num_steps)
    except ValueError:
        return
    for rank, rank_actions in enumerate(schedule):
        steps_done: dict[int, int] = {}  # of the clips that this rank has received
        for action in rank_actions:
            if action.kind in (Kind.RECV, Kind.ENCODE):
                steps_done[action.clip] = action.start
            assert steps_done.get(action.clip) == action.start, f"rank {rank} at {action}"
            steps_done[action.clip] = action.end


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
