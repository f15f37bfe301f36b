"""Owns holding two benches against each other: ratios, and whether they are more than noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from svdpp.bench.names import DATA_PARALLEL, ENVIRONMENT, ONE_DEVICE, PIPELINE, SUMMARY
from svdpp.errors import InputError, describe_fault

#: Student's t that 99.9% of differences between equals do not exceed, by degrees of freedom; where
#: these lie between two of them the smaller one's, which errs on the side of noise. So strict since
#: ten figures are compared: at 99% each, every tenth pair of equals would be called different.
_T999 = {
    **{1: 636.62, 2: 31.599, 3: 12.924, 4: 8.610, 5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041, 9: 4.781},
    **{10: 4.587, 15: 4.073, 20: 3.850, 30: 3.646, 60: 3.460, 120: 3.373},
}

_ENOUGH_ROUNDS = 4

#: Ratios closer to 1 than this are never called different, as small as their spread may be.
_NEGLIGIBLE = 0.01


class _Round(BaseModel):
    steady_clips_per_minute: Annotated[float, Field(gt=0)]
    first_clip_seconds: Annotated[float, Field(gt=0)]
    step_p50_seconds: Annotated[float, Field(gt=0)]


class _Case(BaseModel):
    rounds: list[_Round]


class _Speedup(BaseModel):
    rounds: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


def _with_a_pipeline(cases: dict[str, _Case]) -> dict[str, _Case]:
    """All but the pipeline may have been too large for the devices."""
    if PIPELINE not in cases or not cases[PIPELINE].rounds:
        raise ValueError("no round of the pipeline")
    return cases


class Summary(BaseModel):
    """What a comparison needs of `summary.json`."""

    schema_version: Literal[1, 2]
    run_id: str
    config_sha256: str
    config: dict[str, Any]
    cases: Annotated[dict[str, _Case], AfterValidator(_with_a_pipeline)]
    speedups: dict[str, _Speedup]
    latents_sha256: list[str]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One figure of B over A's.

    `low` and `high` hold the true ratio in 999 of 1000 cases, as far as the rounds' own spread
    can tell; both are None where one of the two had a single round.
    """

    name: str
    a: float
    b: float
    value: float
    low: float | None
    high: float | None
    is_apart: bool = False
    """Whether A's and B's rounds lie farther from each other than any two of the same."""
    is_baseline: bool = False
    """Whether it is the same work of the same libraries on the same machine, by definition."""

    @property
    def is_noise(self) -> bool | None:
        """Whether equals may well differ by so much; None where nobody knows."""
        if self.is_baseline or abs(math.log(self.value)) < _NEGLIGIBLE:
            return True
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high and not self.is_apart


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two benches, side by side."""

    a: Summary
    b: Summary
    ratios: list[Ratio]
    settings: list[str]
    """What differs in what was asked: `pipeline.world: 2, 4`."""
    machines: list[str]
    """What differs in where it ran."""
    same_bits: bool | None
    """Whether the clips have the same latents; None where they are other clips."""

    @property
    def is_equal(self) -> bool | None:
        """Whether every difference is within noise; None where nobody knows."""
        verdicts = [ratio.is_noise for ratio in self.ratios]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def verdict(self) -> str:
        """In a sentence."""
        if self.is_equal is False:
            beyond = [ratio.name for ratio in self.ratios if ratio.is_noise is False]
            return f"different: {', '.join(beyond)}"
        if self.is_equal is None:
            return "unknown: a single round has no spread; --measure.repeats=3 or more has"
        return "equal: every difference is within noise"


def compare(a: Path, b: Path) -> Comparison:
    """Holds the bench in folder `b` against that in folder `a`.

    Raises:
        InputError: a folder holds no finished bench.
    """
    one, other = _read_summary(a), _read_summary(b)
    machines = _differences(_machine(a), _machine(b))
    same_work = _baseline(one.config) == _baseline(other.config)
    same_clips = {**_baseline(one.config), **_clips(one.config)} == {
        **_baseline(other.config),
        **_clips(other.config),
    }
    return Comparison(
        a=one,
        b=other,
        ratios=list(_ratios(one, other, same_baseline=same_work and not machines)),
        settings=_differences(one.config, other.config),
        machines=machines,
        same_bits=one.latents_sha256 == other.latents_sha256 if same_clips else None,
    )


def ratio(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    drift: float = 0.0,
    is_baseline: bool = False,
) -> Ratio:
    """B over A: geometric means of each round's figure, and Welch's interval around their ratio.

    Args:
        name: of the figure.
        a: one for each round, above 0.
        b: the same.
        drift: by how much the machine itself differed, as a logarithm: added to the margin.
        is_baseline: whether the figure is what `drift` is taken from.
    """
    logs = [[math.log(value) for value in values] for values in (a, b)]
    means = [statistics.fmean(each) for each in logs]
    low = high = None
    if min(map(len, logs)) > 1:
        errors = [statistics.variance(each) / len(each) for each in logs]
        margin = _t999(errors, [len(each) for each in logs]) * math.sqrt(sum(errors)) + abs(drift)
        low, high = (math.exp(means[1] - means[0] + sign * margin) for sign in (-1, 1))
    return Ratio(
        name=name,
        a=math.exp(means[0]),
        b=math.exp(means[1]),
        value=math.exp(means[1] - means[0]),
        low=low,
        high=high,
        is_apart=_are_apart(logs[0], logs[1], abs(drift)),
        is_baseline=is_baseline,
    )


def _are_apart(a: list[float], b: list[float], drift: float) -> bool:
    """Whether the gap between two sets is wider than either, with what the machine drifted.

    Needs no distribution: one round that met other work makes Welch's interval as wide as a barn
    door, but not this. Of equals with 4 values each it is true in 6 of 10,000 cases (by simulation,
    normal, exponential and Student's t with 2 degrees of freedom); with fewer it is more.
    """
    gap = max(min(b) - max(a), min(a) - max(b)) - drift
    widest = max(max(values) - min(values) for values in (a, b))
    return min(len(a), len(b)) >= _ENOUGH_ROUNDS and gap > widest


def _t999(errors: list[float], counts: list[int]) -> float:
    """By Welch's and Satterthwaite's degrees of freedom."""
    below = sum(error**2 / (n - 1) for error, n in zip(errors, counts, strict=True))
    freedom = sum(errors) ** 2 / below if below else 1.0
    return _T999[max(each for each in _T999 if each <= max(1.0, freedom + 1e-6))]


def _ratios(a: Summary, b: Summary, *, same_baseline: bool) -> Iterator[Ratio]:
    """Against the other cases of the same rounds first: those know nothing of a slower hour."""
    for case in (ONE_DEVICE, DATA_PARALLEL):
        if case in a.speedups and case in b.speedups:
            yield ratio(f"{PIPELINE} / {case}", a.speedups[case].rounds, b.speedups[case].rounds)
    for name, words in _FIGURES.items():
        alone = _values(a, ONE_DEVICE, name), _values(b, ONE_DEVICE, name)
        # Where it did not fit nobody knows how the machine drifted.
        drift = math.log(ratio("", *alone).value) if same_baseline and all(alone) else 0.0
        for case in (PIPELINE, DATA_PARALLEL, ONE_DEVICE):
            values = _values(a, case, name), _values(b, case, name)
            is_baseline = same_baseline and case == ONE_DEVICE
            if all(values):
                yield ratio(f"{case}: {words}", *values, drift=drift, is_baseline=is_baseline)


def _values(summary: Summary, case: str, name: str) -> list[float]:
    return (
        [getattr(each, name) for each in summary.cases[case].rounds]
        if case in summary.cases
        else []
    )


def _baseline(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that diffusers on one device depends on, but for how many clips there are."""
    names = ("device", "threads", "deterministic")
    ranks = {name: config["pipeline"].get(name) for name in names}
    workload = {name: value for name, value in config["workload"].items() if name != "clips"}
    same = {name: config[name] for name in ("model", "precision")}
    return {**same, "workload": workload, "ranks": ranks}


def _clips(config: Mapping[str, Any]) -> dict[str, Any]:
    """What else makes the clips those they are."""
    return {"clips": config["workload"]["clips"], "seeds": config["measure"]["seeds"]}


def _machine(folder: Path) -> dict[str, Any]:
    """Libraries and hardware; svdpp itself and its commit may be what is compared."""
    facts = _read(folder / ENVIRONMENT)
    try:
        versions = {k: v for k, v in facts["versions"].items() if k != "svdpp"}
        host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
        return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(folder / ENVIRONMENT)!r} is no environment of a bench") from error


def _differences(a: object, b: object, name: str = "") -> list[str]:
    """Each field of two nested mappings that is not the same in both."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if a == b else [f"{name}: {a}, {b}"]


def _read_summary(folder: Path) -> Summary:
    path = folder / SUMMARY
    try:
        found = Summary.model_validate(_read(path))
        _baseline(found.config), _clips(found.config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{str(path)!r} is no bench's: {where} {describe_fault(first)}"
        raise InputError(what) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} is no bench's: config: {error!r}") from error
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error.strerror}",
            "--compare takes the folders of two finished benches, results/EXPERIMENT/RUN",
        ) from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is no JSON: {error}") from error


_FIGURES = {
    "steady_clips_per_minute": "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
}
