"""`svdpp verify`: proves that the pipeline's clips equal those of diffusers, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli.command import command_settings, typed_options, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, argument, option, path_option
from svdpp.cli.options.files import ClipOptions, LogOptions, PromptOptions, clips_option
from svdpp.cli.options.model import ModelName
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.config import DEMO_MODEL, ClipRequest, PipelineConfig
from svdpp.config.limits import require
from svdpp.config.tolerance import Tolerance
from svdpp.errors import VerificationError, pluralize, worst_of
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from svdpp.config import SamplingConfig
    from svdpp.media.images import MediaFile
    from svdpp.verification.clip_result import ClipVerification

_SETTINGS = ("image", "local_files_only", "timeout", "start_timeout")
# Parameters of `verify` that have an effect if the command verifies finished clips.
_EFFECTIVE = {
    *_SETTINGS,
    "inputs",
    "atol",
    "rtol",
    "as_json",
    "verbose",
    "quiet",
    "debug",
    "log_file",
}
_CONDITIONS = (
    "another machine or library version may give other bits; the metadata records the original "
    "machine and versions"
)


_MORE_MEMORY = (
    "use fewer `num_frames`, or use a smaller `decode_chunk_size`, or verify again with more free "
    "GPU memory"
)

# Words for the verdicts, as shown in tables.
_WORDS = {
    "bitwise equal": "equal",
    "within tolerance": "within",
    "different": "DIFFERENT",
    "unknown": "unknown",
}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(PipelineOptions, PromptOptions, ClipOptions):
    """Options of `svdpp verify`: pipeline, inputs and tolerance."""

    inputs: Annotated[
        list[str] | None,
        argument(
            "INPUT|CLIP",
            "Images to animate (default: an example); or finished clips: videos, their JSON, a "
            "folder.",
        ),
    ] = None
    model: ModelName = DEMO_MODEL
    clips: Annotated[
        int | None,
        clips_option("Number of clips; by default 1 per input, at least 2.", False),
    ] = None
    image: Annotated[
        Path | None,
        path_option(
            panel=DIAGNOSTICS,
            metavar="PATH",
            help="For finished clips: input image, or folder of inputs.",
            common=True,
        ),
    ] = None

    atol: Annotated[
        float,
        option(
            "--atol",
            panel=DIAGNOSTICS,
            metavar="X",
            help="Allow each element to differ by X + Y * |expected|; 0, the default: bitwise. One "
            "level of a frame is 1/255.",
            show_default=False,
            common=True,
        ),
    ] = 0.0
    rtol: Annotated[
        float,
        option(
            "--rtol",
            panel=DIAGNOSTICS,
            metavar="Y",
            help="See --atol; 0 by default.",
            show_default=False,
            common=True,
        ),
    ] = 0.0

    # `checksum` is not an option, because a verification compares tensors at every transfer anyway.
    checksum: bool = False

    @property
    def tolerance(self) -> Tolerance:
        """Allowed difference of each element from diffusers' element: `--atol` and `--rtol`.

        Raises:
            RequestError: A tolerance is negative or not finite.
        """
        return Tolerance(atol=self.atol, rtol=self.rtol)


@app.command(
    **command_settings(
        "svdpp verify",
        "svdpp verify out/photo_0.mp4",
    )
)
@with_option_groups
def verify(
    context: typer.Context,
    console: Console,
    launched: World | None,
    log: LogOptions,
    options: VerifyOptions,
) -> None:
    """Prove that the pipeline's clips equal those of diffusers, bit for bit.

    Clips from images or prompts are made twice: by the ranks, and by diffusers' unmodified pipeline
    in one process. Latents and frames are compared. Finished clips are made again and compared with
    their hashes. The exit code is 3 if anything differs.
    """
    from svdpp.launch.fork_server import start_fork_server_early
    from svdpp.verification.clip_files import find_clips

    log.open(console, launched)
    tolerance = options.tolerance
    inputs = options.inputs or []
    clips = find_clips([] if options.as_family else inputs)
    if clips:
        _check_effective(context)
        # Verifying finished clips needs one device, so only rank 0 works.
        if not is_secondary_rank(launched):
            _verify_clips(console, clips, options, tolerance)
        return
    require(options.image is None, "--image is for finished clips", "give the image as INPUT")
    from_image = not options.is_dummy and (bool(inputs) or options.needs_image)
    has_last_image = options.last_image is not None or options.needs_last_image
    inputs_of_clips: dict[str, Any] = {
        "from_image": from_image,
        "has_last_image": has_last_image,
        "num_references": len(options.reference_paths),
    }
    sampling = options.sampling_config(**inputs_of_clips)
    # The CPU is allowed for every model, because a verification need not be fast.
    device = options.device_name(any_on_cpu=True)
    if launched is None:
        start_fork_server_early(family=options.loaded_family, device=device)
    requests = []
    if not is_secondary_rank(launched):
        requests = _requests(options, inputs, sampling)
    config, why = options.request(
        num_clips=None if launched else len(requests),
        launched=launched,
        device=device,
        **inputs_of_clips,
    ).resolve()
    if is_secondary_rank(launched):  # this rank only makes clips: rank 0 compares the tensors
        from svdpp.cli.progress import serve_member
        from svdpp.driver.pipeline import Pipeline

        pipeline = Pipeline(config, tensor_folder="sent to rank 0")
        serve_member(pipeline, launched, console)
        return
    console.info(why)
    _compare(console, config, requests, tolerance)


def _requests(
    options: VerifyOptions, inputs: Sequence[str], sampling: SamplingConfig
) -> list[ClipRequest]:
    from svdpp.media.inputs import check_inputs, example_images, example_prompt, round_robin

    no_images = options.is_dummy and bool(inputs)
    require(not no_images, "the dummy model takes no images", "use --model demo")
    seed = options.seed or 0
    images: Sequence[MediaFile | None] = [None]
    if sampling.from_image and not options.is_dummy:
        images = check_inputs(inputs or [str(example_images()[0])], sampling.video_frames)
    example = None if options.family == "svd" else example_prompt(options.model)
    combined = options.combined(images, sampling, example=example)
    if sampling.has_last_image and options.last_image is None:
        (last_image,) = check_inputs([str(example_images()[1])])
        combined = [replace(each, last_image=last_image) for each in combined]
    num_clips = options.clips or max(2, len(combined))
    return round_robin(combined, range(seed, seed + num_clips), num_clips)


def _compare(
    console: Console, config: PipelineConfig, requests: list[ClipRequest], tolerance: Tolerance
) -> None:
    from svdpp.cli.progress import EventLog, Progress, labels
    from svdpp.verification.verify import verify as compare_with_reference

    verdict = compare_with_reference(
        config,
        requests,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        observers=(EventLog(config.layout),),
        open_observer=partial(Progress, console, labels=labels(requests)),
    )
    console.json(verdict.to_json())
    console.table(
        [
            {
                **{name: str(getattr(check, name)) for name in ("clip", "what", "step", "rank")},
                "verdict": _WORDS[check.verdict],
                "max difference": "0" if check.bitwise else check.distance,
                "sha256": check.sha256[:12],
            }
            for check in verdict.checks
        ]
    )
    if verdict.equal:
        console.result(str(verdict))
        return
    hint = _MORE_MEMORY if verdict.short_of_memory else ""
    raise VerificationError(str(verdict), hint, details=verdict.failure_details())


def _check_effective(context: typer.Context) -> None:
    without_effect = [
        each for name, each in typed_options(context).items() if name not in _EFFECTIVE
    ]
    require(
        not without_effect,
        f"a finished clip is verified with the parameters in its metadata, and not with "
        f"{', '.join(without_effect)}",
        "leave these options out; svdpp verify PHOTO uses them for a new clip",
    )


def _verify_clips(
    console: Console, paths: Sequence[Path], options: VerifyOptions, tolerance: Tolerance
) -> None:
    from svdpp.launch.fork_server import start_fork_server_early
    from svdpp.verification.clip_tasks import VerificationSettings, plan_verification

    settings = VerificationSettings(**{name: getattr(options, name) for name in _SETTINGS})
    groups, results = plan_verification(paths, settings)
    if groups:
        config = groups[0][0].config
        start_fork_server_early(family=config.sampling.family, device=config.device)
    # Imported after the start of the fork server, which imports torch at the same time.
    from svdpp.cli.progress import Progress
    from svdpp.verification.clip_verification import verify_clips

    for tasks in groups:
        names = [task.clip.path.name for task in tasks]
        schedule = tasks[0].config.layout.schedule(len(tasks))
        with Progress(console, "verify", schedule, labels=names) as progress:
            results += verify_clips(tasks, observers=(progress,), tolerance=tolerance)
    _show_results(console, sorted(results, key=lambda result: result.path))


def _show_results(console: Console, results: Sequence[ClipVerification]) -> None:
    """Print the results of a verification, and raise an error if a clip differs.

    Raises:
        SvdppError: A clip differs or could not be verified.
    """
    different = [result for result in results if result.different]
    errors = [result.error for result in results if result.error is not None]
    is_single = len(results) == 1
    if is_single and errors:
        raise errors[0]
    found = [result.to_json() for result in results]
    several = {"equal": not different and not errors, "clips": found}
    console.json({"schema_version": 2, **(found[0] if is_single else several)})
    for check in results[0].checks if is_single else ():
        word = _WORDS[check.verdict] if check.found or check.equal else "MISSING"
        sha256 = (check.found or "")[:12]
        console.prose(f"{check.what:<7}{word:<10} {sha256:<13} {check.detail}".rstrip())
    for result in results:
        console.result(str(result))
    if not is_single:
        num_equal = len(results) - len(different) - len(errors)
        is_bitwise = all(result.verdict != "within tolerance" for result in results)
        word = "bitwise equal" if is_bitwise else "bitwise equal or within tolerance"
        console.result(f"{num_equal} of {len(results)} clips are {word}")
    num_wrong = len(different or errors)
    many = f"{num_wrong} of {pluralize(len(results), 'clip')}"
    if different:
        first = different[0]
        words = f"{first.path.name!r} is not as recorded: {first.differences}"
        # The hint says that another machine or library version may give a recomputed clip other
        # bits. If clips differ only in the hash of the file, the file is damaged, and the hint
        # would mislead.
        recomputed = any(check.what != "file" for result in different for check in result.different)
        raise VerificationError(
            words if is_single else f"{many} differ: {words}",
            _CONDITIONS if recomputed else "",
            details={
                "num_different": num_wrong,
                "num_clips": len(results),
                "differences": str(first.differences),
            },
        )
    if errors:
        raise worst_of(errors, f"{many} not verified")
