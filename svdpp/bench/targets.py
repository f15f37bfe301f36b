"""Performance targets: bounds for metrics of a benchmark, and whether they are met."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from svdpp.config.limits import require
from svdpp.errors import RequestError, TargetMissedError, nearest

#: The case that is measured, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"
CASES = (PIPELINE, DATA_PARALLEL, ONE_DEVICE)

#: Ratios of the pipeline's clips per minute to those of another case, by name.
SPEEDUPS = {"speedup_over_data_parallel": DATA_PARALLEL, "speedup_over_diffusers": ONE_DEVICE}

_PARTS = ("compute", "wait", "transfer", "idle", "unaccounted")
#: The figures of each case in a summary, in its order.
METRICS = (
    *("clips", "makespan_seconds", "overhead", "first_clip_seconds", "steady_clips_per_minute"),
    *("step_p50_seconds", "step_p90_seconds", "step_p95_seconds", "tflops", "utilisation"),
    *("bubble", *(f"{part}_share" for part in _PARTS)),
    *("start_seconds", "load_seconds", "peak_allocated_gib", "peak_reserved_gib"),
)

_Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class Bound(BaseModel):
    """A bound for one figure, with the bound itself included."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min: _Number | None = None
    """Least value, in the unit of the figure; None: no lower bound."""
    max: _Number | None = None
    """Largest value, in the unit of the figure; None: no upper bound."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"has min {self.min:g} above max {self.max:g}")
        return self

    def __str__(self) -> str:
        ends = [(">=", self.min), ("<=", self.max)]
        return ", ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)

    def holds(self, value: float) -> bool:
        """Whether a value is within the bound.

        Args:
            value: Figure, in its own unit.
        """
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Outcome(NamedTuple):
    """A target and what was measured: a row of the table of targets."""

    name: str
    """Name of the figure, as the configuration has it."""
    bound: str
    """The bound, such as ">= 0.95"."""
    measured: float | None
    """Figure over all rounds; None if no round has it."""
    met: bool
    """Whether the figure is within the bound. A figure that was not measured is not."""


def split_name(name: str) -> tuple[str, str]:
    """Return the case and the figure that the name of a target means.

    Args:
        name: `FIGURE` of the pipeline, or `CASE.FIGURE`, such as `diffusers.step_p50_seconds`.
    """
    case, _, figure = name.rpartition(".")
    return case.replace("_", " ") or PIPELINE, figure


def check_name(name: str) -> None:
    """Check that a target's name is that of a figure or of a speed-up.

    Args:
        name: Name as the configuration has it.

    Raises:
        RequestError: It is neither; the hint has the nearest name.
    """
    case, figure = split_name(name)
    if name in SPEEDUPS or (case in CASES and figure in METRICS):
        return
    names = (*SPEEDUPS, *METRICS)
    hint = nearest(figure, names, f"known: {', '.join(names)}")
    raise RequestError(f"targets: no figure {name!r}", hint, details={"figure": name})


def check_measurable(
    names: Collection[str], cases: Collection[str], *, on_gpu: bool, is_peak_known: bool
) -> None:
    """Check before a benchmark that it measures each figure that has a target.

    Args:
        names: Valid names of targets.
        cases: Cases that the benchmark measures.
        on_gpu: Whether its ranks are on GPUs.
        is_peak_known: Whether the peak of every rank's device is known.

    Raises:
        RequestError: It does not measure one of them.
    """
    for name in names:
        case, figure = split_name(name)
        case = SPEEDUPS.get(name, case)
        hint = f"leave targets.{name} out"
        why_not = f"targets.{name}: {case} is not a case beside this pipeline"
        require(case in cases, why_not, hint, figure=name)
        why_not = f"targets.{name}: on the CPU only peak_reserved_gib is measured"
        require(on_gpu or figure != "peak_allocated_gib", why_not, hint, figure=name)
        why_not = f"targets.{name}: no peak is known for the device"
        hint = "give its peak in this dtype with `peak_tflops`"
        require(is_peak_known or figure != "utilisation", why_not, hint, figure=name)


def outcomes(targets: Mapping[str, Bound], summary: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcome of each target, in their order.

    Args:
        targets: Bounds by valid names.
        summary: Content of `summary.json`.
    """
    found = []
    for name, bound in targets.items():
        if name in SPEEDUPS:
            value = summary["speedups"].get(SPEEDUPS[name], {}).get("over_rounds")
        else:
            case, figure = split_name(name)
            value = summary["cases"].get(case, {"over_rounds": {}})["over_rounds"].get(figure)
        found.append(Outcome(name, str(bound), value, value is not None and bound.holds(value)))
    return found


def check_met(found: Sequence[Outcome]) -> None:
    """Check that every target is met.

    Args:
        found: Outcomes of all targets.

    Raises:
        TargetMissedError: One is not; the error names each that is not, with bound and figure.
    """
    missed = [each for each in found if not each.met]
    if not missed:
        return
    texts = [
        f"{each.name} is {'not measured' if each.measured is None else f'{each.measured:.4g}'}, "
        f"target {each.bound}"
        for each in missed
    ]
    count = f"{len(missed)} of {len(found)} targets missed"
    raise TargetMissedError(
        f"{count}: {'; '.join(texts)}",
        details={
            "missed_targets": len(missed),
            "targets": len(found),
            "missed": [each._asdict() for each in missed],
        },
    )
