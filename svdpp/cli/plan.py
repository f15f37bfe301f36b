"""Owns `svdpp plan`: who does what, when, and what it will cost. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.config import DEFAULT_NUM_STEPS
from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, Span, replay, summarise
from svdpp.plan.grid import draw_grid
from svdpp.plan.schedule import build_schedule, data_parallel_routes, pipeline_routes
from svdpp.plan.sigmas import karras_sigmas
from svdpp.plan.split import StepRange, split_steps

_DEFAULT_WORLD = 4
_COSTS = "Costs"
# Clips times ranks: some seconds and some hundred MB of actions.
_MAX_VISITS = 1_000_000


def plan(
    world: options.World = None,
    steps: options.Steps = DEFAULT_NUM_STEPS,
    clips: Annotated[
        int | None,
        typer.Option(metavar="M", help="Clips to run, 1 or more. Default: 2 for each rank."),
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time of one step, above 0. Default: 1, as the unit of all other times.",
            rich_help_panel=_COSTS,
        ),
    ] = None,
    encode_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time of one clip's encode, 0 or more.", rich_help_panel=_COSTS
        ),
    ] = 0.0,
    decode_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time of one clip's decode, 0 or more.", rich_help_panel=_COSTS
        ),
    ] = 0.0,
    hop_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time of one hand-over, 0 or more.", rich_help_panel=_COSTS
        ),
    ] = 0.0,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
) -> None:
    """Show who does which steps, the picture over time, and what it will take.

    Without costs, times are in units of one step and decoding counts for nothing; on real SVD it
    weighs about four steps, so give --step-seconds and --decode-seconds for an honest forecast.
    """
    world_size = _DEFAULT_WORLD if world is None else world
    ranges = split_steps(steps, world_size)
    num_clips = 2 * world_size if clips is None else clips
    if num_clips < 1:
        raise RequestError(f"--clips must be 1 or more, got {num_clips}")
    if num_clips * world_size > _MAX_VISITS:
        raise RequestError(
            f"{num_clips} clips on {world_size} ranks are too many to plan one by one",
            f"--clips {max(1, _MAX_VISITS // world_size)} or fewer show the same cadence",
        )
    costs = Costs(
        step_seconds=1.0 if step_seconds is None else step_seconds,
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
        hop_seconds=hop_seconds,
    )
    schedule = build_schedule(pipeline_routes(ranges, range(num_clips)), world_size)
    whole_clips = data_parallel_routes(steps, world_size, range(num_clips))
    spans = replay(schedule, costs)
    forecast = summarise(spans, world_size)
    data_parallel = summarise(replay(build_schedule(whole_clips, world_size), costs), world_size)
    unit = "step" if step_seconds is None else "second"
    console = Console(as_json=as_json, quiet=quiet)
    if as_json:
        console.json(_to_json(steps, ranges, forecast, data_parallel, unit))
    else:
        _print(console, ranges, karras_sigmas(steps), spans, forecast, data_parallel, unit)


def _to_json(
    num_steps: int,
    ranges: tuple[StepRange, ...],
    forecast: Forecast,
    data_parallel: Forecast,
    unit: str,
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "num_steps": num_steps,
        "world_size": len(ranges),
        "split": "uniform",
        "unit": unit,
        "ranks": [part._asdict() for part in ranges],
        "forecast": {
            "clips": forecast.clips,
            "makespan_seconds": forecast.makespan,
            "first_clip_seconds": forecast.first_clip,
            "cadence_seconds": forecast.cadence,
            "bubble": forecast.bubble,
            "data_parallel": {
                "makespan_seconds": data_parallel.makespan,
                "first_clip_seconds": data_parallel.first_clip,
                "cadence_seconds": data_parallel.cadence,
            },
        },
    }


def _print(
    console: Console,
    ranges: tuple[StepRange, ...],
    sigmas: list[float],
    spans: list[Span],
    forecast: Forecast,
    data_parallel: Forecast,
    unit: str,
) -> None:
    rows = [
        (
            str(part.rank),
            str(part.start),
            str(part.end),
            str(part.num_steps),
            f"{sigmas[part.start]:.4g} -> {sigmas[part.end]:.4g}",
        )
        for part in ranges
    ]
    console.table(("rank", "start", "end", "steps", "sigma"), rows)
    console.result()
    width = max(20, console.out.width - len(f"rank {len(ranges) - 1} ||"))
    console.grid(draw_grid(spans, len(ranges), width=width))
    console.result("time ->   one sign a clip, < encode, > decode, . idle")
    console.result()

    def show(value: float) -> str:
        text = f"{value:.4g}"
        return f"{text} {unit}{'' if text == '1' else 's'}"

    for line in (
        f"{forecast.clips} clips on {len(ranges)} ranks: {show(forecast.makespan)}",
        f"first clip after {show(forecast.first_clip)}, "
        f"then one every {show(forecast.cadence)}; bubble {forecast.bubble:.0%}",
        f"data parallel on the same {len(ranges)} devices: {show(data_parallel.makespan)}",
        f"first clip after {show(data_parallel.first_clip)}, "
        f"then one every {show(data_parallel.cadence)}; bubble {data_parallel.bubble:.0%}",
    ):
        console.result(line)
    if unit == "step":
        console.talk(
            "in units of one step, decoding not counted;\n"
            "--step-seconds and --decode-seconds give times"
        )
