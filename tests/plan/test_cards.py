"""Which card each rank takes: any assignment that fits is found, equal cards keep their order."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.choose import assign_cards

gib = st.integers(0, 6).map(float)
needs_and_cards = st.integers(1, 5).flatmap(
    lambda count: st.tuples(*[st.lists(gib, min_size=count, max_size=count)] * 2)
)


@given(needs_and_cards)
def test_an_assignment_that_fits_is_found(needs_and_cards: tuple[list[float], list[float]]) -> None:
    needs, has = needs_and_cards
    cards = assign_cards(needs, has)

    fitting = [
        order
        for order in permutations(range(len(has)))
        if all(need <= has[card] for need, card in zip(needs, order, strict=True))
    ]
    assert (cards in fitting) if fitting else (cards is None)


@pytest.mark.long
@given(st.lists(gib, min_size=1, max_size=6), gib)
def test_equal_cards_keep_their_order(needs: list[float], room: float) -> None:
    cards = assign_cards(needs, [room] * len(needs))

    assert cards == (tuple(range(len(needs))) if max(needs) <= room else None)


@pytest.mark.parametrize(
    ("needs", "has", "cards"),
    [
        ((4, 3, 3), (80, 48, 48), (0, 1, 2)),
        ((30, 60, 30), (48, 48, 80), (0, 2, 1)),
        ((41, 30, 30, 35), (36, 36, 80, 48), (2, 0, 1, 3)),
        ((41, 41), (80, 36), None),
    ],
)
def test_larger_cards_take_larger_parts(
    needs: tuple[float, ...], has: tuple[float, ...], cards: tuple[int, ...] | None
) -> None:
    assert assign_cards(needs, has) == cards
