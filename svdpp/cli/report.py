"""Owns `svdpp report`: what limits a finished run, and what would make it faster."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.cli.options.report import ReportOptions
from svdpp.cli.options.talk import AnswerOptions

if TYPE_CHECKING:
    from svdpp.diagnostics.figures import RankFigures, RunFigures
    from svdpp.diagnostics.run_report import RunReport

_FORECASTS = {
    "before": "before the start",
    "after_first_clip": "after the first clip",
    "afterwards": "by all measured costs",
}


@command(
    examples=("svdpp report out", "svdpp report out --html report.html", "svdpp report out --json")
)
def report(console: Console, options: ReportOptions, answer: AnswerOptions) -> None:
    """Say what limits a finished run, and what would make it faster.

    It reads the figures that svdpp run leaves in run.json: where each rank's time went, which rank
    limits the others and why, how much memory was left, and how good the forecasts were.
    """
    from svdpp.cli.trace_outputs import check_target
    from svdpp.diagnostics.run_report import read_report, with_speeds, write_page

    check_target("--html", options.html, ".html")
    found = with_speeds(read_report(options.folder))
    if options.html is not None:
        write_page(found, options.html)
        console.info(f"wrote {shlex.quote(str(options.html))}")
    if answer.as_json:
        console.json(found.to_json())
    else:
        _print(console, found)


def _print(console: Console, found: RunReport) -> None:
    states = ", ".join(f"{number} {state}" for state, number in found.states.items())
    console.result(f"clips: {states or 'none'}")
    for clip in found.lost:
        console.result(f"  {clip.output or '(no clip)'}: {clip.why}")
    figures = found.figures
    console.result(found.times)
    if figures is None:
        return
    console.result()
    _print_ranks(console, figures)
    console.result()
    console.result("What limits it")
    for finding in found.findings:
        lost = f" ({finding.lost_seconds:.1f} s)" if finding.lost_seconds else ""
        console.result(f"  {finding.text}{lost}")
    if found.advice:
        console.result("\nWhat would help")
    for advice in found.advice:
        console.result(f"  {advice.text}")
        if advice.command:
            console.result(f"    {advice.command}")
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
    errors = [f"{_FORECASTS[name]} {error:+.0%}" for name, error in found.eta_errors.items()]
    if errors:
        console.result(f"the run took, against its forecast: {', '.join(errors)}")


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
