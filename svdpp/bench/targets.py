"""The targets of a bench: figures that a summary must reach, and whether it does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from svdpp.bench.compare import (
    DATA_PARALLEL,
    FIGURES,
    MIN_ROUNDS,
    ONE_DEVICE,
    PIPELINE,
    TIME_PARTS,
    Summary,
    interval,
    is_share,
    ratio,
)
from svdpp.errors import RequestError

#: Speed-ups of the pipeline, by the case that they are over.
_SPEEDUPS = {
    "pipeline_over_data_parallel": DATA_PARALLEL,
    "pipeline_over_diffusers": ONE_DEVICE,
}
_SHORT = {
    **{part: f"{part}_share" for part in TIME_PARTS},
    **{f"step_seconds.p{n}": f"step_p{n}_seconds" for n in (50, 90, 95)},
}
_NAMES = (*_SPEEDUPS, *FIGURES)
_BOUND = re.compile(r"(<=|>=|<|>)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)")


class Target(NamedTuple):
    """A bound for one figure of the pipeline."""

    name: str
    is_upper: bool
    """Whether the figure must be below the bound."""
    bound: float


def parse_target(name: str, text: str) -> Target:
    """The target in a line of a configuration, such as `overhead: "<= 1.05"`."""
    figure = _SHORT.get(name, name)
    if figure not in _NAMES:
        near = difflib.get_close_matches(name, [*_NAMES, *_SHORT], n=3, cutoff=0.5)
        did_you_mean = f"did you mean {' or '.join(map(repr, near))}?"
        hint = did_you_mean if near else f"known: {', '.join(_NAMES)}"
        raise RequestError(f"targets: no figure {name!r}", hint)
    parts = _BOUND.fullmatch(text.strip())
    if parts is None:
        raise RequestError(
            f"targets.{name}: {text!r} is not a bound", 'a bound is ">= 0.95", "< 1.2" or "<= 1%"'
        )
    sign, number, percent = parts.groups()
    return Target(figure, sign.startswith("<"), float(number) / (100 if percent else 1))


def check_measurable(targets: Collection[str], cases: Collection[str], *, has_gpu: bool) -> None:
    """Checks before a bench that it will measure all figures with a target."""
    for name in targets:
        if _SPEEDUPS.get(name, PIPELINE) not in cases:
            why = f"{_SPEEDUPS[name]} is not a case beside this pipeline"
        elif name == "peak_allocated_gib" and not has_gpu:
            why = "on the CPU only peak_reserved_gib is measured"
        else:
            continue
        raise RequestError(f"targets.{name}: {why}", f"leave targets.{name} out")


def outcome(name: str, text: str, summary: Summary) -> dict[str, Any]:
    """A target's value, its range by the spread of the rounds, and the verdict."""
    target = parse_target(name, text)
    figure = target.name
    if figure in _SPEEDUPS:
        found = summary["speedups"].get(_SPEEDUPS[figure], {"rounds": [], "over_rounds": None})
        value, rounds = found["over_rounds"], found["rounds"]
    else:
        case = summary["cases"][PIPELINE]
        value = case["over_rounds"][figure]
        rounds = [figures[figure] for figures in case["rounds"] if figures[figure] is not None]
    low, high, verdict = None, None, "not measured"
    if value is not None:
        low, high, is_noise = _range(target, rounds)
        is_met = value <= target.bound if target.is_upper else value >= target.bound
        verdict = "met" if is_met else "within noise" if is_noise else "missed"
    return {"target": text, "value": value, "low": low, "high": high, "verdict": verdict}


def missed(outcomes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the targets that were missed beyond the noise, or not measured."""
    lost = ("missed", "not measured")
    return [name for name, outcome in outcomes.items() if outcome["verdict"] in lost]


def _range(target: Target, rounds: list[float]) -> tuple[float | None, float | None, bool]:
    """The range of the true figure, and whether it includes the bound.

    Like a comparison it takes logarithms, but not of shares, which can be 0. A bound has no spread
    of its own, so the range is twice as wide.
    """
    if target.name.startswith("peak_"):
        return None, None, False  # the largest of all rounds, and not a mean
    if len(rounds) < MIN_ROUNDS:
        return None, None, True  # this case ran out of memory in the other rounds
    bounds = [target.bound] * (len(rounds) - 1)
    if not is_share(target.name) and min(target.bound, *rounds) > 0:
        found = ratio("", bounds, rounds)
        assert found.low is not None
        assert found.high is not None
        return target.bound * found.low, target.bound * found.high, found.is_noise is True
    around = interval(bounds, rounds)
    assert around is not None
    low, high = around
    return target.bound + low, target.bound + high, low <= 0 <= high
