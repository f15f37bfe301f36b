"""The targets of a bench: figures that a summary must reach, and whether it does."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from svdpp.bench.names import (
    DATA_PARALLEL,
    FIGURES,
    ONE_DEVICE,
    PIPELINE,
    TIME_PARTS,
    is_share,
)
from svdpp.bench.noise import NEGLIGIBLE, difference_from_bound
from svdpp.errors import RequestError

Verdict = Literal["met", "within noise", "missed", "not measured"]

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


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound for one figure of the pipeline."""

    name: str
    is_upper: bool
    """Whether the figure must be below the bound."""
    bound: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A target and the figure that was measured."""

    target: str
    value: float | None
    low: float | None
    """With `high` the range of the true figure at 99.9% confidence, by the spread of the rounds."""
    high: float | None
    verdict: Verdict


def parse_target(name: str, text: str) -> Target:
    """The target in a line of a configuration, such as `overhead: "<= 1.05"`."""
    figure = _SHORT.get(name, name)
    if figure not in _NAMES:
        raise RequestError(f"targets: no figure {name!r}", _nearest(name))
    found = _BOUND.fullmatch(text.strip())
    if found is None:
        raise RequestError(
            f"targets.{name}: {text!r} is not a bound", 'a bound is ">= 0.95", "< 1.2" or "<= 1%"'
        )
    sign, number, percent = found.groups()
    bound = float(number) / (100 if percent else 1)
    return Target(name=figure, is_upper=sign.startswith("<"), bound=bound)


def check_measurable(
    targets: Mapping[str, str],
    cases: Collection[str],
    *,
    has_gpu: bool,
    is_dummy: bool,
) -> None:
    """Checks before a bench that it will measure all figures with a target."""
    for name, text in targets.items():
        figure = parse_target(name, text).name
        if figure in _SPEEDUPS and _SPEEDUPS[figure] not in cases:
            why = f"{_SPEEDUPS[figure]} is not a case beside this pipeline"
        elif figure == "peak_allocated_gib" and not has_gpu:
            why = "on the CPU only peak_reserved_gib is measured"
        elif figure == "mfu" and not has_gpu:
            why = "no published peak is known for the CPU"
        elif figure in ("tflops", "mfu") and is_dummy:
            why = "the FLOPs of the dummy model are not counted"
        else:
            continue
        raise RequestError(f"targets.{name}: {why}", f"leave targets.{name} out")


def outcomes(targets: Mapping[str, str], summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The outcome of each target as plain values, by its name."""
    return {name: asdict(_outcome(name, text, summary)) for name, text in targets.items()}


def missed(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the targets that were missed beyond the noise, or not measured."""
    return [name for name, each in found.items() if each["verdict"] in ("missed", "not measured")]


def _outcome(name: str, text: str, summary: Mapping[str, Any]) -> Outcome:
    target = parse_target(name, text)
    value, rounds = _measured(target.name, summary)
    if value is None:
        return Outcome(target=text, value=None, low=None, high=None, verdict="not measured")
    low, high, is_noise = _range(target, rounds)
    verdict: Verdict = "missed"
    if value <= target.bound if target.is_upper else value >= target.bound:
        verdict = "met"
    elif is_noise:
        verdict = "within noise"
    return Outcome(target=text, value=value, low=low, high=high, verdict=verdict)


def _measured(figure: str, summary: Mapping[str, Any]) -> tuple[float | None, list[float]]:
    """A figure over all rounds, and in each of them; None if the bench does not have it."""
    if figure in _SPEEDUPS:
        speedup = summary["speedups"].get(_SPEEDUPS[figure])
        return (speedup["over_rounds"], speedup["rounds"]) if speedup else (None, [])
    case = summary["cases"][PIPELINE]
    rounds = [each[figure] for each in case["rounds"] if each[figure] is not None]
    return case["over_rounds"][figure], rounds


def _range(target: Target, rounds: list[float]) -> tuple[float | None, float | None, bool]:
    """The range of the true figure, and whether it includes the bound."""
    if target.name.startswith("peak_"):
        return None, None, False  # the largest of all rounds, and not a mean
    if is_share(target.name) or not all(value > 0 for value in (target.bound, *rounds)):
        found = difference_from_bound(target.bound, rounds)
        if found.low is None or found.high is None:
            return None, None, True
        return target.bound + found.low, target.bound + found.high, bool(found.is_noise)
    # By logarithms, as in a comparison: the geometric mean of the rounds against the bound.
    found = difference_from_bound(math.log(target.bound), list(map(math.log, rounds)))
    if found.low is None or found.high is None:  # this case ran out of memory in the other rounds
        return None, None, True
    is_noise = bool(found.is_noise) or abs(found.value) < NEGLIGIBLE
    return target.bound * math.exp(found.low), target.bound * math.exp(found.high), is_noise


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*_NAMES, *_SHORT], n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known: {', '.join(_NAMES)}"
