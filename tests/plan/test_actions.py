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
