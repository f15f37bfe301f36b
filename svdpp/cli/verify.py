"""Owns `svdpp verify`: proves that the pipeline gives diffusers' own result, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli import options, verify_clips
from svdpp.cli.console import Console
from svdpp.cli.draft_choice import DraftChoice
from svdpp.cli.verify_report import difference, print_drafts, print_verdict
from svdpp.config import (
    DEFAULT_NUM_STEPS,
    DEMO_MODEL,
    DUMMY_MODEL,
    ClipRequest,
    ModelConfig,
    PipelineConfig,
)
from svdpp.config.limits import check_num_clips
from svdpp.errors import RequestError, VerificationError
from svdpp.launch import temp_folders


def verify(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT...|CLIP...]",
            help="Image files, folders or globs; or finished clips, to recompute them: their JSON, "
            "their files, or a folder of them. Default: a photograph that comes with svdpp.",
        ),
    ] = None,
    world: options.World = None,
    steps: options.Steps = DEFAULT_NUM_STEPS,
    clips: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Clips to run through the ranks, 1 or more; inputs are taken in turn, each time "
            "with the next seed. Default: one for each input, at least 2.",
        ),
    ] = None,
    seed: options.Seed = None,
    model: options.Model = DEMO_MODEL,
    revision: options.Revision = None,
    variant: options.Variant = None,
    local_files_only: options.LocalFilesOnly = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|cuda:N",
            help="Default: cuda where there is one, else cpu.",
            rich_help_panel="Ranks",
        ),
    ] = None,
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
    latent_shape: Annotated[
        tuple[int, int, int, int, int],
        typer.Option(metavar="B C F H W", help="Latent of the dummy model, --model dummy."),
    ] = (1, 4, 14, 64, 64),
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="ATOL",
            help="Largest difference that counts as equal, 0 or more; 0 asks for equal bits.",
        ),
    ] = 0.0,
    inject_fault: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Damage the pipelined run on purpose, to see that it is caught: "
            "ulp@rank1.clip0 moves one number by one ULP, skip@rank1.clip0 leaves a step out.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write verdict, checks, frames of both sides and their difference as one page. "
            "Default: none.",
            rich_help_panel="Outputs",
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With finished clips: their photograph, or a folder that holds it. Default: where "
            "the clip's metadata says, or beside the clip.",
        ),
    ] = None,
    draft: options.Draft = False,
    start_steps: options.Starts = None,
    split: options.SplitOption = None,
    replicas: options.Replicas = None,
    decoders: options.Decoders = None,
    layout: options.LayoutOption = None,
    costs: options.CostsOption = None,
    threads: options.Threads = None,
    timeout: options.Timeout = 600.0,
    start_timeout: options.StartTimeout = 600.0,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
    log_file: options.LogFile = None,
) -> None:
    """Prove that the pipeline's clips are diffusers' own, bit for bit.

    Runs clips through the ranks, then diffusers' unmodified pipeline in one process, and compares
    the latent at every transfer, the final latent and the frames. Finished clips are recomputed
    from their metadata: latent, frames and file have to be as recorded. Exit code 3 if anything
    differs, or a clip's file is missing.
    """
    from svdpp.cli import log, request, trace_outputs
    from svdpp.cli.layout_choice import LayoutChoice
    from svdpp.cli.plan_choice import PlanChoice
    from svdpp.verification.clip_files import are_clips

    if not tolerance >= 0:
        raise RequestError(f"--tolerance must be 0 or more, got {tolerance}")
    console = Console(as_json=as_json, quiet=quiet)
    log.open_log(verbosity=verbose, log_file=log_file, write=console.err.print)
    trace_outputs.check_target("--report", report, ".html")
    if are_clips(inputs or []):
        from svdpp.verification.clip_proof import Settings

        verify_clips.refuse_without_effect(context)
        settings = Settings(
            threads=threads,
            image=image,
            local_files_only=local_files_only,
            timeout=timeout,
            start_timeout=start_timeout,
        )
        if not request.is_joined_member():  # one device is enough for it
            verify_clips.verify_clips(console, inputs or [], settings)
        return
    if image is not None:
        raise RequestError("--image is for finished clips", "give the photograph as INPUT")
    chosen_device = request.default_device() if device is None else device
    first_seed = request.parse_seeds(seed, None)[0]
    is_member = request.is_joined_member()
    requests = [] if is_member else _requests(model, inputs or [], clips, first_seed)
    plan = PlanChoice(
        draft=DraftChoice(draft=draft, start_steps=start_steps),
        layout=LayoutChoice(
            split=split, replicas=replicas, decoders=decoders, layout=layout, costs=costs
        ),
        world=world,
        steps=steps,
        device=chosen_device,
        no_draft={"costs": costs},
    )
    shape, why = plan.settings(
        num_clips=None if request.joined_world(None) is not None else len(requests),
        decodes=model != DUMMY_MODEL,
    )
    config = request.pipeline_config(
        model=ModelConfig(
            name=model,
            revision=revision,
            variant=variant,
            local_files_only=local_files_only,
            dtype=request.parse_dtype(dtype, chosen_device),
            memory_opt=memory_opt,
            dummy_latent_shape=latent_shape,
        ),
        sampling=request.sampling_config(
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
        ),
        device=chosen_device,
        threads=threads,
        timeout=timeout,
        start_timeout=start_timeout,
        plan=shape,
    )
    if is_member:
        _serve(console, config, inject_fault)
        return
    if why:
        console.info(why)
    if decode_chunk_size == request.AUTO:
        config = request.with_fitting_chunk(console, config)
    _compare(console, config, requests, tolerance, inject_fault, report)


def _requests(model: str, inputs: Sequence[str], clips: int | None, seed: int) -> list[ClipRequest]:
    from svdpp.driver.jobs import read_inputs
    from svdpp.media.examples import example_photos

    if clips is not None:
        check_num_clips(clips)
    if model == DUMMY_MODEL:
        if inputs:
            raise RequestError("the dummy model takes no images", "use --model demo")
        return [ClipRequest(seed=seed + clip) for clip in range(clips or 2)]
    found, _ = read_inputs(inputs or [str(example_photos()[0])])
    num_clips = clips or max(2, len(found))
    return [
        ClipRequest(
            seed=seed + clip // len(found),
            image=str(found[clip % len(found)].path),
            image_sha256=found[clip % len(found)].sha256,
        )
        for clip in range(num_clips)
    ]


def _serve(console: Console, config: PipelineConfig, inject_fault: str | None) -> None:
    """Takes part in the pipelined run; rank 0 alone compares."""
    from svdpp.cli import launched
    from svdpp.driver.pipeline import Pipeline
    from svdpp.worker.fault_injection import InjectedFault

    fault = None if inject_fault is None else InjectedFault.parse(inject_fault)
    launched.serve(Pipeline(config, tensor_folder="sent to rank 0", fault=fault), console)


def _compare(
    console: Console,
    config: PipelineConfig,
    requests: list[ClipRequest],
    tolerance: float,
    inject_fault: str | None,
    report: Path | None,
) -> None:
    from svdpp.cli.log import EventLog
    from svdpp.cli.progress import Progress
    from svdpp.plan.schedule import build_schedule, data_parallel_routes
    from svdpp.verification import verify as proof
    from svdpp.verification.report import write_report
    from svdpp.worker.fault_injection import InjectedFault

    num_steps, clips = config.sampling.num_inference_steps, range(len(requests))
    fault = None if inject_fault is None else InjectedFault.parse(inject_fault)
    if fault is not None:
        fault.check(world_size=config.world_size, num_clips=len(requests))
        if config.draft is not None and fault.kind == "skip":
            raise RequestError(
                "a walk of a draft leaves no step out", "--inject-fault ulp@rank0.clip0 damages one"
            )
    if config.draft is not None:
        ours = config.draft_plan.schedule(clips)
    else:
        ours = build_schedule(config.layout.routes(clips), config.world_size)
    alone = data_parallel_routes(num_steps, 1, clips, decodes=config.decodes)
    theirs = build_schedule(alone, 1)
    with temp_folders.folder("svdpp-verify-") as folder:
        with Progress(console, "pipelined", ours) as progress:
            observers = (progress, EventLog(config.plan))
            proof.run_pipelined(config, requests, folder, fault=fault, observers=observers)
        with Progress(console, "sequential", theirs) as progress:
            proof.run_sequential(config, requests, folder, observers=(progress,))
        verdict = proof.compare(config, len(requests), folder, tolerance=tolerance)
        if report is not None:
            asked = {"tolerance": f"{tolerance:g}", "planted fault": inject_fault or "none"}
            write_report(report, verdict, config, requests, folder, asked)
    if console.as_json:
        console.json(verdict.to_json())
    else:
        print_verdict(console, verdict)
        if verdict.drafts:
            print_drafts(console, verdict, num_steps)
    if report is not None:
        console.info(f"report: {report}")
    if not verdict.equal:
        raise VerificationError(difference(verdict))
