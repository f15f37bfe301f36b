"""The comparison of two benches: ratios, and whether they are more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.bench.names import DATA_PARALLEL, ONE_DEVICE, PIPELINE, SUMMARY
from svdpp.bench.noise import MIN_ROUNDS, NEGLIGIBLE, check_rounds, difference
from svdpp.bench.result_files import Summary, read_machine, read_summary
from svdpp.errors import InputError, RequestError


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of one figure, B over A.

    `low` and `high` bound the true ratio with 99.9% confidence, by the spread of the rounds; both
    are None if A or B has a single round.
    """

    name: str
    a: float
    b: float
    value: float
    low: float | None
    high: float | None
    is_apart: bool = False
    """Whether the gap between A's and B's rounds exceeds the spread of either."""
    is_baseline: bool = False
    """Whether A and B are the same work with the same libraries on the same machine."""
    is_rate: bool = True
    """Whether a higher figure is the faster one."""

    @property
    def is_noise(self) -> bool | None:
        """Whether the difference is within noise; None if unknown."""
        if self.is_baseline or abs(math.log(self.value)) < NEGLIGIBLE:
            return True
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high and not self.is_apart

    @property
    def is_slower(self) -> bool:
        """Whether B is slower than A by more than noise."""
        return self.is_noise is False and (self.value < 1) == self.is_rate


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two benches, side by side."""

    a: Summary
    b: Summary
    ratios: list[Ratio]
    settings: list[str]
    """The configuration fields that differ, such as `pipeline.world: 2, 4`; without targets."""
    machines: list[str]
    """The facts about the machines that differ."""
    same_bits: bool | None
    """Whether the clips have the same latents; None if they are different clips."""

    @property
    def is_equal(self) -> bool | None:
        """Whether every difference is within noise; None if unknown."""
        verdicts = [ratio.is_noise for ratio in self.ratios]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        if self.is_equal is False:
            beyond = [ratio.name for ratio in self.ratios if ratio.is_noise is False]
            return f"different: {', '.join(beyond)}"
        if self.is_equal is None:
            return "unknown: a single round has no spread; use --measure.repeats=3 or more"
        return "equal: every difference is within noise"

    @property
    def slower(self) -> list[Ratio]:
        """The figures in which svdpp became slower by more than noise.

        On another machine only the pipeline's ratio to diffusers says anything of svdpp. Its ratio
        to data parallel never counts: it also falls where data parallel became faster.
        """
        ours = {f"{PIPELINE} / {ONE_DEVICE}"}
        if not self.machines:
            figures = [words for name, words in _FIGURES.items() if name not in _NOT_JUDGED]
            ours |= {f"{case}: {words}" for case in (PIPELINE, DATA_PARALLEL) for words in figures}
        return [each for each in self.ratios if each.name in ours and each.is_slower]


def compare(a: Path, b: Path) -> Comparison:
    """Compares the bench in folder `b` with that in folder `a`."""
    one, other = _read_summary(a), _read_summary(b)
    machines = _differences(read_machine(a), read_machine(b))
    same_work = _baseline(one.config) == _baseline(other.config)
    same_clips = {**_baseline(one.config), **_clips(one.config)} == {
        **_baseline(other.config),
        **_clips(other.config),
    }
    return Comparison(
        a=one,
        b=other,
        ratios=list(_ratios(one, other, same_baseline=same_work and not machines)),
        settings=_differences(_measured(one.config), _measured(other.config)),
        machines=machines,
        same_bits=one.latents_sha256 == other.latents_sha256 if same_clips else None,
    )


def check_baseline(folder: Path, config: Mapping[str, Any], repeats: int) -> None:
    """Checks before a bench that it can be compared with the earlier one in `folder`."""
    check_rounds(repeats, "--baseline needs")
    earlier = _read_summary(folder)
    read_machine(folder)
    num_rounds = len(earlier.cases[PIPELINE].rounds)
    if num_rounds < MIN_ROUNDS:
        raise InputError(
            f"the bench in {str(folder)!r} has too few rounds to know its noise: "
            f"{num_rounds}, and {MIN_ROUNDS} are needed",
            f"measure it again with --measure.repeats={MIN_ROUNDS + 2}",
        )
    other = _differences(_baseline(earlier.config), _baseline(config))
    if other:
        raise RequestError(
            f"the bench in {str(folder)!r} did other work: {'; '.join(other)}",
            "svdpp bench --compare compares any two benches",
        )


def ratio(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    drift: float = 0.0,
    is_baseline: bool = False,
    is_rate: bool = True,
) -> Ratio:
    """B over A: the ratio of geometric means over the rounds, with Welch's interval.

    Args:
        name: of the figure.
        a: one value for each round of A, above 0.
        b: the same for B.
        drift: the logarithm of the change of the machine itself; added to the margin.
        is_baseline: whether `drift` was computed from this figure.
        is_rate: whether a higher figure is the faster one.
    """
    found = difference(list(map(math.log, a)), list(map(math.log, b)), drift)
    return Ratio(
        name=name,
        a=statistics.geometric_mean(a),
        b=statistics.geometric_mean(b),
        value=math.exp(found.value),
        low=None if found.low is None else math.exp(found.low),
        high=None if found.high is None else math.exp(found.high),
        is_apart=found.is_apart,
        is_baseline=is_baseline,
        is_rate=is_rate,
    )


def _ratios(a: Summary, b: Summary, *, same_baseline: bool) -> Iterator[Ratio]:
    """Ratios to other cases of the same rounds come first: machine drift cancels out in them."""
    for case in (ONE_DEVICE, DATA_PARALLEL):
        if case in a.speedups and case in b.speedups:
            yield ratio(f"{PIPELINE} / {case}", a.speedups[case].rounds, b.speedups[case].rounds)
    for name, words in _FIGURES.items():
        alone = _values(a, ONE_DEVICE, name), _values(b, ONE_DEVICE, name)
        # If diffusers did not fit on the device, the drift of the machine is unknown.
        drift = math.log(ratio("", *alone).value) if same_baseline and all(alone) else 0.0
        for case in (PIPELINE, DATA_PARALLEL, ONE_DEVICE):
            values = _values(a, case, name), _values(b, case, name)
            is_baseline = same_baseline and case == ONE_DEVICE
            if all(values):
                yield ratio(
                    f"{case}: {words}",
                    *values,
                    drift=drift,
                    is_baseline=is_baseline,
                    is_rate=not name.endswith("_seconds"),
                )


def _values(summary: Summary, case: str, name: str) -> list[float]:
    """A figure of a case in each round; empty if it was not measured."""
    rounds = summary.cases[case].rounds if case in summary.cases else []
    values = [getattr(each, name) for each in rounds]
    return [] if None in values else values


def _baseline(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that diffusers on one device depends on, except the number of clips.

    A field that is None counts as missing: older benches do not have all of today's.
    """
    names = ("device", "threads", "deterministic")
    ranks = {name: config["pipeline"].get(name) for name in names}
    workload = {
        name: value
        for name, value in config["workload"].items()
        if name != "clips" and value is not None
    }
    same = {name: config[name] for name in ("model", "precision")}
    return {**same, "workload": workload, "ranks": ranks}


def _measured(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but the targets, which change nothing that is measured."""
    return {name: value for name, value in config.items() if name != "targets"}


def _clips(config: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields that the clips depend on."""
    return {"clips": config["workload"]["clips"], "seeds": config["measure"]["seeds"]}


def _differences(a: object, b: object, name: str = "") -> list[str]:
    """The fields that differ between two nested mappings."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if a == b else [f"{name}: {a}, {b}"]


def _read_summary(folder: Path) -> Summary:
    found = read_summary(folder)
    try:
        _baseline(found.config), _clips(found.config)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{str(folder / SUMMARY)!r} is not a bench's summary: config: {error!r}"
        raise InputError(what) from error
    return found


_FIGURES = {
    "steady_clips_per_minute": "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
    "tflops": "TFLOP/s",
}
# It follows from the seconds of the work, which are judged, and from how FLOPs are counted.
_NOT_JUDGED = ("tflops",)
