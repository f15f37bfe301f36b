"""Owns `svdpp simulate`: a rehearsal with real processes, without a GPU or weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.cli.draft_choice import DraftChoice
from svdpp.config import DEFAULT_NUM_STEPS, DUMMY_MODEL, ClipRequest, ModelConfig, PipelineConfig
from svdpp.config.limits import check_num_clips
from svdpp.errors import OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from svdpp.driver.pipeline import Pipeline
    from svdpp.plan.costs import Costs
    from svdpp.plan.forecast import Forecast

_DEFAULT_WORLD = 4
_MEMORY_HINT = "smaller sizes in --latent-shape, --dtype fp16 or a smaller --world lower it"


def simulate(
    world: options.World = None,
    steps: options.Steps = DEFAULT_NUM_STEPS,
    clips: Annotated[
        int | None,
        typer.Option(metavar="M", help="Clips to run, 1 or more. Default: 2 for each rank."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="'dummy' (a small Conv3d network), 'demo', a diffusers folder or a hub id.",
        ),
    ] = DUMMY_MODEL,
    latent_shape: Annotated[
        tuple[int, int, int, int, int] | None,
        typer.Option(
            metavar="B C F H W",
            help="Latent of the dummy model: five sizes, each 1 or more. Default: 1 4 14 64 64; "
            "1 4 2 8 8 with --time-scale.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda:N|cuda", help="cpu, or cuda:0 shared by all ranks.")
    ] = "cpu",
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    draft: options.Draft = False,
    start_steps: options.Starts = None,
    split: options.SplitOption = None,
    replicas: options.Replicas = None,
    decoders: options.Decoders = None,
    layout: options.LayoutOption = None,
    costs: options.CostsOption = None,
    pace: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Have the dummy model sleep for the time of --costs times this, above 0: other "
            "devices scaled on this one. Default: as fast as it goes.",
            rich_help_panel="Costs",
        ),
    ] = None,
    checksum: options.Checksum = False,
    threads: options.Threads = None,
    timeout: options.Timeout = 600.0,
    start_timeout: options.StartTimeout = 600.0,
    trace: options.Trace = None,
    timeline: options.Timeline = None,
    profile: options.Profile = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
    log_file: options.LogFile = None,
) -> None:
    """Rehearse a run: real processes, real hand-overs, the same engine as `run`.

    The ranks share this machine's cores, so its times are the rehearsal's, not a GPU box's; the
    forecast beside them replays the same plan with the mean costs that were measured.
    """
    from svdpp.cli import launched, log, request
    from svdpp.cli.layout_choice import LayoutChoice
    from svdpp.cli.plan_choice import PlanChoice
    from svdpp.cli.progress import Progress
    from svdpp.cli.trace_outputs import TraceOutputs
    from svdpp.diagnostics.time_breakdown import overrun
    from svdpp.driver.pipeline import Pipeline

    plan = PlanChoice(
        draft=DraftChoice(draft=draft, start_steps=start_steps),
        layout=LayoutChoice(
            split=split, replicas=replicas, decoders=decoders, layout=layout, costs=costs
        ),
        world=world,
        steps=steps,
        device=device,
        default_world=_DEFAULT_WORLD,
    )
    num_clips = max(1, 2 * plan.world_size()) if clips is None else clips
    check_num_clips(num_clips)
    decodes = model != DUMMY_MODEL or pace is not None
    shape, why = plan.settings(num_clips=num_clips, decodes=decodes)
    if pace is not None:
        shape["costs"] = _paced(shape["costs"], pace, model)
    config = request.pipeline_config(
        model=ModelConfig(
            name=model,
            dtype=request.parse_dtype(dtype, device),
            dummy_latent_shape=latent_shape,
            dummy_sleeps=pace is not None,
        ),
        sampling=request.sampling_config(model, steps),
        device=device,
        threads=threads,
        timeout=timeout,
        start_timeout=start_timeout,
        checksum=checksum,
        plan=shape,
    )
    console = Console(as_json=as_json, quiet=quiet)
    log.open_log(verbosity=verbose, log_file=log_file, write=console.err.print)
    if why:
        console.info(why)
    trace_outputs = TraceOutputs(trace=trace, timeline=timeline, profile=profile)
    pipeline = Pipeline(config, profile_path=trace_outputs.profile_path)
    if pipeline.is_member:
        launched.serve(pipeline, console)
        return
    requests = _requests(config, num_clips, request.parse_seeds(seed, None)[0])
    with Progress(console, "simulate", pipeline.schedule(requests)) as progress:
        pipeline.observe(progress)
        pipeline.observe(log.EventLog(config.plan))
        try:
            with trace_outputs.of(pipeline), pipeline:
                pipeline.run(requests)
        except OutOfMemoryError as error:
            error.hint = _MEMORY_HINT  # the engine's names options that only run and verify have
            raise
    measured, forecast = pipeline.trace.summary(), pipeline.forecast()
    if reason := overrun(pipeline.trace, forecast, pipeline.forecast_costs()):
        console.info(f"warning: {reason}")
    if as_json:
        console.json({**_to_json(pipeline, measured, forecast), "overrun": reason or None})
    else:
        _print(console, pipeline, measured, forecast)


def _paced(costs: Costs, pace: float, model: str) -> Costs:
    """`costs` at the rehearsal's time scale; transfers and files take their real time."""
    if model != DUMMY_MODEL:
        raise RequestError("--time-scale has the dummy model sleep", "leave --model out")
    if not (math.isfinite(pace) and pace > 0):
        raise RequestError(f"--time-scale must be a finite number above 0, got {pace}")
    return costs.scaled(pace)


def _requests(config: PipelineConfig, num_clips: int, seed: int) -> list[ClipRequest]:
    """One clip a seed, from the first example photograph where the model wants one."""
    from svdpp.media.examples import example_photos

    image = None if config.model.is_dummy else str(example_photos()[0])
    return [ClipRequest(seed=seed + index, image=image) for index in range(num_clips)]


def _to_json(pipeline: Pipeline, measured: Forecast, forecast: Forecast) -> dict[str, Any]:
    config = pipeline.config
    ranks = pipeline.trace.to_json()
    for rank, share in zip(ranks, config.plan.all_shares, strict=True):
        rank.update(start=share.start, end=share.end)
    return {
        "schema_version": 1,
        "num_steps": config.sampling.num_inference_steps,
        "world_size": config.world_size,
        "split": config.split,
        "replicas": config.replicas,
        "decoders": config.decoders,
        "start_steps": None if config.draft is None else list(config.draft.start_steps),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "backend": pipeline.backend,
        "num_threads": config.num_threads,
        "clips": measured.clips,
        "measured": _times(measured),
        "forecast": _times(forecast),
        "ranks": ranks,
    }


def _times(times: Forecast) -> dict[str, float]:
    return {
        "makespan_seconds": times.makespan,
        "first_clip_seconds": times.first_clip,
        "seconds_per_clip": times.seconds_per_clip,
        "bubble": times.bubble,
    }


def _print(console: Console, pipeline: Pipeline, measured: Forecast, forecast: Forecast) -> None:
    from svdpp.plan.grid import draw_grid

    world_size = pipeline.config.world_size
    rows = [
        (
            str(stats.rank),
            f"{share.start}:{share.end}",
            str(stats.steps_done),
            f"{stats.compute_seconds:.2f}",
            f"{stats.wait_seconds:.2f}",
            f"{stats.transfer_seconds:.3f}",
            f"{stats.mean_step_seconds * 1000:.1f}",
            f"{stats.p95_step_seconds * 1000:.1f}",
            f"{stats.bubble:.0%}",
        )
        for stats, share in zip(
            pipeline.trace.rank_stats(), pipeline.config.plan.all_shares, strict=True
        )
    ]
    columns = ("rank", "range", "steps", "compute s", "wait s", "transfer s", "mean ms", "p95 ms")
    console.table((*columns, "bubble"), rows)
    console.result()
    width = max(20, console.out.width - len(f"rank {world_size - 1} ||"))
    console.grid(draw_grid(pipeline.trace.spans, world_size, width=width))
    console.result()
    for name, times in (("measured", measured), ("forecast", forecast)):
        console.result(
            f"{name}: {times.clips} clips in {times.makespan:.2f} s, first after "
            f"{times.first_clip:.2f} s, then one every {times.seconds_per_clip:.2f} s; "
            f"bubble {times.bubble:.0%}"
        )
