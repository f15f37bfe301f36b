"""A wave's lists are performed to the last step, take the rounds they should, and lose no word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.draft import Meeting, Wave, check_wave
from svdpp.plan.forecast import replay
from svdpp.plan.schedule import Schedule
from tests.plan.plans import costs

WAVE = Wave(num_steps=8, starts=(0, 3, 5))


@st.composite
def waves(draw: st.DrawFn) -> Wave:
    num_steps = draw(st.integers(2, 30))
    later = draw(st.sets(st.integers(1, num_steps - 1), min_size=1, max_size=8))
    return Wave(num_steps=num_steps, starts=(0, *sorted(later)), decodes=draw(st.booleans()))


def test_lists_of_a_wave_are_golden() -> None:
    lists = [" | ".join(map(str, actions)) for actions in WAVE.schedule([0])]
    assert lists == [
        "ENCODE c0 @0 | DENOISE c0 0:1 | LEAP c0 0:3 >1 | DENOISE c0 1:4 | TELL c0 @3 >1"
        " | DENOISE c0 4:8 | DECODE c0 @8 | TELL c0 @8 >2",
        "RECV c0 @3 <0 | HEAR c0 @3 <0 | DENOISE c0 3:4 | LEAP c0 3:5 >2 | DENOISE c0 4:6"
        " | TELL c0 @5 >2 | CORRECT c0 3:6 <0 | DENOISE c0 6:8 | DECODE c0 @8 | TELL c0 @8 >2",
        "RECV c0 @5 <1 | HEAR c0 @5 <1 | DENOISE c0 5:7 | CORRECT c0 5:7 <1 | DENOISE c0 7:8"
        " | DECODE c0 @8 | DELIVER c0 @8 | HEAR c0 @8 <1 | HEAR c0 @8 <0 | REVIEW c0 @8 <1"
        " | REVIEW c0 @8 <0",
    ]


def test_ranks_meet_as_often_as_their_starts_lie_apart() -> None:
    wave = Wave(num_steps=28, starts=(0, 8, 12, 17))
    assert wave.meetings(0) == ()
    assert wave.meetings(1) == (Meeting(8, 16), Meeting(16, 24))
    assert wave.meetings(2) == tuple(Meeting(at - 4, at) for at in (16, 20, 24, 28))
    assert wave.meetings(3) == (Meeting(17, 22), Meeting(22, 27))
    assert [wave.rounds(rank) for rank in range(4)] == [28, 21, 18, 14]
    assert wave.num_evaluations == 28 + 20 + 16 + 11
    # 3 long steps, 8 words on the way, 3 results
    assert wave.num_messages == 14


@given(waves(), st.integers(1, 3))
def test_every_walk_is_whole_and_no_word_is_lost(wave: Wave, num_clips: int) -> None:
    schedule = wave.schedule(range(num_clips))
    check_wave(schedule, wave.num_steps)
    steps = [a.end - a.start for rank in schedule for a in rank if a.kind is Kind.DENOISE]
    assert sum(steps) == num_clips * wave.num_evaluations


@given(waves())
def test_a_rank_is_done_after_its_rounds(wave: Wave) -> None:
    """As the replay has it, which knows of messages and not of rounds."""
    assert wave.ready_at(Costs()) == [wave.rounds(rank) for rank in range(wave.world_size)]


@given(waves(), costs, st.integers(1, 3))
def test_no_costs_make_a_wave_wait_in_a_circle(wave: Wave, any_costs: Costs, clips: int) -> None:
    spans = replay(wave.schedule(range(clips)), any_costs)
    exact = max(span.end for span in spans if span.rank == 0)
    whole = any_costs.encode_seconds + wave.num_steps * any_costs.step_seconds
    whole += any_costs.decode_seconds * wave.decodes
    # Rank 0 waits for nobody but the wire: without hops it is done when one device would be.
    assert any_costs.hop_seconds > 0 or exact == clips * whole


@given(waves(), st.data())
def test_a_list_with_an_action_less_is_refused(wave: Wave, data: st.DataObject) -> None:
    schedule = [list(actions) for actions in wave.schedule([0])]
    rank = data.draw(st.integers(0, wave.world_size - 1))
    needed = [a for a in schedule[rank] if a.kind not in (Kind.DECODE, Kind.DELIVER)]
    schedule[rank].remove(data.draw(st.sampled_from(needed)))
    with pytest.raises(ValueError, match=r"cannot do|left with|other end|not begun"):
        check_wave(_frozen(schedule), wave.num_steps)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CORRECT c0 3:6 <0", "CORRECT c0 3:7 <0"),
        ("LEAP c0 3:5 >2", "LEAP c0 4:5 >2"),
        ("TELL c0 @5 >2", "TELL c0 @4 >2"),
        ("DENOISE c0 6:8", "DENOISE c0 6:9"),
        ("RECV c0 @3 <0", "RECV c0 @4 <0"),
        ("HEAR c0 @3 <0", "SEND c0 @3 >0"),
    ],
)
def test_a_list_with_another_action_is_refused(old: str, new: str) -> None:
    rank = list(WAVE.schedule([0])[1])
    rank[rank.index(Action.parse(old))] = Action.parse(new)
    first, _, last = WAVE.schedule([0])
    with pytest.raises(ValueError, match=r"cannot do|other end"):
        check_wave((first, tuple(rank), last), 8)


def _frozen(schedule: list[list[Action]]) -> Schedule:
    return tuple(map(tuple, schedule))


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((0,), "2 ranks or more"),
        ((1, 2), "rise from 0"),
        ((0, 3, 3), "rise from 0"),
        ((0, 4, 2), "rise from 0"),
        ((0, 8), "below the 8 steps"),
    ],
)
def test_starts_that_are_none(starts: tuple[int, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Wave(num_steps=8, starts=starts)


def test_links_and_roles() -> None:
    wave = Wave(num_steps=8, starts=(0, 2, 4, 6))
    assert wave.hops == ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3))
    assert [role.encode for role in wave.roles] == [True, False, False, False]
    assert all(role.decode for role in wave.roles)
    assert not any(role.decode for role in replace(wave, decodes=False).roles)
