"""Actions are written as text and parsed back; any other text is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, FrameRange, Kind

counts = st.integers(0, 10**6)
alone = st.sampled_from([Kind.ENCODE, Kind.LOAD, Kind.DECODE, Kind.FINISH])
transfers = st.sampled_from([Kind.RECV, Kind.SEND])
any_action = st.one_of(
    st.builds(Action.at, alone, counts, counts, st.just(-1)),
    st.builds(Action.at, transfers, counts, counts, counts),
    st.builds(Action, st.just(Kind.DENOISE), counts, counts, counts, st.just(-1), st.none()),
    st.builds(
        Action.at,
        st.sampled_from([Kind.RECV, Kind.SHARE, Kind.RETURN, Kind.GATHER]),
        *(counts, counts, counts),
        st.builds(FrameRange, counts, counts, counts),
    ),
)

TEXTS = {
    "ENCODE c0 @0": Action.at(Kind.ENCODE, 0, 0),
    "LOAD c5 @14": Action.at(Kind.LOAD, 5, 14),
    "RECV c2 @7 <0": Action.at(Kind.RECV, 2, 7, 0),
    "DENOISE c3 7:14": Action(Kind.DENOISE, 3, 7, 14),
    "SEND c3 @14 >2": Action.at(Kind.SEND, 3, 14, 2),
    "DECODE c12 @28": Action.at(Kind.DECODE, 12, 28),
    "DECODE c12 @28 0:16/25": Action.at(Kind.DECODE, 12, 28, frames=FrameRange(0, 16, 25)),
    "RETURN c12 @28 >0 16:25/25": Action.at(Kind.RETURN, 12, 28, 0, FrameRange(16, 25, 25)),
    "GATHER c12 @28 <1 16:25/25": Action.at(Kind.GATHER, 12, 28, 1, FrameRange(16, 25, 25)),
    "FINISH c12 @28": Action.at(Kind.FINISH, 12, 28),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_each_kind(text: str) -> None:
    assert str(TEXTS[text]) == text
    assert Action.parse(text) == TEXTS[text]


@given(any_action)
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert "\n" not in str(action)


BAD = [
    *("", " ", "ENCODE", "ENCODE c0", "encode c0 @0", "ENCODE c0 @0 ", " ENCODE c0 @0"),
    *("ENCODE c0 @0\n", "ENCODE c-1 @0", "ENCODE c0 @-1", "ENCODE c0 @0 >1", "ENCODE c0 0:7"),
    *("ENCODE  c0 @0", "ENCODE c٣ @0", "RECV c0 @7", "RECV c0 @7 <", "RECV c0 @7 <-1"),
    *("RECV c0 @7 =0", "RECV c0 0:7 <0", "DENOISE c0 @7", "DENOISE c0 7", "DENOISE c0 0:7 >1"),
    *("DENOISE c0 0:", "DECODE c0 @28 <1", "DECODE c0 @28 0:1", "GATHER c0 @28 >1 0:1/2"),
    *("PRAY c0 @0", "ENCODE c0 @0; ENCODE c1 @0", "SEND c0 @7 <1", "RECV c0 @7 >1"),
]


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action") as caught:
        Action.parse(text)

    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_text_from_anywhere_is_read_back_or_refused(text: str) -> None:
    try:
        action = Action.parse(text)
    except ValueError:
        return
    assert Action.parse(str(action)) == action
