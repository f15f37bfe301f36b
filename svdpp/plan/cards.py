"""Owns the assignment of ranks to the cards of one host, by the memory that they need and have."""

from __future__ import annotations

from collections.abc import Sequence


def assign_cards(needs: Sequence[float], has: Sequence[float]) -> tuple[int, ...] | None:
    """The card of each rank, such that every rank has the memory that it needs.

    It is rank r on card r if that fits. Otherwise a rank that needs more gets a card that has more;
    if any assignment fits, this one does.

    Args:
        needs: of each rank.
        has: of each card, as many as ranks, in the same unit.

    Returns:
        The card of each rank, by rank; None if no assignment fits.
    """
    ranks = range(len(needs))
    if _all_fit(needs, has):
        return tuple(ranks)
    by_need = sorted(ranks, key=needs.__getitem__)
    by_room = sorted(ranks, key=has.__getitem__)
    card_of = dict(zip(by_need, by_room, strict=True))
    cards = tuple(card_of[rank] for rank in ranks)
    return cards if _all_fit(needs, [has[card] for card in cards]) else None


def _all_fit(needs: Sequence[float], has: Sequence[float]) -> bool:
    return all(need <= room for need, room in zip(needs, has, strict=True))
