"""`svdpp verify`: proves that the pipeline's result equals diffusers' own, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from svdpp.cli.command import command, is_given
from svdpp.cli.console import Console
from svdpp.cli.launched import serve_member
from svdpp.cli.options.declare import DIAGNOSTICS, HIDDEN_NAMES, setting
from svdpp.cli.options.inputs import ClipOptions, PromptOptions
from svdpp.cli.options.layout import LayoutOptions, ShareOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions, fit_chunk
from svdpp.cli.options.talk import LogOptions
from svdpp.cli.request import PipelineOptions, needs_image, resolve
from svdpp.cli.run_report import labels
from svdpp.cli.verify_report import end, print_verdict
from svdpp.config import DEMO_MODEL, ClipRequest, PipelineConfig
from svdpp.errors import RequestError, VerificationError
from svdpp.launch import temp_folders
from svdpp.launch.world import World, is_member

if TYPE_CHECKING:
    from svdpp.verification.clip_proof import Settings

# Parameters of `verify` that have an effect on finished clips.
_EFFECTIVE = frozenset(
    {
        *("inputs", "image", "threads", "local_files_only", "timeout", "start_timeout"),
        *("as_json", "verbose", "quiet", "debug", "log_file"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ProofOptions(ClipOptions):
    """Inputs, tolerance and report of a proof."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT...|CLIP...]",
            help="Image files, folders or globs; or finished clips to recompute: files, their "
            "JSON, or a folder of them.",
            show_default="an image that comes with svdpp",
        ),
    ] = None
    tolerance: float = setting(
        DIAGNOSTICS,
        "ATOL",
        "Largest difference that counts as equal; 0 requires equal bits.",
        default=0.0,
    )
    inject_fault: str | None = setting(
        DIAGNOSTICS,
        "FAULT",
        "Damage the pipelined run on purpose, to see that verify notices: ulp@rank1.clip0 changes "
        "one number by one ULP (the next float), skip@rank1.clip0 skips a step. The first rank and "
        "clip are 0.",
    )
    picture: Path | None = setting(
        DIAGNOSTICS, "FILE.png", "Draw frames of both runs and their difference."
    )
    image: Path | None = setting(
        DIAGNOSTICS,
        "PATH",
        "For finished clips: their image, or the folder that contains it.",
        shown="the path in the clip's metadata, or beside the clip",
    )

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise RequestError(f"--tolerance must be 0 or more, got {self.tolerance}")


@command(
    examples=(
        "svdpp verify",
        "svdpp verify out/photo_0.mp4",
        "svdpp verify photo.jpg --gpus 4 --split dithered --picture proof.png",
    ),
    common=("world", "model", "clips", "steps", "split", "num_frames", "picture", "as_json"),
    without=("checksum",),
    defaults={
        "world": "all GPUs, if they divide the steps; on the CPU 2",
        "clips": "one for each input, at least 2",
    },
    meanings={
        "clips": "Number of clips: inputs in turn, each turn with the next seed.",
    },
)
def verify(
    context: typer.Context,
    console: Console,
    launched: World | None,
    proof: ProofOptions,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    layout: LayoutOptions,
    experts: ShareOptions,
    ranks: RankOptions,
    log: LogOptions,
    model: ModelOptions = ModelOptions(model=DEMO_MODEL),
) -> None:
    """Prove that the pipeline's clips equal those of diffusers, bit for bit.

    Images: makes clips with the ranks (pipelined) and with diffusers' unmodified pipeline in
    one process (sequential), and compares the latent at every transfer, the final latent and the
    frames. Finished clips: recomputes them from their metadata, and compares latent, frames and
    file with the recorded hashes. The exit code is 3 if anything differs or a file is missing.
    """
    from svdpp.cli import trace_outputs
    from svdpp.verification.clip_files import are_clips

    log.open(console, launched)
    trace_outputs.check_target("--picture", proof.picture, ".png")
    inputs = proof.inputs or []
    if are_clips(inputs):
        _refuse_without_effect(context)
        if not is_member(launched):  # one device is enough
            _verify_clips(console, inputs, _settings(proof, ranks, model))
        return
    if proof.image is not None:
        raise RequestError("--image is for finished clips", "give the image as INPUT")
    from_image = not model.is_dummy and (bool(inputs) or needs_image(model))
    requests = []
    if not is_member(launched):
        seed = sampling.one_seed()
        requests = _requests(model, inputs, prompts, proof, seed, from_image=from_image)
    options = PipelineOptions(
        launched=launched,
        ranks=ranks,
        model=model,
        sampling=sampling,
        layout=layout,
        experts=experts,
        # `auto` may take the CPU for every model: a proof need not be fast.
        device_as_for=DEMO_MODEL,
        from_image=from_image,
    )
    config, why = resolve(options, None if launched else len(requests))
    if is_member(launched):
        _serve(console, config, launched, proof.inject_fault)
        return
    if why:
        console.info(why)
    _compare(console, fit_chunk(console, sampling, config), requests, proof)


def _settings(proof: ProofOptions, ranks: RankOptions, model: ModelOptions) -> Settings:
    from svdpp.verification.clip_proof import Settings

    return Settings(
        threads=ranks.threads,
        image=proof.image,
        local_files_only=model.local_files_only,
        timeout=ranks.timeout,
        start_timeout=ranks.start_timeout,
    )


def _requests(
    model: ModelOptions,
    inputs: Sequence[str],
    prompts: PromptOptions,
    proof: ProofOptions,
    seed: int,
    *,
    from_image: bool,
) -> list[ClipRequest]:
    from svdpp.media.examples import EXAMPLE_PROMPT, example_photos
    from svdpp.media.inputs import ClipInput, check_inputs, in_turn

    if model.is_dummy and inputs:
        raise RequestError("the dummy model takes no images", "use --model demo")
    images = check_inputs(inputs or [str(example_photos()[0])]) if from_image else [None]
    # An example of what the model needs and is not given.
    example = None if model.family == "svd" else EXAMPLE_PROMPT
    texts: list[str | None] = [*prompts.all_prompts()] or [example]
    combined = [
        ClipInput(image, text, prompts.negative_prompt) for image in images for text in texts
    ]
    num_clips = proof.at_least_one(max(2, len(combined)))
    return in_turn(combined, range(seed, seed + num_clips), num_clips)


def _serve(
    console: Console, config: PipelineConfig, world: World, inject_fault: str | None
) -> None:
    """Takes part in the pipelined run; only rank 0 compares."""
    from svdpp.driver.pipeline import Pipeline
    from svdpp.worker.fault_injection import InjectedFault

    fault = None if inject_fault is None else InjectedFault.parse(inject_fault)
    pipeline = Pipeline(config, tensor_folder="sent to rank 0", fault=fault)
    serve_member(pipeline, world, console)


def _compare(
    console: Console,
    config: PipelineConfig,
    requests: list[ClipRequest],
    asked: ProofOptions,
) -> None:
    from svdpp.cli.log import EventLog
    from svdpp.cli.progress import Progress
    from svdpp.plan.schedule import build_schedule, data_parallel_routes
    from svdpp.verification import verify as proof
    from svdpp.verification.picture import draw_differences
    from svdpp.worker.fault_injection import InjectedFault

    num_steps, clips = config.sampling.num_inference_steps, range(len(requests))
    fault = None if asked.inject_fault is None else InjectedFault.parse(asked.inject_fault)
    if fault is not None:
        fault.check(world_size=config.world_size, num_clips=len(requests))
    ours = build_schedule(config.layout.routes(clips), config.world_size)
    alone = data_parallel_routes(num_steps, 1, clips, decodes=config.decodes)
    theirs = build_schedule(alone, 1)
    with temp_folders.folder("svdpp-verify-") as folder:
        names = labels(requests)
        with Progress(console, "pipelined", ours, labels=names) as progress:
            observers = (progress, EventLog(config.layout))
            conditions = proof.run_pipelined(
                config, requests, folder, fault=fault, observers=observers
            )
        with Progress(console, "sequential", theirs, labels=names) as progress:
            proof.run_sequential(config, requests, folder, observers=(progress,))
        verdict = proof.compare(config, len(requests), folder, tolerance=asked.tolerance)
        if asked.picture is not None:
            draw_differences(asked.picture, verdict, config, folder)
            console.info(f"picture: {asked.picture}")
    if console.as_json:
        console.json({**verdict.to_json(), "conditions": conditions})
    else:
        print_verdict(console, verdict)
    if verdict.first_difference is not None:
        raise VerificationError(f"not equal: {verdict.first_difference}")


def _refuse_without_effect(context: typer.Context) -> None:
    """Refuses options without effect on finished clips."""
    given = {
        str(parameter.name): next(
            name
            for name in reversed(parameter.opts)
            if name.startswith("--") and name not in HIDDEN_NAMES
        )
        for parameter in context.command.params
        if is_given(context, str(parameter.name)) and parameter.name not in _EFFECTIVE
    }
    if "picture" in given:
        raise RequestError(
            "--picture shows the frames of two runs, but a finished clip has only their hash",
            "verify the image: svdpp verify IMAGE --picture FILE.png",
        )
    if given:
        raise RequestError(
            f"no effect on a finished clip: {', '.join(given.values())}; its metadata says how it "
            "was made, and one device recomputes it",
            "leave that out; svdpp verify PHOTO runs the ranks with it",
        )


def _verify_clips(console: Console, inputs: Sequence[str], settings: Settings) -> None:
    """Verifies every clip in `inputs`, and prints the verdicts."""
    from svdpp.cli.progress import Progress
    from svdpp.plan.schedule import build_schedule, data_parallel_routes
    from svdpp.verification.clip_files import find_clips
    from svdpp.verification.clip_proof import plan_proofs, prove

    paths, passed_over = find_clips(inputs)
    for path in passed_over:
        console.info(f"{path} is skipped: it is not a clip")
    groups, proofs = plan_proofs(paths, settings)
    for tasks in groups:
        num_steps = tasks[0].config.sampling.num_inference_steps
        routes = data_parallel_routes(num_steps, 1, range(len(tasks)))
        names = [task.clip.path.name for task in tasks]
        schedule = build_schedule(routes, 1)
        with Progress(console, "verify", schedule, labels=names) as progress:
            proofs += prove(tasks, observers=(progress,))
    end(console, sorted(proofs, key=lambda proof: proof.path))
