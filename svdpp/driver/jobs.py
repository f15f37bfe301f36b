"""Checks of a run's jobs and output files; `plan_clips` decides which clips must be made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.config import (
    Lora,
    OutputConfig,
    PipelineConfig,
    PromptedSampling,
    SamplingConfig,
)
from svdpp.config.limits import LARGE_MEGAPIXELS, MAX_CLIPS, require
from svdpp.config.loras import ordered_by_loras
from svdpp.config.pipeline import (
    identity_fields,
    latents_key,
    parameters_sha256,
    sampling_fields,
)
from svdpp.driver.clip_metadata import check_clip_metadata, parse_clip_json, weights_identity
from svdpp.driver.clip_names import NameTemplate, name_jobs
from svdpp.driver.clip_table import read_names
from svdpp.driver.manifest import read_manifest
from svdpp.driver.output_policy import OutputPolicy
from svdpp.driver.request import PipelineRequest
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.run_job import RunJob
from svdpp.driver.run_plan import JobResolver, PlannedClip, RunPlan
from svdpp.errors import InputError, ModelError, RequestError, SvdppError
from svdpp.media import output_files, video
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.media.inputs import check_image_shapes
from svdpp.models.checkpoint import Checkpoint

_REPLACE_OR_KEEP = "`overwrite` replaces it; another `out` folder keeps both"
# Number of frames that is assumed for a clip without `num_frames`, when the sizes of a run's clips
# are compared. The model's default is not known at that time. Published SVD models make 14 or 25
# frames.
_USUAL_FRAMES = 25
#: Fields of a clip's JSON, besides the sampling parameters, that a line of a jobs file can set.
_LINE_FIELDS = (
    *("input_sha256", "last_image_sha256", "references_sha256", "videos_sha256"),
    *("prompt", "negative_prompt", "seed", "lora"),
)


def check_outputs(jobs: Sequence[RunJob], policy: OutputPolicy) -> int:
    """Check that a run can write its output files; return the number of clips that already exist.

    For mp4 clips, the function also checks that ffmpeg is installed. Call it before the search for
    the model, so that a run that cannot write its files ends at once.

    Args:
        jobs: Jobs of the run, with names.
        policy: Policy for the output folder and existing files.

    Returns:
        Number of clips whose files already exist.

    Raises:
        RequestError: Files exist that `policy` neither keeps nor replaces, `policy` has both
            `overwrite` and `resume`, or the run has no clips or too many.
        OutputError: A folder cannot be written, or ffmpeg is missing.
    """
    if policy.overwrite and policy.resume:
        raise RequestError("`overwrite` and `resume` contradict each other")
    check_number_of_clips(len(jobs))
    # The folder is listed only once, because a run may have 100,000 clips.
    with output_files.disk_errors(f"cannot look into {str(policy.folder)!r}"):
        there = set(os.listdir(policy.folder) if policy.folder.is_dir() else ())

    def has_files(job: RunJob) -> bool:
        file = policy.file_name(job.name)
        return file in there or f"{file}.json" in there

    existing = [policy.output_of(job.name) for job in jobs if has_files(job)]
    if existing and not (policy.overwrite or policy.keeps_finished):
        has_clip = os.path.basename(existing[0].path) in there
        first = existing[0].path if has_clip else existing[0].json_path
        noun = "output exists" if len(existing) == 1 else "outputs exist"
        raise RequestError(
            f"{len(existing)} {noun} already, the first is {first!r}",
            "`resume` keeps finished clips; `overwrite` replaces them",
            details={"existing": len(existing), "asked": len(jobs)},
        )
    for output in existing:
        video.check_output(output)
        output_files.check_replaceable(output.json_path)
    if not policy.overwrite:
        _check_own_files(policy)
    output_files.check_writable(policy.folder)
    if policy.latents_folder is not None:
        output_files.check_writable(policy.latents_folder)
    if policy.encoding.format == "mp4":
        find_ffmpeg()
    return len(existing)


def check_and_name_jobs(
    jobs: Sequence[RunJob], policy: OutputPolicy, template: NameTemplate | None = None
) -> list[RunJob]:
    """Check the number of a run's jobs, and return the jobs with unique names for their clips.

    Args:
        jobs: Jobs as they were read.
        policy: Policy for the output folder; a run that keeps finished clips keeps their names.
        template: Template of the names; None: names follow from the inputs.

    Raises:
        RequestError: There are no jobs or too many, or two clips would have the same name.
    """
    check_number_of_clips(len(jobs))
    return name_jobs(
        jobs,
        single_clip=policy.single_clip,
        template=template,
        recorded=policy.recorded_names,
    )


def fit_request_to_jobs(request: PipelineRequest, jobs: Sequence[RunJob]) -> PipelineRequest:
    """Return a copy of a request, changed so that one pipeline can make the clips of all jobs.

    The copy has the sampling parameters of the largest clip and the LoRAs of every clip. If the
    number of steps differs between clips, `steps_vary` is set. By default, the steps are then split
    between the ranks in a way that works for every number of steps.

    Args:
        request: Request. Its sampling parameters apply to jobs that have none of their own.
        jobs: Jobs of the run, at least one.
    """
    samplings = dict.fromkeys(job.sampling or request.sampling for job in jobs)
    numbers_of_steps = {each.num_inference_steps for each in samplings}
    return replace(
        request,
        model=replace(request.model, clip_loras=loras_of(jobs)),
        sampling=max(samplings, key=_size_key),
        num_clips=len(jobs),
        steps_vary=len(numbers_of_steps) > 1,
    )


def _size_key(sampling: SamplingConfig) -> tuple[bool, int, bool, int, bool, int]:
    """Return a sort key that is largest for the clip with the highest demands.

    A clip from an image needs more parts of the model, so its key is larger than that of any clip
    from text. The number of pixels comes next, because it has the largest effect on memory.
    """
    pixels = sampling.width * sampling.height * (sampling.num_frames or _USUAL_FRAMES)
    from_image = isinstance(sampling, PromptedSampling) and sampling.from_image
    branches, steps = sampling.uses_guidance, sampling.num_inference_steps
    references = sampling.num_references
    return from_image, pixels, branches, references, sampling.has_last_image, steps


def loras_of(jobs: Iterable[RunJob]) -> tuple[Lora, ...]:
    """Return the LoRAs of all jobs, without duplicates.

    Args:
        jobs: Jobs of the run.
    """
    return tuple(dict.fromkeys(lora for job in jobs for lora in job.made_from.loras))


def check_number_of_clips(count: int) -> None:
    """Raise a `RequestError` unless a run has 1 to `MAX_CLIPS` clips.

    Args:
        count: Number of clips.

    Raises:
        RequestError: The number is 0 or above `MAX_CLIPS`.
    """
    require(
        1 <= count <= MAX_CLIPS,
        f"a run makes 1 to {MAX_CLIPS} clips, got {count}",
        value=count,
        lowest=1,
        highest=MAX_CLIPS,
    )


def _check_own_files(policy: OutputPolicy) -> None:
    """Raise an error if an existing `run.json` or `clips.jsonl` was not written by a run."""
    for path, what, read in (
        (policy.manifest, "a run's manifest", read_manifest),
        (policy.clip_table, "a run's table of clips", read_names),
    ):
        if not path.exists():
            continue
        try:
            read(path)
        except InputError as error:
            raise RequestError(
                f"{str(path)!r} exists, but is not {what}",
                _REPLACE_OR_KEEP,
                details={"path": str(path)},
            ) from error


def find_refused_jobs(
    jobs: Sequence[RunJob], config: PipelineConfig, checkpoint: Checkpoint
) -> list[tuple[RunJob, SvdppError]]:
    """Return the jobs whose clips the model or the ranks cannot make, each with the reason.

    Args:
        jobs: Jobs of the run.
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the pipeline's model.
    """
    scheduler = RequestScheduler(config, checkpoint)
    errors: dict[SamplingConfig, SvdppError | None] = {}
    lora_errors: dict[tuple[Lora, ...], SvdppError | None] = {}
    refused = []
    for job in jobs:
        error = None
        if job.sampling is not None:
            if job.sampling not in errors:
                errors[job.sampling] = _refusal(scheduler.check_routes, job.sampling)
            error = errors[job.sampling]
        if error is None:
            resolved = job.sampling and scheduler.resolve_sampling(job.sampling)
            sampling = resolved or config.sampling
            error = _refusal(checkpoint.check_request, sampling, job.request())
            error = error or _refusal(check_image_shapes, job.made_from.images, sampling)
        if error is None:
            loras = job.made_from.loras
            if loras not in lora_errors:
                lora_errors[loras] = _refusal(scheduler.find_loras, loras)
            error = lora_errors[loras]
        if error is not None:
            refused.append((job, error))
    return refused


def _refusal(check: Callable[..., object], *values: Any) -> SvdppError | None:
    try:
        check(*values)
    except (RequestError, InputError, ModelError) as error:
        return error
    return None


def plan_clips(
    jobs: Sequence[RunJob],
    policy: OutputPolicy,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> RunPlan:
    """Return the plan of a run: the clips to make, and the finished clips that are kept.

    Args:
        jobs: Jobs of the run, with names.
        policy: Policy for the output folder and existing files.
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the pipeline's model.

    Raises:
        RequestError: The model cannot make a clip, or an existing clip has other parameters.
        InputError: The JSON beside an existing clip is not a clip's JSON.
    """
    resolver = JobResolver(config, checkpoint, policy)
    plan, folder = RunPlan(resolver), policy.latents_folder
    saved, weights = set[str](), None
    if folder is not None:
        from svdpp.worker import tensor_files  # this imports torch, which a dry run does not need

        saved = {key for key, _ in tensor_files.list_checkpoints(folder)}
        weights = weights_identity(checkpoint)
    for index, job in enumerate(jobs):
        sampling, key, done_steps = resolver.sampling_of(job), None, 0
        finished, is_changed = None, False
        if policy.keeps_finished or folder is not None:
            metadata = resolver.metadata_of(job, sampling)
            finished, is_changed = _kept_clip(policy.output_of(job.name), metadata, policy)
            key = None if folder is None else latents_key(metadata, weights)
        if finished is not None:
            plan.skipped.append(finished)
            plan.skipped_jobs.append((index, job))
            if folder is not None and key in saved:
                # An earlier run may have been killed before it removed the checkpoints of this
                # finished clip.
                tensor_files.remove_checkpoints(folder, key)
            continue
        if folder is not None and policy.keeps_finished and key in saved:
            done_steps = max(tensor_files.saved_steps(folder, key), default=0)
        plan.clips.append(
            PlannedClip(
                index=index,
                job=job,
                sampling=sampling,
                latents_key=key,
                done_steps=done_steps,
                replaces=is_changed,
            )
        )
    plan.clips = _order_clips(plan.clips, num_first=config.parallel.data_parallel_size)
    return plan


def _order_clips(clips: Sequence[PlannedClip], *, num_first: int) -> list[PlannedClip]:
    """Return the clips in the order in which the ranks make them.

    Clips with the same LoRAs follow each other, so that ranks load each set of LoRAs only once. As
    an exception, the first `num_first` clips have small images or none, because the ranks are idle
    until these images are prepared. The other images are prepared while the ranks work.
    """
    order = ordered_by_loras(clip.job.made_from.loras for clip in clips)
    by_loras = [clips[index] for index in order]
    first = [clip for clip in by_loras if not _is_large(clip.job)][:num_first]
    first_indices = {clip.index for clip in first}
    return first + [clip for clip in by_loras if clip.index not in first_indices]


def _is_large(job: RunJob) -> bool:
    file = job.made_from.media_file
    return file is not None and file.width * file.height > LARGE_MEGAPIXELS * 10**6


def _kept_clip(
    output: OutputConfig, metadata: dict[str, Any], policy: OutputPolicy
) -> tuple[dict[str, Any] | None, bool]:
    """Return an existing clip's JSON if the run keeps the clip, and whether a new clip replaces it.

    Returns:
        Two values. The first is the JSON of the existing clip, or None if the clip must be made.
        The second is True if the new clip replaces a finished clip that has other parameters.
    """
    if not policy.keeps_finished:
        return None, False
    try:
        return _finished_clip(output, metadata), False
    except _ChangedClipError as error:
        if policy.overwrite or (policy.replaces_changed and error.is_of_line):
            return None, True
        raise RequestError(error.message, error.hint, details=error.details) from error
    except (RequestError, InputError):
        if policy.overwrite:
            return None, False
        raise


class _ChangedClipError(RequestError):
    """Error for an existing clip that has other parameters than the job of the same name."""

    is_of_line = False
    """Whether a line of a jobs file can set each of the parameters that differ. False if one of
    these parameters, such as the dtype, is an option of the whole run."""


def _finished_clip(output: OutputConfig, metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON of an existing clip; None if the clip is missing, incomplete or damaged.

    If a run was killed after it wrote the clip's file and before it wrote the JSON, the JSON is
    written now.

    Raises:
        RequestError: The existing clip has other parameters, or its file was changed.
        InputError: The JSON is not a clip's JSON.
    """
    path, json_path = Path(output.path), Path(output.json_path)
    has_file, has_json = path.exists(), json_path.exists()
    if has_json:
        fault = f"{str(json_path)!r} is not a clip's JSON"
        existing = check_clip_metadata(parse_clip_json(json_path), fault)
    elif has_file:
        existing = _embedded(path)
    else:
        return None
    _check_same_parameters(path, existing, metadata)
    if not (has_file and _is_intact(path, output, existing)):
        return None
    if not has_json:
        existing["file_sha256"] = video.clip_sha256(path)
        output_files.write_json(json_path, existing)
    return existing


def _check_same_parameters(path: Path, existing: dict[str, Any], metadata: dict[str, Any]) -> None:
    if parameters_sha256(existing) == metadata["parameters_sha256"]:
        return
    names = (*identity_fields(metadata), *identity_fields(existing))
    changed = [name for name in names if existing.get(name) != metadata.get(name)]
    name = changed[0]
    before, now = existing.get(name), metadata.get(name)
    # `num_threads` depends by default on the number of ranks, so it may change without the user
    # noticing. The hint therefore names the value to set.
    same = f"`num_threads` {before} keeps the clip; " if name == "num_threads" else ""
    error = _ChangedClipError(
        f"{path.name!r} exists with another value of {name}: {before!r} instead of {now!r}",
        same + _REPLACE_OR_KEEP,
        details={"path": str(path), "field": name, "before": before, "now": now},
    )
    error.is_of_line = {*changed} <= {*_LINE_FIELDS, *sampling_fields(metadata["family"])}
    raise error


def _embedded(path: Path) -> dict[str, Any]:
    try:
        return check_clip_metadata(video.read_metadata(path), f"{path.name!r} is not a clip")
    except InputError as error:
        raise RequestError(
            f"{path.name!r} exists without a JSON, and is not a clip of svdpp",
            _REPLACE_OR_KEEP,
            details={"path": str(path)},
        ) from error


def _is_intact(path: Path, output: OutputConfig, existing: dict[str, Any]) -> bool:
    """Whether a clip's file is the file that the clip's JSON describes; False if it is damaged.

    Raises:
        RequestError: The file is readable, but has another hash than in the JSON.
    """
    recorded = existing["file_sha256"]
    try:
        if recorded is not None and video.clip_sha256(path) == recorded:
            return True
        is_readable = bool(len(video.read_frames(path, output.format)) == existing["num_frames"])
    except InputError:
        return False
    if recorded is not None and is_readable:
        raise RequestError(
            f"{path.name!r} is not the file that its JSON describes: the file was changed or "
            "replaced",
            _REPLACE_OR_KEEP,
            details={"path": str(path), "recorded_sha256": recorded},
        )
    return is_readable
