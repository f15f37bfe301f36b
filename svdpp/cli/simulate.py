"""`svdpp simulate`: rehearses a run with real processes, without GPUs or weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options import complete
from svdpp.cli.options.declare import COSTS, MODEL, option
from svdpp.cli.options.files import ClipOptions, LogOptions, PromptOptions, TraceOptions
from svdpp.cli.options.model import WithoutAppearance
from svdpp.cli.options.pipeline import Device, PipelineOptions, costs_option
from svdpp.config import DUMMY_MODEL
from svdpp.config.limits import require
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from svdpp.config import ClipRequest
    from svdpp.diagnostics.run_metrics import RankRunMetrics
    from svdpp.driver.pipeline import Pipeline


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(WithoutAppearance, PipelineOptions, PromptOptions, ClipOptions):
    """Options of `svdpp simulate`: pipeline, number of clips, and speed of the simulation."""

    model: Annotated[
        str,
        option(
            panel=MODEL,
            metavar="MODEL",
            help="dummy (a small random Conv3d network without weight files), demo, demo-text, "
            "a diffusers folder or a hub id.",
            common=True,
            envvar="SVDPP_MODEL",
            show_envvar=False,
            autocompletion=complete.models,
        ),
    ] = DUMMY_MODEL
    device: Device = "cpu"
    costs: Annotated[
        str | None,
        costs_option(
            "svd-xt-a100 with --time-scale; else 1 s for each step and 0 s for other work"
        ),
    ] = None
    time_scale: Annotated[
        float | None,
        option(
            panel=COSTS,
            metavar="X",
            help="Make the dummy model sleep for X times the seconds in --costs, to imitate other "
            "devices (X below 1: in less time).",
            show_default="no sleep",
            common=True,
        ),
    ] = None

    # These fields are not options of `svdpp simulate`, because a rehearsal does not depend on them.
    revision: str | None = None
    variant: str | None = None
    lora: list[str] | None = None
    denoiser: list[str] | None = None
    attention_backend: str | None = None
    local_files_only: bool = False
    memory_opt: bool = False
    channels_last: bool = False
    vae_tiling: bool = False
    decode_chunk_size: int | None = None
    prompts: Path | None = None
    negative_prompt: str | None = None
    last_image: Path | None = None
    reference: list[Path] | None = None
    video: list[str] | None = None


@app.command(
    **command_settings(
        "svdpp simulate --gpus 2 --steps 8",
        "svdpp simulate --gpus 4 --split alternating --time-scale 0.01 --trace t.json",
    )
)
@with_option_groups
def simulate(
    console: Console,
    launched: World | None,
    traces: TraceOptions,
    log: LogOptions,
    options: SimulateOptions,
) -> None:
    """Rehearse a run with real processes, without weights or GPUs.

    Processes and transfers are those of `svdpp run`. The ranks share the cores of this machine, so
    the measured times hold only for the rehearsal. The forecast, printed below these times, is a
    simulation of the same plan with the mean of the measured costs.
    """
    from svdpp.launch.fork_server import start_fork_server_early
    from svdpp.media.inputs import example_requests

    traces.check()
    sizes = {"num_frames": options.num_frames, "height": options.height, "width": options.width}
    for name, value in sizes.items() if options.is_dummy else ():
        message = f"`{name}` has no effect on the dummy model"
        require(value is None, message, "--latent-shape sets its size", option=name, value=value)
    request = options.request(launched=launched, time_scale=options.time_scale)
    if launched is None:
        start_fork_server_early(family=options.loaded_family, device=request.device)
    # Imported after the start of the fork server, which imports torch at the same time.
    from svdpp.driver.pipeline import Pipeline

    num_clips = options.clips or 2 * request.world_size
    config, why = replace(request, num_clips=num_clips).resolve()
    log.open(console, launched)
    pipeline = Pipeline(config, checkpoint=options.checkpoint)
    if is_secondary_rank(launched):
        from svdpp.cli.progress import serve_member

        serve_member(pipeline, launched, console)
        return
    console.info(why)
    seed, prompt = options.seed or 0, options.prompt
    requests = example_requests(config, num_clips, seed=seed, prompt=prompt)
    _run_pipeline(console, pipeline, requests, traces)
    _show(console, pipeline, requests)


def _run_pipeline(
    console: Console, pipeline: Pipeline, requests: list[ClipRequest], traces: TraceOptions
) -> None:
    from svdpp.cli.progress import EventLog, Progress

    config = pipeline.config
    progress = Progress(console, "simulate", pipeline.schedule(requests), costs=config.costs)
    with progress:
        pipeline.observe(progress)
        pipeline.observe(EventLog(config.layout))
        with traces.write_trace(pipeline), pipeline:
            pipeline.run(requests)
    console.info(", wrote ".join([progress.summary_line, *traces.paths]))


def _show(console: Console, pipeline: Pipeline, requests: list[ClipRequest]) -> None:
    from svdpp.diagnostics.run_metrics import collect_run_metrics
    from svdpp.plan.forecast import summarise

    forecast = summarise(pipeline.replayed(requests), pipeline.config.world_size)
    times = {"measured": pipeline.trace.summary(), "forecast": forecast}
    config, metrics = pipeline.config, collect_run_metrics(pipeline.trace, pipeline.config)
    assert metrics is not None, "a simulation has a clip"
    console.report(
        {
            "schema_version": 1,
            "num_steps": config.sampling.num_inference_steps,
            "world_size": config.world_size,
            **config.parallel.to_json(),
            "num_threads": config.num_threads,
            "model": config.model.name,
            "dtype": config.model.dtype,
            "backend": pipeline.backend,
            "clips": times["measured"].clips,
            **{name: one.to_json() for name, one in times.items()},
            "ranks": [_row(rank) for rank in metrics.ranks],
        }
    )
    console.grid(pipeline.trace.spans, config.world_size)


def _row(rank: RankRunMetrics) -> dict[str, Any]:
    times = {f"{name}_seconds": getattr(rank, name) for name in ("compute", "wait", "transfer")}
    return {
        **{name: getattr(rank, name) for name in ("rank", "device", "start", "end")},
        "steps_done": rank.step.count,
        "mean_step_seconds": rank.step.mean_seconds,
        **times,
        "bubble": max(0.0, 1 - rank.compute / rank.wall),
    }
