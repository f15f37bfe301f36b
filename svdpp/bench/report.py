"""The report on a bench's folder: its cases, what limits the pipeline, and the noise."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.bench.compare import Ratio, compare
from svdpp.bench.names import (
    CONFIG,
    COSTS,
    DATA_PARALLEL,
    ENVIRONMENT,
    PIPELINE,
    ROUNDS,
    SUMMARY,
)
from svdpp.bench.noise import difference_from_bound
from svdpp.bench.result_files import read_rounds, read_summary
from svdpp.bench.targets import missed
from svdpp.diagnostics.advice import Advice
from svdpp.diagnostics.bottleneck import FindingKind
from svdpp.diagnostics.diagnosis import Diagnosis, diagnose
from svdpp.diagnostics.figures import RunFigures, figures_of
from svdpp.diagnostics.utilisation import Speeds, Utilisation, why_no_mfu
from svdpp.errors import InputError
from svdpp.plan.layout import Layout

SCHEMA_VERSION = 1
_TEMPLATE = Path(__file__).with_name("bench_report.html.j2")
# Each round starts the ranks again on purpose, and no case writes files.
_NOT_IN_A_BENCH: tuple[FindingKind, ...] = ("start_up", "disk")


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """What was measured of one case."""

    name: str
    num_rounds: int
    error: str = ""
    """Why rounds of it are missing."""
    round: int | None = None
    """The round with the median makespan, from 0; None if no round has left figures."""
    diagnosis: Diagnosis | None = None
    """Of that round."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What one page says of a bench."""

    folder: Path
    error: str
    """What ended the bench early; empty if nothing did."""
    summary: Mapping[str, Any] | None
    """What is shown of `summary.json`; None if the bench has not finished."""
    cases: tuple[CaseReport, ...]
    noise: tuple[Ratio, ...] = ()
    """The pipeline's figures over those of an equal bench."""

    @property
    def failures(self) -> list[str]:
        """What failed of the bench as a whole, one line each."""
        if self.summary is None:
            failed = f"the bench failed: {self.error}"
            return [failed if self.error else "the bench has not finished"]
        lost = missed(self.summary["targets"])
        bits = [] if self.summary["same_bits"] else ["DIFFERENT BITS between cases"]
        return [*bits, *([f"missed targets: {', '.join(lost)}"] if lost else [])]

    @property
    def headline(self) -> str:
        """The most useful line: what failed, or else what limits the pipeline."""
        pipeline = [each.diagnosis for each in self.cases if each.name == PIPELINE]
        limits = (each.headline for each in pipeline if each)
        return ". ".join([*self.failures, next(limits, "no round of the pipeline has figures")])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        shown = ("speedups", "same_bits", "targets")
        return {
            "schema_version": SCHEMA_VERSION,
            "bench": str(self.folder),
            "finished": self.summary is not None,
            "error": self.error or None,
            "headline": self.headline,
            "cases": {each.name: _case_to_json(each, self.summary) for each in self.cases},
            **{name: self.summary[name] if self.summary else None for name in shown},
            "noise": [
                {"figure": each.name, "value": each.a, "low": each.low, "high": each.high}
                for each in self.noise
            ],
        }


def is_bench(folder: Path) -> bool:
    """Whether `folder` is that of a bench, finished or not."""
    has_begun = any((folder / name).exists() for name in (CONFIG, ROUNDS, SUMMARY))
    return has_begun and (folder / ENVIRONMENT).exists()


def read_bench_report(folder: Path) -> BenchReport:
    """The report on the bench in `folder`."""
    rounds, error = read_rounds(folder / ROUNDS)
    summary = _shown_summary(folder) if (folder / SUMMARY).exists() else None
    noise: Sequence[Ratio] = ()
    if summary is not None:
        noise = [each for each in compare(folder, folder).ratios if each.name.startswith(PIPELINE)]
    names = rounds if summary is None else summary["cases"]
    cases = tuple(_case(folder, name, rounds.get(name, []), summary) for name in names)
    return BenchReport(folder=folder, error=error, summary=summary, cases=cases, noise=tuple(noise))


def _shown_summary(folder: Path) -> dict[str, Any]:
    summary = read_summary(folder).model_dump()
    if any(case["rounds"] and not case["over_rounds"] for case in summary["cases"].values()):
        what = f"{str(folder / SUMMARY)!r} is not a bench's summary: over_rounds is missing"
        raise InputError(what)
    return summary


def write_page(report: BenchReport, path: Path) -> None:
    """Writes the report as one self-contained HTML page."""
    from svdpp.media.html_page import write_html_page

    name = "/".join(report.folder.absolute().parts[-2:])
    write_html_page(_TEMPLATE, path, report=report, name=name)


class BenchAgain:
    """The command for another bench of the same work; see `diagnostics.advice.Again`.

    Args:
        folder: of the bench.
        figures: of its pipeline.
    """

    def __init__(self, folder: Path, figures: RunFigures) -> None:
        self.costs = str(folder / COSTS)
        self._config = str(folder / CONFIG)
        self._figures = figures

    def __call__(self, *changes: str) -> str:
        """See `Again`."""
        return " ".join(["svdpp bench", shlex.quote(self._config), *changes])

    def layout(self, layout: Layout) -> list[str]:
        """See `Again`."""
        names = ("split", "replicas", "decoders")
        changes = [
            f"--pipeline.{name}={getattr(layout, name)}"
            for name in names
            if getattr(layout, name) != getattr(self._figures, name)
        ]
        if layout.split != "uniform":
            changes.append(shlex.quote(f"--pipeline.costs={self.costs}"))
        return changes

    def ranks(self, number: int) -> str:
        """See `Again`."""
        return f"--pipeline.world={number}"

    def threads(self, number: int) -> str:
        """See `Again`."""
        return f"--pipeline.threads={number}"

    def decode_chunk(self, frames: int | None) -> str:
        """See `Again`; twice the chunk if it is to be larger."""
        larger = min(self._figures.frames, 2 * self._figures.decode_chunk_size)
        return f"--workload.decode_chunk_size={frames or larger}"


# --- one case -------------------------------------------------------------------------------------


def _case(
    folder: Path, name: str, rounds: list[dict[str, Any]], summary: Mapping[str, Any] | None
) -> CaseReport:
    about = None if summary is None else summary["cases"][name]
    report = CaseReport(
        name=name,
        num_rounds=len(rounds) if about is None else len(about["rounds"]),
        error="" if about is None else about["error"] or "",
    )
    if not rounds:
        return report
    try:
        rounds = sorted(rounds, key=lambda each: float(each["measured"]["makespan"]))
        median = rounds[(len(rounds) - 1) // 2]
        number = int(median["round"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(folder / ROUNDS)!r} is not the rounds of a bench") from error
    figures = figures_of(median, repr(str(folder / ROUNDS)))
    if figures is None:
        return report
    again = BenchAgain(folder, figures)
    found = diagnose(figures, again, without=_NOT_IN_A_BENCH)
    advice: tuple[Advice, ...] = ()
    if name == PIPELINE and summary is not None:  # before, the costs file does not exist
        advice = _with_measured(found, again, summary["speedups"].get(DATA_PARALLEL))
    found = replace(found, advice=advice, speeds=_speeds(figures, about, number))
    return replace(report, round=number, diagnosis=found)


def _with_measured(
    found: Diagnosis, again: BenchAgain, speedup: Mapping[str, Any] | None
) -> tuple[Advice, ...]:
    """The advice, in which the measured rate of data parallel takes the place of a forecast."""
    if speedup is None:
        return found.advice
    figures = found.figures
    apart = replace(figures.layout, split="uniform", replicas=figures.world_size, decoders=1)
    command = again(*again.layout(apart))
    difference = difference_from_bound(0.0, list(map(math.log, speedup["rounds"])))
    if difference.is_noise is None:
        return found.advice
    others = tuple(each for each in found.advice if each.command != command)
    if difference.is_noise or difference.value > 0:
        return others
    times = 1 / speedup["over_rounds"]
    measured = Advice(
        text=f"data parallel made {times:.2f} times the clips a minute in the same rounds; each "
        "device needs room for the whole model",
        command=command,
        times_as_fast=times,
    )
    return (measured, *others)


def _speeds(figures: RunFigures, about: Mapping[str, Any] | None, number: int) -> Speeds:
    """The utilisation of each rank, from the summary of its round."""
    rounds = [] if about is None else about["rounds"]
    ranks: Sequence[Mapping[str, Any]] = next(
        (each["ranks"] for each in rounds if each["round"] == number), ()
    )
    found = tuple(
        Utilisation(rank=rank["rank"], tflops=rank["tflops"], mfu=rank["mfu"])
        for rank in ranks
        if rank["tflops"] is not None
    )
    return Speeds(ranks=found, note=why_no_mfu(figures.ranks, found))


def _case_to_json(case: CaseReport, summary: Mapping[str, Any] | None) -> dict[str, Any]:
    about = None if summary is None else summary["cases"][case.name]
    return {
        "rounds": case.num_rounds,
        "error": case.error or None,
        "over_rounds": about and about["over_rounds"],
        "median_round": case.round,
        "diagnosis": case.diagnosis and case.diagnosis.to_json(),
    }
