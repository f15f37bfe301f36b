"""`svdpp report`: what limits a finished run, and what would make it faster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.declare import path_argument
from svdpp.cli.options.pipeline import PeakTflops
from svdpp.config.limits import require
from svdpp.errors import pluralize

if TYPE_CHECKING:
    from svdpp.diagnostics.report import RunAnalysis
    from svdpp.diagnostics.run_metrics import RankRunMetrics
    from svdpp.diagnostics.utilisation import Speed, Speeds


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `svdpp report`: the run to report on, and the peak TFLOP/s of its devices."""

    folder: Annotated[Path, path_argument("FOLDER", "Folder of a run, or a run.json.")]
    peak_tflops: PeakTflops = None


@app.command(**command_settings("svdpp report out", "svdpp report out --json"))
@with_option_groups
def report(console: Console, options: ReportOptions) -> None:
    """Say what limits a finished run, and what would make it faster.

    The command reads the figures that svdpp run writes to run.json: where each rank's time went,
    which rank limits the others and why, how much memory was left, and how good the forecast was.
    For TFLOP/s and the utilisation of the devices, the command counts the FLOPs of the model's
    calls, which takes seconds.
    """
    from svdpp.diagnostics.report import read_report
    from svdpp.diagnostics.utilisation import Speeds, speeds_of

    peak = options.peak_tflops
    require(
        peak is None or 0 < peak < math.inf,
        f"--peak-tflops must be a number above 0, got {peak}",
        peak_tflops=peak,
    )
    found, analysis = read_report(options.folder)
    speeds = Speeds() if analysis is None else speeds_of(analysis.metrics, peak)
    console.json({**found, "speed": speeds.to_json()})
    states = ", ".join(f"{number} {state}" for state, number in found["clips"].items())
    console.result(f"clips: {states or 'none'}")
    for clip in found["lost"]:
        console.prose(f"{clip['output'] or '(no clip)'}: {clip['why']}", "  ")
    if analysis is None:
        console.prose(
            "times: unknown, because the run was killed, made no clip, or recorded no measurements"
        )
    else:
        _print_analysis(console, analysis, speeds)


def _print_analysis(console: Console, found: RunAnalysis, speeds: Speeds) -> None:
    metrics = found.metrics
    console.prose(
        f"times: {metrics.start_seconds:.1f} s to start, "
        f"then {pluralize(metrics.clips, 'clip')} in "
        f"{metrics.makespan:.1f} s, the first after {metrics.first_clip:.1f} s, then one every "
        f"{metrics.seconds_per_clip:.2f} s; bubble {metrics.bubble:.0%}"
    )
    console.result()
    of_ranks = speeds.ranks or (None,) * metrics.world_size
    console.table([*map(_row, metrics.ranks, of_ranks)])
    if speeds.run is not None:
        console.prose(f"speed of each rank, including waits: {_speed(speeds.run)}")
    if speeds.note:
        console.prose(speeds.note)
    console.result("\nWhat limits it")
    for finding in found.findings:
        lost = f" ({finding.lost_seconds:.1f} s)" if finding.lost_seconds else ""
        console.prose(f"  {finding.text}{lost}", "  ")
    if (advice := found.advice) is not None:
        console.result("\nWhat would help, at the measured costs")
        console.prose(f"  {advice.text}:", "  ")
        console.result(f"    {advice.options}")
    if found.forecast_error is not None:
        more = f"{found.forecast_error:+.0%}"
        console.result(
            f"\nthe run's time differs by {more} from the forecast with its measured costs"
        )


def _speed(speed: Speed) -> str:
    share = "" if speed.utilisation is None else f" ({speed.utilisation:.0%} of its peak)"
    return f"{speed.tflops:.3g} TFLOP/s{share}"


def _row(rank: RankRunMetrics, speed: Speed | None) -> dict[str, str]:
    row = {"rank": str(rank.rank), "steps": f"{rank.start}:{rank.end}"}
    for name in ("compute", "wait", "transfer", "idle"):
        row[name] = f"{getattr(rank, name) / rank.wall:.0%}" if rank.wall else "-"
    for name in ("step", "encode", "decode"):
        work = getattr(rank, name)
        row[name] = f"{work.mean_seconds:.3g} s" if work.count else "-"
    if speed is not None:
        row["TFLOP/s"] = f"{speed.tflops:.3g}" if rank.compute else "-"
        if speed.utilisation is not None:
            row["of peak"] = f"{speed.utilisation:.0%}" if rank.compute else "-"
    row["GiB"] = f"{rank.peak_bytes / 2**30:.2f}" if rank.peak_bytes else "-"
    return row
