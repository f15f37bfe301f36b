"""`svdpp report`: what limits a finished run or bench, and what would make it faster."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, argument, setting

if TYPE_CHECKING:
    from svdpp.bench.compare import Ratio
    from svdpp.bench.report import BenchReport
    from svdpp.diagnostics.figures import RankFigures
    from svdpp.diagnostics.report import Diagnosis, RunReport


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The run or the bench, and where the page goes."""

    folder: Path = argument(
        "FOLDER", "Folder of a run or of a bench, or a run.json.", required=True
    )
    html: Path | None = setting(
        DIAGNOSTICS, "FILE.html", "Also write the report as one page.", shown="write none"
    )


@command(
    examples=(
        "svdpp report out",
        "svdpp report out --html report.html",
        "svdpp report results/smoke/A --json",
    )
)
def report(console: Console, options: ReportOptions) -> None:
    """Say what limits a finished run or bench, and what would make it faster.

    It reads the figures that svdpp run leaves in run.json, and svdpp bench in its folder: where
    each rank's time went, which rank limits the others and why, how much memory was left, and how
    good the forecasts were; of a bench also its noise and its targets.
    """
    from svdpp.bench.report import BenchReport, is_bench, read_bench_report
    from svdpp.cli.trace_outputs import check_target
    from svdpp.diagnostics.report import read_report

    check_target("--html", options.html, ".html")
    found: BenchReport | RunReport
    if is_bench(options.folder):
        found = read_bench_report(options.folder)
    else:
        found = read_report(options.folder)

    def show(console: Console) -> None:
        if isinstance(found, BenchReport):
            _print_bench(console, found)
        else:
            _print_run(console, found)

    if options.html is not None:
        page = Console(records=True)
        show(page)
        page.write_page(options.html)
        console.info(f"wrote {shlex.quote(str(options.html))}")
    if console.as_json:
        console.json(found.to_json())
    else:
        show(console)


def _print_run(console: Console, found: RunReport) -> None:
    states = ", ".join(f"{number} {state}" for state, number in found.states.items())
    console.result(f"clips: {states or 'none'}")
    for clip in found.lost:
        console.result(f"  {clip['output'] or '(no clip)'}: {clip['why']}")
    if found.diagnosis is None:
        console.result("times: none, because the run was killed, made no clip, or left no figures")
    else:
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
        if case.diagnosis is not None:
            console.result(f"\n{case.name}, round {case.round + 1}, whose makespan is the median")
            _print_diagnosis(console, case.diagnosis, "round")
    if found.noise:
        console.result("\nNoise: an equal bench would have figures in this range")
        console.table(
            [
                {"figure": ratio.name, "measured": f"{ratio.a:.4g}", "times": _range(ratio)}
                for ratio in found.noise
            ]
        )


def _range(ratio: Ratio) -> str:
    return "one round" if ratio.low is None else f"{ratio.low:.3g} to {ratio.high:.3g}"


def _print_diagnosis(console: Console, found: Diagnosis, what: str) -> None:
    console.result(found.times)
    console.result()
    console.table([*map(_row, found.figures.ranks)])
    console.result("\nWhat limits it")
    for finding in found.findings:
        lost = f" ({finding.lost_seconds:.1f} s)" if finding.lost_seconds else ""
        console.result(f"  {finding.text}{lost}")
    if found.advice:
        console.result("\nWhat would help")
    for advice in found.advice:
        console.result(f"  {'; '.join(filter(None, (advice.text, advice.note)))}")
        if advice.command:
            console.result(f"    {advice.command}")
    console.result()
    for line in found.device_lines:
        console.result(line)
    if found.forecast_error is not None:
        error = f"{found.forecast_error:+.0%}"
        console.result(f"the {what} took, against the forecast by all measured costs: {error}")


def _row(rank: RankFigures) -> dict[str, str]:
    row = {"rank": str(rank.rank), "steps": f"{rank.start}:{rank.end}"}
    for name in ("compute", "wait", "transfer", "idle"):
        row[name] = f"{getattr(rank, name) / rank.wall:.0%}" if rank.wall else "-"
    for name in ("step", "encode", "decode", "write"):
        work = getattr(rank, name)
        row[name] = f"{work.mean_seconds:.3g} s" if work.count else "-"
    return row
