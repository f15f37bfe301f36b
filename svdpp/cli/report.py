"""`svdpp report`: what limits a finished run, and what would make it faster."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, option
from svdpp.cli.options.talk import AnswerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from svdpp.bench.compare import Ratio
    from svdpp.bench.report import BenchReport, CaseReport
    from svdpp.diagnostics.advice import Advice
    from svdpp.diagnostics.diagnosis import Diagnosis
    from svdpp.diagnostics.figures import RankFigures, RunFigures
    from svdpp.diagnostics.run_report import RunReport


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The run or the bench, and where the page goes."""

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run or of a bench, or a run.json.",
            show_default=False,
        ),
    ]
    html: Annotated[
        Path | None,
        option(
            "--html",
            panel=DIAGNOSTICS,
            metavar="FILE.html",
            help="Also write the report as one page.",
            default="write none",
        ),
    ] = None


_Report = TypeVar("_Report", "BenchReport", "RunReport")
_FORECASTS = {
    "before": "before the start",
    "after_first_clip": "after the first clip",
    "afterwards": "by all measured costs",
}


@command(
    examples=(
        "svdpp report out",
        "svdpp report out --html report.html",
        "svdpp report results/smoke/A --json",
    )
)
def report(console: Console, options: ReportOptions, answer: AnswerOptions) -> None:
    """Say what limits a finished run or bench, and what would make it faster.

    It reads the figures that svdpp run leaves in run.json, and svdpp bench in its folder: where
    each rank's time went, which rank limits the others and why, how much memory was left, and how
    good the forecasts were; of a bench also its noise and its targets.
    """
    from svdpp.bench import report as of_bench
    from svdpp.cli.trace_outputs import check_target
    from svdpp.diagnostics import run_report as of_run

    check_target("--html", options.html, ".html")
    if of_bench.is_bench(options.folder):
        bench = of_bench.read_bench_report(options.folder)
        _answer(console, options, answer, bench, of_bench.write_page, _print_bench)
    else:
        run = of_run.with_speeds(of_run.read_report(options.folder))
        _answer(console, options, answer, run, of_run.write_page, _print_run)


def _answer(
    console: Console,
    options: ReportOptions,
    answer: AnswerOptions,
    found: _Report,
    write_page: Callable[[_Report, Path], None],
    show: Callable[[Console, _Report], None],
) -> None:
    if options.html is not None:
        write_page(found, options.html)
        console.info(f"wrote {shlex.quote(str(options.html))}")
    if answer.as_json:
        console.json(found.to_json())
    else:
        show(console, found)


def _print_run(console: Console, found: RunReport) -> None:
    states = ", ".join(f"{number} {state}" for state, number in found.states.items())
    console.result(f"clips: {states or 'none'}")
    for clip in found.lost:
        console.result(f"  {clip.output or '(no clip)'}: {clip.why}")
    console.result(found.times)
    if found.diagnosis is not None:
        console.result()
        _print_ranks(console, found.diagnosis.figures)
        _print_diagnosis(console, found.diagnosis, "run")


def _print_bench(console: Console, found: BenchReport) -> None:
    from svdpp.cli.bench_report import show_summary

    if found.summary is None:
        rounds = ", ".join(f"{case.name} {case.num_rounds}" for case in found.cases)
        console.result(found.failures[0])
        console.result(f"rounds: {rounds or 'none'}")
    else:
        show_summary(console, dict(found.summary))
    for case in found.cases:
        _print_case(console, case)
    if found.noise:
        console.result("\nNoise: an equal bench would have figures in this range")
        rows = [(each.name, f"{each.a:.4g}", _range(each)) for each in found.noise]
        console.table(("figure", "measured", "times, in 99.9%"), rows)


def _print_case(console: Console, case: CaseReport) -> None:
    if case.diagnosis is None:
        return
    console.result(f"\n{case.name}, round {(case.round or 0) + 1}, whose makespan is the median")
    console.result(case.diagnosis.times)
    _print_ranks(console, case.diagnosis.figures)
    _print_diagnosis(console, case.diagnosis, "round")


def _range(ratio: Ratio) -> str:
    return "one round" if ratio.low is None else f"{ratio.low:.3g} to {ratio.high:.3g}"


def _print_diagnosis(console: Console, found: Diagnosis, what: str) -> None:
    console.result("\nWhat limits it")
    for finding in found.findings:
        lost = f" ({finding.lost_seconds:.1f} s)" if finding.lost_seconds else ""
        console.result(f"  {finding.text}{lost}")
    if found.advice:
        _print_advice(console, found.advice)
    console.result()
    for line in found.gpu_lines:
        console.result(line)
    if str(found.speeds):
        console.result(str(found.speeds))
    for room in found.head_rooms:
        names = ", ".join(map(str, room.ranks))
        console.result(
            f"memory of rank {names}: peak {room.peak_bytes / 2**30:.1f} of "
            f"{room.total_bytes / 2**30:.1f} GiB, {room.free_share:.0%} left"
        )
    errors = [f"{_FORECASTS[name]} {error:+.0%}" for name, error in found.forecast_errors.items()]
    if errors:
        console.result(f"the {what} took, against its forecast: {', '.join(errors)}")


def _print_advice(console: Console, advice: Sequence[Advice]) -> None:
    console.result("\nWhat would help")
    for each in advice:
        console.result(f"  {each.text}")
        if each.command:
            console.result(f"    {each.command}")


def _print_ranks(console: Console, figures: RunFigures) -> None:
    columns = ("rank", "steps", "compute", "wait", "transfer", "idle", "step", "encode", "decode")
    console.table((*columns, "write"), map(_row, figures.ranks))


def _row(rank: RankFigures) -> tuple[str, ...]:
    parts = (rank.compute, rank.wait, rank.transfer, rank.idle)
    works = (rank.step, rank.encode, rank.decode, rank.write)
    return (
        str(rank.rank),
        f"{rank.start}:{rank.end}",
        *(f"{part / rank.wall:.0%}" if rank.wall else "-" for part in parts),
        *(f"{work.mean_seconds:.3g} s" if work.count else "-" for work in works),
    )
