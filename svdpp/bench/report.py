"""The report on a bench's folder: its cases, what limits the pipeline, and the noise."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.bench.compare import (
    CASES,
    CONFIG,
    COSTS,
    DATA_PARALLEL,
    ENVIRONMENT,
    PIPELINE,
    ROUNDS,
    SUMMARY,
    Ratio,
    Summary,
    compare,
    read_summary,
)
from svdpp.bench.targets import missed
from svdpp.config.files import read_small_file
from svdpp.diagnostics.figures import figures_of
from svdpp.diagnostics.report import Diagnosis, diagnose
from svdpp.errors import InputError
from svdpp.plan.layout import Layout

SCHEMA_VERSION = 2
_MAX_BYTES = 2**28


class CaseReport(NamedTuple):
    """What was measured of one case."""

    name: str
    num_rounds: int
    error: str = ""
    """Why rounds of it are missing."""
    round: int = 0
    """The round with the median makespan, from 0."""
    diagnosis: Diagnosis | None = None
    """Of that round; None if no round has left figures."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What is said of a bench."""

    folder: Path
    error: str
    """What ended the bench early; empty if nothing did."""
    summary: Summary | None
    """None if the bench has not finished."""
    cases: tuple[CaseReport, ...]
    noise: tuple[Ratio, ...] = ()
    """The pipeline's figures over those of an equal bench."""

    @property
    def failures(self) -> list[str]:
        """What failed of the bench as a whole, one line each."""
        if self.summary is None:
            failed = f"the bench failed: {self.error}"
            return [failed if self.error else "the bench has not finished"]
        lost = missed(self.summary.get("targets", {}))
        bits = [] if self.summary["same_bits"] else ["DIFFERENT BITS between cases"]
        return [*bits, *([f"missed targets: {', '.join(lost)}"] if lost else [])]

    @property
    def headline(self) -> str:
        """The most useful line: what failed, or else what limits the pipeline."""
        pipeline = (case.diagnosis for case in self.cases if case.name == PIPELINE)
        limits = (diagnosis.headline for diagnosis in pipeline if diagnosis)
        return ". ".join([*self.failures, next(limits, "no round of the pipeline has figures")])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        summary = self.summary or {}
        return {
            "schema_version": SCHEMA_VERSION,
            "bench": str(self.folder),
            "finished": self.summary is not None,
            "error": self.error or None,
            "headline": self.headline,
            "cases": {
                case.name: {
                    "rounds": case.num_rounds,
                    "error": case.error or None,
                    "over_rounds": summary.get("cases", {}).get(case.name, {}).get("over_rounds"),
                    "median_round": case.round if case.diagnosis else None,
                    "diagnosis": case.diagnosis and case.diagnosis.to_json(),
                }
                for case in self.cases
            },
            **{name: summary.get(name) for name in ("speedups", "same_bits", "targets")},
            "noise": [asdict(ratio) for ratio in self.noise],
        }


def is_bench(folder: Path) -> bool:
    """Whether `folder` is that of a bench, finished or not."""
    has_begun = any((folder / name).exists() for name in (CONFIG, ROUNDS, SUMMARY))
    return has_begun and (folder / ENVIRONMENT).exists()


def read_bench_report(folder: Path) -> BenchReport:
    """The report on the bench in `folder`."""
    try:
        rounds, error = _read_rounds(folder / ROUNDS)
        summary = read_summary(folder) if (folder / SUMMARY).exists() else None
        noise = [] if summary is None else compare(folder, folder).ratios
        cases = rounds if summary is None else summary["cases"]
        return BenchReport(
            folder=folder,
            error=error,
            summary=summary,
            cases=tuple(_case(folder, name, rounds.get(name, []), summary) for name in cases),
            noise=tuple(ratio for ratio in noise if ratio.name.startswith(PIPELINE)),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise InputError(f"{str(folder)!r} holds damaged results: {problem!r}") from problem


def _read_rounds(path: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The rounds of each case, and what ended the bench; empty if nothing did."""
    rounds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    if not path.exists():  # none was measured
        return {}, ""
    error = ""
    for line in read_small_file(path, "bench's rounds", _MAX_BYTES).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # the last line of a bench that was killed
        if "error" in record:
            error = str(record["error"]["message"])
        elif record["case"] in CASES:
            rounds[record["case"]].append(record)
    return dict(rounds), error


def _case(
    folder: Path, name: str, rounds: list[dict[str, Any]], summary: Summary | None
) -> CaseReport:
    about: Mapping[str, Any] = {"rounds": rounds} if summary is None else summary["cases"][name]
    report = CaseReport(name, len(about["rounds"]), str(about.get("error") or ""))
    rounds = sorted(rounds, key=lambda record: float(record["measured"]["makespan"]))
    if not rounds:
        return report
    median = rounds[(len(rounds) - 1) // 2]
    figures = figures_of(median, repr(str(folder / ROUNDS)))
    assert figures is not None

    def command(layout: Layout) -> str:
        words = [str(folder / CONFIG), f"--pipeline.split={layout.split}"]
        words += [f"--pipeline.{n}={getattr(layout, n)}" for n in ("replicas", "decoders")]
        if layout.split != "uniform":
            words.append(f"--pipeline.costs={folder / COSTS}")
        return f"svdpp bench {shlex.join(words)}"

    found = diagnose(figures, command, without=("disk",))  # no case writes files
    advice = found.advice
    # Before the end the costs file does not exist, and data parallel is measured, not forecast.
    if name != PIPELINE or summary is None or (advice and advice.text.startswith(DATA_PARALLEL)):
        found = replace(found, advice=None)
    return report._replace(round=int(median["round"]), diagnosis=found)
