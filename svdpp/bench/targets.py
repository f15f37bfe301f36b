"""Performance targets: bounds for metrics of a benchmark, and whether they are met."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from svdpp.config.limits import require
from svdpp.errors import RequestError, TargetMissedError, nearest, pluralize

#: Names of the cases: the pipeline, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"
CASES = (PIPELINE, DATA_PARALLEL, ONE_DEVICE)

#: Baseline of each speed-up, by the metric's name. A speed-up is a ratio of clips per minute.
SPEEDUPS = {"speedup_over_data_parallel": DATA_PARALLEL, "speedup_over_diffusers": ONE_DEVICE}

_PARTS = ("compute", "wait", "transfer", "idle", "unaccounted")
#: Names of the metrics of each case, in the order of a summary.
METRICS = (
    *("clips", "makespan_seconds", "overhead", "first_clip_seconds", "steady_clips_per_minute"),
    *("step_p50_seconds", "step_p90_seconds", "step_p95_seconds", "tflops", "utilisation"),
    *("bubble", *(f"{part}_share" for part in _PARTS)),
    *("start_seconds", "load_seconds", "peak_allocated_gib", "peak_reserved_gib"),
)

_Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class Bound(BaseModel):
    """Inclusive bounds of one metric of a benchmark: a performance target."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min: _Number | None = None
    """Smallest allowed value, in the unit of the metric; None: no lower bound."""
    max: _Number | None = None
    """Largest allowed value, in the unit of the metric; None: no upper bound."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        """Raise a `ValueError` if neither `min` nor `max` is given, or if `min` is above `max`."""
        if self.min is None and self.max is None:
            raise ValueError("needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    def __str__(self) -> str:
        limits = [(">=", self.min), ("<=", self.max)]
        return ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)

    def holds(self, value: float) -> bool:
        """Whether a metric's value is within the bounds of its performance target.

        Args:
            value: Value, in the unit of the metric.
        """
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Outcome(NamedTuple):
    """Result of one performance target: whether the measured value is within the bound."""

    name: str
    """Name of the metric, as in the configuration."""
    bound: str
    """Bound, such as ">= 0.95"."""
    measured: float | None
    """Measured value over all rounds; None if no round has the metric."""
    met: bool
    """Whether the value is within the bound; False if it was not measured."""


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a performance target into the case and the metric.

    Args:
        name: `METRIC` for a metric of the pipeline, or `CASE.METRIC`, such as
            `diffusers.step_p50_seconds`.
    """
    case, _, metric = name.rpartition(".")
    return case.replace("_", " ") or PIPELINE, metric


def check_name(name: str) -> None:
    """Raise a `RequestError` if a performance target names no known metric or speed-up.

    Args:
        name: Name of the target, as in the configuration.

    Raises:
        RequestError: The name is unknown. The hint proposes the most similar known name.
    """
    case, metric = split_name(name)
    if name in SPEEDUPS or (case in CASES and metric in METRICS):
        return
    names = (*SPEEDUPS, *METRICS)
    hint = nearest(metric, names, f"the metrics are {', '.join(names)}")
    raise RequestError(f"targets: no metric {name!r}", hint, details={"figure": name})


def check_measurable(
    names: Collection[str], cases: Collection[str], *, on_gpu: bool, is_peak_known: bool
) -> None:
    """Raise a `RequestError` if a benchmark will not measure a metric that has a target.

    Args:
        names: Valid names of targets.
        cases: Cases that the benchmark measures.
        on_gpu: Whether the ranks are on GPUs.
        is_peak_known: Whether the peak TFLOP/s of every rank's device is known.

    Raises:
        RequestError: A target's metric will not be measured.
    """
    for name in names:
        case, metric = split_name(name)
        case = SPEEDUPS.get(name, case)
        hint = f"leave targets.{name} out"
        why_not = (
            f"targets.{name}: {case} is no baseline of this pipeline, which is data parallel itself"
        )
        require(case in cases, why_not, hint, figure=name)
        why_not = (
            f"targets.{name}: of the memory peaks, only peak_reserved_gib is measured on the CPU"
        )
        require(on_gpu or metric != "peak_allocated_gib", why_not, hint, figure=name)
        why_not = f"targets.{name}: no peak is known for the device"
        hint = "give its peak in this dtype with `peak_tflops`"
        require(is_peak_known or metric != "utilisation", why_not, hint, figure=name)


def outcomes(targets: Mapping[str, Bound], summary: Mapping[str, Any]) -> list[Outcome]:
    """Return for each performance target whether the benchmark met it, and the measured value.

    Args:
        targets: Bounds by valid names of targets.
        summary: Content of `summary.json`.
    """
    found = []
    for name, bound in targets.items():
        if name in SPEEDUPS:
            value = summary["speedups"].get(SPEEDUPS[name], {}).get("over_rounds")
        else:
            case, metric = split_name(name)
            value = summary["cases"].get(case, {"over_rounds": {}})["over_rounds"].get(metric)
        found.append(Outcome(name, str(bound), value, value is not None and bound.holds(value)))
    return found


def check_met(found: Sequence[Outcome]) -> None:
    """Raise a `TargetMissedError` if a performance target is missed.

    Args:
        found: Outcomes of all targets.

    Raises:
        TargetMissedError: A target is missed. The error names each missed target, with its bound
            and the measured value.
    """
    missed = [each for each in found if not each.met]
    if not missed:
        return
    texts = [
        f"{each.name} is {'not measured' if each.measured is None else f'{each.measured:.4g}'}, "
        f"target {each.bound}"
        for each in missed
    ]
    count = f"{len(missed)} of {pluralize(len(found), 'target')} missed"
    raise TargetMissedError(
        f"{count}: {'; '.join(texts)}",
        details={
            "missed_targets": len(missed),
            "targets": len(found),
            "missed": [each._asdict() for each in missed],
        },
    )
