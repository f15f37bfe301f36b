"""Actions are written as text and parsed back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, FrameRange, Kind

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
