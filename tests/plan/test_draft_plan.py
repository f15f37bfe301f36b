"""The action lists of a draft plan are complete, take the right rounds, and match sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.draft import Correction, DraftPlan, check_draft_schedule
from svdpp.plan.forecast import replay
from svdpp.plan.schedule import Schedule
from tests.plan.plans import costs

PLAN = DraftPlan(num_steps=8, start_steps=(0, 3, 5))


@st.composite
def draft_plans(draw: st.DrawFn) -> DraftPlan:
    num_steps = draw(st.integers(2, 30))
    later = draw(st.sets(st.integers(1, num_steps - 1), min_size=1, max_size=8))
    return DraftPlan(
        num_steps=num_steps, start_steps=(0, *sorted(later)), decodes=draw(st.booleans())
    )


def test_lists_of_a_wave_are_golden() -> None:
    lists = [" | ".join(map(str, actions)) for actions in PLAN.schedule([0])]
    assert lists == [
        "ENCODE c0 @0 | DENOISE c0 0:1 | SEND_START c0 0:3 >1 | DENOISE c0 1:4"
        " | SEND_STATE c0 @3 >1 | DENOISE c0 4:8 | DECODE c0 @8 | SEND_RESULT c0 @8 >2",
        "RECV c0 @3 <0 | RECV_STATE c0 @3 <0 | DENOISE c0 3:4 | SEND_START c0 3:5 >2"
        " | DENOISE c0 4:6 | SEND_STATE c0 @5 >2 | CORRECT c0 3:6 <0 | DENOISE c0 6:8"
        " | DECODE c0 @8 | SEND_RESULT c0 @8 >2",
        "RECV c0 @5 <1 | RECV_STATE c0 @5 <1 | DENOISE c0 5:7 | CORRECT c0 5:7 <1 | DENOISE c0 7:8"
        " | DECODE c0 @8 | FINISH c0 @8 | RECV_RESULT c0 @8 <1 | RECV_RESULT c0 @8 <0"
        " | COMPARE c0 @8 <1 | COMPARE c0 @8 <0",
    ]


def test_ranks_meet_as_often_as_their_starts_lie_apart() -> None:
    draft_plan = DraftPlan(num_steps=28, start_steps=(0, 8, 12, 17))
    assert draft_plan.corrections(0) == ()
    assert draft_plan.corrections(1) == (Correction(8, 16), Correction(16, 24))
    assert draft_plan.corrections(2) == tuple(Correction(at - 4, at) for at in (16, 20, 24, 28))
    assert draft_plan.corrections(3) == (Correction(17, 22), Correction(22, 27))
    assert [draft_plan.rounds(rank) for rank in range(4)] == [28, 21, 18, 14]
    assert draft_plan.num_evaluations == 28 + 20 + 16 + 11
    # 3 start latents, 8 states, 3 results
    assert draft_plan.num_messages == 14


@given(draft_plans(), st.integers(1, 3))
def test_every_walk_is_whole_and_no_word_is_lost(draft_plan: DraftPlan, num_clips: int) -> None:
    schedule = draft_plan.schedule(range(num_clips))
    check_draft_schedule(schedule, draft_plan.num_steps)
    steps = [a.end - a.start for rank in schedule for a in rank if a.kind is Kind.DENOISE]
    assert sum(steps) == num_clips * draft_plan.num_evaluations


@given(draft_plans())
def test_a_rank_is_done_after_its_rounds(draft_plan: DraftPlan) -> None:
    """Checked by the replay, which has no notion of rounds."""
    assert draft_plan.ready_at(Costs()) == [
        draft_plan.rounds(rank) for rank in range(draft_plan.world_size)
    ]


@given(draft_plans(), costs, st.integers(1, 3))
def test_no_costs_make_a_wave_wait_in_a_circle(
    draft_plan: DraftPlan, any_costs: Costs, clips: int
) -> None:
    spans = replay(draft_plan.schedule(range(clips)), any_costs)
    exact = max(span.end for span in spans if span.rank == 0)
    whole = any_costs.encode_seconds + draft_plan.num_steps * any_costs.step_seconds
    whole += any_costs.decode_seconds * draft_plan.decodes
    # Rank 0 waits only for its sends: without transfer times it is as fast as a single device.
    assert any_costs.transfer_seconds > 0 or exact == clips * whole


@given(draft_plans(), st.data())
def test_a_list_with_an_action_less_is_refused(draft_plan: DraftPlan, data: st.DataObject) -> None:
    schedule = [list(actions) for actions in draft_plan.schedule([0])]
    rank = data.draw(st.integers(0, draft_plan.world_size - 1))
    needed = [a for a in schedule[rank] if a.kind not in (Kind.DECODE, Kind.FINISH)]
    schedule[rank].remove(data.draw(st.sampled_from(needed)))
    with pytest.raises(ValueError, match=r"cannot do|ends with|unmatched|not encoded"):
        check_draft_schedule(_frozen(schedule), draft_plan.num_steps)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CORRECT c0 3:6 <0", "CORRECT c0 3:7 <0"),
        ("SEND_START c0 3:5 >2", "SEND_START c0 4:5 >2"),
        ("SEND_STATE c0 @5 >2", "SEND_STATE c0 @4 >2"),
        ("DENOISE c0 6:8", "DENOISE c0 6:9"),
        ("RECV c0 @3 <0", "RECV c0 @4 <0"),
        ("RECV_STATE c0 @3 <0", "SEND c0 @3 >0"),
    ],
)
def test_a_list_with_another_action_is_refused(old: str, new: str) -> None:
    rank = list(PLAN.schedule([0])[1])
    rank[rank.index(Action.parse(old))] = Action.parse(new)
    first, _, last = PLAN.schedule([0])
    with pytest.raises(ValueError, match=r"cannot do|other end"):
        check_draft_schedule((first, tuple(rank), last), 8)


def _frozen(schedule: list[list[Action]]) -> Schedule:
    return tuple(map(tuple, schedule))


@pytest.mark.parametrize(
    ("start_steps", "words"),
    [
        ((0,), "2 ranks or more"),
        ((1, 2), "rise from 0"),
        ((0, 3, 3), "rise from 0"),
        ((0, 4, 2), "rise from 0"),
        ((0, 8), "below the 8 steps"),
    ],
)
def test_starts_that_are_none(start_steps: tuple[int, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        DraftPlan(num_steps=8, start_steps=start_steps)


def test_links_and_roles() -> None:
    draft_plan = DraftPlan(num_steps=8, start_steps=(0, 2, 4, 6))
    assert draft_plan.links == ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3))
    assert [role.encode for role in draft_plan.roles] == [True, False, False, False]
    assert all(role.decode for role in draft_plan.roles)
    assert not any(role.decode for role in replace(draft_plan, decodes=False).roles)
