"""The decision whether a difference between rounds is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from svdpp.errors import RequestError

#: Two-sided 99.9% quantiles of Student's t, by degrees of freedom; between two entries the smaller
#: one applies, which errs towards noise. The level is strict because ten figures are compared: at
#: 99% each, every tenth pair of equal benches would be called different.
_T999 = {
    1: 636.62,
    2: 31.599,
    3: 12.924,
    4: 8.610,
    5: 6.869,
    6: 5.959,
    7: 5.408,
    8: 5.041,
    9: 4.781,
    10: 4.587,
    15: 4.073,
    20: 3.850,
    30: 3.646,
    60: 3.460,
    120: 3.373,
}

_ENOUGH_ROUNDS = 4

#: Ratios closer to 1 than this are never called different, however small their spread.
NEGLIGIBLE = 0.01

#: With fewer rounds the range is so wide that no difference lies outside it.
MIN_ROUNDS = 3


def check_rounds(repeats: int, what: str) -> None:
    """Checks that a bench has enough rounds to distinguish a difference from noise."""
    if repeats < MIN_ROUNDS:
        raise RequestError(
            f"{what} {MIN_ROUNDS} rounds or more, to know the noise, got {repeats}",
            f"--measure.repeats={MIN_ROUNDS + 2}",
        )


class Difference(NamedTuple):
    """The difference of two means, B minus A."""

    value: float
    low: float | None
    """With `high` the bounds of the true difference at 99.9% confidence; None for one round."""
    high: float | None
    is_apart: bool
    """Whether the gap between A's and B's rounds exceeds the spread of either."""

    @property
    def is_noise(self) -> bool | None:
        """Whether the difference is within noise; None if unknown."""
        if self.low is None or self.high is None:
            return None
        return self.low <= 0 <= self.high and not self.is_apart


def difference(
    a: Sequence[float], b: Sequence[float], drift: float = 0.0, *, spreads: float = 1.0
) -> Difference:
    """B minus A, with Welch's interval.

    Args:
        a: one value for each round of A.
        b: the same for B.
        drift: how far the machine itself has changed; widens the interval.
        spreads: how many times the spread of the rounds a gap between A and B must exceed.
    """
    value = statistics.fmean(b) - statistics.fmean(a)
    low = high = None
    if min(len(a), len(b)) > 1:
        errors = [statistics.variance(each) / len(each) for each in (a, b)]
        margin = _t999(errors, [len(a), len(b)]) * math.sqrt(sum(errors)) + abs(drift)
        low, high = value - margin, value + margin
    return Difference(value, low, high, _are_apart(a, b, abs(drift), spreads))


def difference_from_bound(bound: float, rounds: Sequence[float]) -> Difference:
    """`rounds` minus `bound`, with Student's interval.

    A bound has no spread of its own, so the rounds lie beyond it by chance more often than two sets
    lie apart. At three spreads that happens to 4 rounds in 3 of 10,000 cases (by simulation: normal
    and Student's t with 2 degrees of freedom; exponential 60).
    """
    return difference([bound] * len(rounds), rounds, spreads=3.0)


def _are_apart(a: Sequence[float], b: Sequence[float], drift: float, spreads: float) -> bool:
    """Whether the gap between two sets, less the drift of the machine, is wider than either set.

    It assumes no distribution: a single disturbed round widens Welch's interval far more than this
    one. For two equal sets of 4 values it is true in 6 of 10,000 cases (by simulation: normal,
    exponential and Student's t with 2 degrees of freedom); with fewer values it is more often true.
    """
    gap = max(min(b) - max(a), min(a) - max(b)) - drift
    widest = max(max(values) - min(values) for values in (a, b))
    return min(len(a), len(b)) >= _ENOUGH_ROUNDS and gap > spreads * widest


def _t999(errors: list[float], counts: list[int]) -> float:
    """The quantile of Student's t for the Welch-Satterthwaite degrees of freedom."""
    below = sum(error**2 / (n - 1) for error, n in zip(errors, counts, strict=True))
    freedom = sum(errors) ** 2 / below if below else 1.0
    return _T999[max(each for each in _T999 if each <= max(1.0, freedom + 1e-6))]
