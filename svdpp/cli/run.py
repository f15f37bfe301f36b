"""Owns `svdpp run`: photographs in, clips out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.config import DEFAULT_MODEL, DEFAULT_NUM_STEPS, ModelConfig, OutputConfig
from svdpp.errors import Interrupted, RankError

if TYPE_CHECKING:
    from svdpp.runtime.pipeline import Pipeline
    from svdpp.runtime.request import ClipPlan

_OUTPUTS = "Outputs"


def run(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Image files, folders of images, or quoted globs."),
    ],
    world: options.World = None,
    steps: options.Steps = DEFAULT_NUM_STEPS,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder for the clips.", rich_help_panel=_OUTPUTS
        ),
    ] = Path("out"),
    seed: options.Seed = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Several seeds for each image, such as 1-8 or 1,3,5-7; clips = images x seeds.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    revision: options.Revision = None,
    variant: options.Variant = None,
    local_files_only: options.LocalFilesOnly = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cuda|cpu|cuda:N",
            help="cuda: rank r on cuda:r, over NCCL; cpu, or one shared cuda:N, over gloo.",
            rich_help_panel="Ranks",
        ),
    ] = "cuda",
    dtype: options.Dtype = None,
    height: options.Height = None,
    width: options.Width = None,
    frames: options.NumFrames = None,
    fps: options.Fps = None,
    motion_bucket_id: options.MotionBucketId = None,
    noise_aug_strength: options.NoiseAugStrength = None,
    min_guidance_scale: options.MinGuidanceScale = None,
    max_guidance_scale: options.MaxGuidanceScale = None,
    decode_chunk_size: options.DecodeChunkSize = None,
    memory_opt: options.MemoryOpt = False,
    fit: options.FitOption = "stretch",
    output_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="mp4|gif|webp|frames",
            help="Kind of output; frames: a folder of PNG files.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = "mp4",
    crf: Annotated[
        int,
        typer.Option(
            metavar="Q",
            help="H.264 quality of mp4, 0 (lossless) to 51 (worst).",
            rich_help_panel=_OUTPUTS,
        ),
    ] = 18,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace outputs that exist.", rich_help_panel=_OUTPUTS),
    ] = False,
    skip_existing: Annotated[
        bool,
        typer.Option(
            "--skip-existing",
            help="Leave finished clips with the same parameters alone, make the others.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = False,
    threads: options.Threads = None,
    timeout: options.Timeout = 600.0,
    start_timeout: options.StartTimeout = 600.0,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
    log_file: options.LogFile = None,
) -> None:
    """Animate photographs: each becomes a clip <out>/<name>_<seed>.mp4 with a .json beside it.

    The whole request is checked before any weight is loaded.
    """
    from svdpp.cli import log, request
    from svdpp.runtime.pipeline import Pipeline
    from svdpp.runtime.request import OutputPolicy, check_outputs, plan_clips, read_inputs

    chosen = OutputConfig(path=str(out), format=output_format, crf=crf)  # type: ignore[arg-type]
    sampling = request.sampling_config(
        model,
        steps,
        memory_opt=memory_opt,
        height=height,
        width=width,
        num_frames=frames,
        fps=fps,
        motion_bucket_id=motion_bucket_id,
        noise_aug_strength=noise_aug_strength,
        min_guidance_scale=min_guidance_scale,
        max_guidance_scale=max_guidance_scale,
        decode_chunk_size=request.parse_decode_chunk(decode_chunk_size),
        fit=fit,
    )
    all_seeds = request.parse_seeds(seed, seeds)
    asked = request.joined_world(world)
    config = request.pipeline_config(
        model=ModelConfig(
            name=model,
            revision=revision,
            variant=variant,
            local_files_only=local_files_only,
            dtype=request.parse_dtype(dtype, device),
            memory_opt=memory_opt,
        ),
        sampling=sampling,
        world_size=request.default_world(device, steps, on_cpu=2) if asked is None else asked,
        device=device,
        threads=threads,
        timeout=timeout,
        start_timeout=start_timeout,
    )
    console = Console(as_json=as_json, quiet=quiet)
    log.open_log(verbosity=verbose, log_file=log_file, write=console.err.print)
    if request.is_joined_member():
        Pipeline(config).serve()
        return
    policy = OutputPolicy(
        folder=out,
        format=chosen.format,
        crf=chosen.crf,
        overwrite=overwrite,
        skip_existing=skip_existing,
    )
    found = read_inputs(inputs)
    check_outputs(found, all_seeds, policy)
    if decode_chunk_size == request.AUTO:
        config = request.with_fitting_chunk(console, config)
    pipeline = Pipeline(config)
    assert pipeline.checkpoint is not None
    clips = plan_clips(found, all_seeds, policy, pipeline.config, pipeline.checkpoint)
    records = _perform(console, pipeline, clips) if clips.requests else []
    if as_json:
        console.json([*clips.skipped, *records])
    else:
        _print(console, out, clips.skipped, records)


def _perform(console: Console, pipeline: Pipeline, clips: ClipPlan) -> list[dict[str, Any]]:
    """Runs what is to be made; the records in the order of the request."""
    from svdpp.cli.log import EventLog
    from svdpp.cli.progress import Progress

    config, num_clips = pipeline.config, len(clips.requests)
    console.talk(
        f"{num_clips} clip{'s' if num_clips > 1 else ''} of {config.sampling.frames} frames, "
        f"{config.sampling.width}x{config.sampling.height}, on {config.world_size} "
        f"{config.device} ranks with {config.model.name}"
    )
    with Progress(console, "run", pipeline.schedule(range(num_clips))) as progress:
        pipeline.observe(progress)
        pipeline.observe(EventLog(config.ranges))
        try:
            with pipeline:
                return [result.record for result in pipeline.run(clips.requests, clips.records)]
        except (Interrupted, RankError) as error:
            error.hint = error.hint or "finished clips are kept: --skip-existing makes the others"
            raise


def _print(
    console: Console, out: Path, skipped: list[dict[str, Any]], records: list[dict[str, Any]]
) -> None:
    for record in skipped:
        console.result(f"{out / record['output']}  (was finished)")
    for record in records:
        console.result(f"{out / record['output']}")
    made = f"{len(records)} clips made" if len(records) != 1 else "1 clip made"
    was = f", {len(skipped)} left as they were" if skipped else ""
    console.talk(made + was)
    if records:
        name = Path(records[0]["output"])
        path = (out / name).with_suffix("") if name.suffix else out / name
        console.talk(f"to prove one: svdpp verify {path}.json")
