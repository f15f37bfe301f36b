"""Owns `svdpp run`: photographs in, clips out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.cli.draft_choice import DraftChoice
from svdpp.cli.run_report import announce, announce_look, print_clips, raise_worst
from svdpp.config import DEFAULT_MODEL, DEFAULT_NUM_STEPS, ModelConfig, OutputConfig, SamplingConfig
from svdpp.errors import Interrupted, RankError, error_to_dict

if TYPE_CHECKING:
    from svdpp.cli.trace_outputs import TraceOutputs
    from svdpp.driver.jobs import ClipPlan
    from svdpp.driver.pipeline import Pipeline

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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            "--skip-existing",
            help="Go on with an interrupted run: finished clips with the same parameters are left "
            "alone, begun ones go on from --latents-dir, the others are made.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = False,
    latents_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep each hand-over between ranks here until its clip is finished, so that "
            "--resume need not begin it anew; with any number of ranks of as many --threads. "
            "Default: keep none.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="If some images cannot be read, make the other clips; the command then ends with "
            "the highest exit code of all lost clips.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = False,
    draft: options.Draft = False,
    draft_psnr: Annotated[
        str | None,
        typer.Option(
            metavar="PSNR",
            help="End a clip's draft as soon as two successive ranks agree to this, such as 60dB: "
            "it stays approximate, and says so. Default: go on to the exact clip.",
            rich_help_panel=options.DRAFT_PANEL,
        ),
    ] = None,
    start_steps: options.Starts = None,
    split: options.SplitOption = None,
    replicas: options.Replicas = None,
    decoders: options.Decoders = None,
    layout: options.LayoutOption = None,
    costs: options.CostsOption = None,
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
    """Animate photographs: each becomes a clip <out>/<name>_<seed>.mp4 with a .json beside it.

    The whole request is checked before any weight is loaded.
    """
    from svdpp.cli import launched, log, request
    from svdpp.cli.layout_choice import LayoutChoice
    from svdpp.cli.plan_choice import PlanChoice
    from svdpp.launch import fork_server

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
    plan = PlanChoice(
        draft=DraftChoice(draft=draft, start_steps=start_steps, psnr=draft_psnr),
        layout=LayoutChoice(
            split=split, replicas=replicas, decoders=decoders, layout=layout, costs=costs
        ),
        world=world,
        steps=steps,
        device=device,
        no_draft={"costs": costs, "latents-dir": latents_dir},
    )
    fork_server.start_early(svd=True, device=device)  # it imports torch while this does
    from svdpp.cli.trace_outputs import TraceOutputs
    from svdpp.driver import hosts
    from svdpp.driver.jobs import OutputPolicy, check_outputs, plan_clips, read_inputs
    from svdpp.driver.pipeline import Pipeline

    is_member, is_restarted = request.is_joined_member(), request.is_restarted()
    found, unreadable = ([], []) if is_member else read_inputs(inputs, keep_going=keep_going)
    is_joined = request.joined_world(None) is not None
    weights = ModelConfig(
        name=model,
        revision=revision,
        variant=variant,
        local_files_only=local_files_only,
        dtype=request.parse_dtype(dtype, device),
        memory_opt=memory_opt,
    )
    shape, why = plan.settings(
        num_clips=None if is_joined else len(found) * len(all_seeds),
        decodes=True,
        memory=partial(_memory_of_devices, weights, sampling, device, plan.world_size()),
    )
    config = request.pipeline_config(
        model=weights,
        sampling=sampling,
        device=device,
        threads=threads,
        timeout=timeout,
        start_timeout=start_timeout,
        checksum=checksum,
        plan=shape,
    )
    console = Console(as_json=as_json, quiet=quiet)
    log.open_log(verbosity=verbose, log_file=log_file, write=console.err.print)
    policy = OutputPolicy(
        folder=out,
        format=chosen.format,
        crf=chosen.crf,
        overwrite=overwrite,
        resume=resume,
        is_restarted=is_restarted,
        latents_folder=latents_dir,
    )
    folder = None if latents_dir is None else str(latents_dir.absolute())
    new_pipeline = partial(Pipeline, latents_folder=folder, output_folder=str(out.absolute()))
    if is_member:
        answer = partial(hosts.answer, policy=policy, draft=config.draft)
        launched.serve(new_pipeline(config), console, answer)
        return
    trace_outputs = TraceOutputs(trace=trace, timeline=timeline, profile=profile)
    if why:
        console.info(why)
    num_there = check_outputs(found, all_seeds, policy, config.draft)
    announce_look(console, config, policy, num_there)
    if decode_chunk_size == request.AUTO:
        config = request.with_fitting_chunk(console, config)
    pipeline = new_pipeline(config, profile_path=trace_outputs.profile_path)
    assert pipeline.checkpoint is not None
    clips = plan_clips(found, all_seeds, policy, pipeline.config, pipeline.checkpoint)
    if pipeline.spans_hosts:
        clips = hosts.without_those_elsewhere(clips, policy, pipeline)
    lost = [{"output": None, "error": error_to_dict(error)} for error in unreadable]
    records = _perform(console, pipeline, clips, lost, out, trace_outputs)
    lost += [
        {"output": clips.records[failure.clip]["output"], "error": error_to_dict(failure.error)}
        for failure in pipeline.failures
    ]
    if as_json:
        console.json([*clips.skipped, *records, *lost])
    else:
        print_clips(console, out, clips.skipped, records, lost)
    raise_worst(lost, len(clips.skipped) + len(records) + len(lost))


def _memory_of_devices(
    weights: ModelConfig, sampling: SamplingConfig, device: str, world_size: int
) -> tuple[dict[str, float], tuple[float, ...]]:
    """What the model needs and CUDA devices have; asked for by `--layout auto` alone."""
    if device == "cpu":
        return {}, ()
    from svdpp.diagnostics.memory_estimate import memory_of_devices  # diffusers: seconds

    return memory_of_devices(weights, sampling, device, world_size)


def _perform(
    console: Console,
    pipeline: Pipeline,
    clips: ClipPlan,
    lost: list[dict[str, Any]],
    out: Path,
    trace_outputs: TraceOutputs,
) -> list[dict[str, Any]]:
    """Runs what is to be made; the records of what was made, in the order of the request."""
    from svdpp.cli.log import EventLog
    from svdpp.cli.progress import Progress
    from svdpp.driver.jobs import open_manifest

    manifest = open_manifest(out, pipeline.config, clips, lost)
    if not clips.requests:
        pipeline.dismiss()
        with manifest:  # a run that was killed just behind its last clip has left another
            return []
    announce(console, pipeline.config, clips)
    with Progress(console, "run", pipeline.schedule(clips.requests)) as progress, manifest:
        for observer in (progress, EventLog(pipeline.config.plan), manifest):
            pipeline.observe(observer)
        try:
            with trace_outputs.of(pipeline), pipeline:
                pipeline.submit(clips.requests, clips.records)
                results = sorted(pipeline.results(), key=lambda result: result.clip)
        except (Interrupted, RankError) as error:
            error.hint = error.hint or "finished clips are kept: --resume makes the others"
            raise
    return [result.record for result in results]
