"""`generate`: function that makes clips from images, prompts or dicts in one call."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.config import DEFAULT_MODEL, ModelConfig, PipelineConfig, VideoFormat
from svdpp.config.limits import require
from svdpp.driver.jobs import (
    check_and_name_jobs,
    check_outputs,
    find_refused_jobs,
    fit_request_to_jobs,
    plan_clips,
)
from svdpp.driver.manifest import open_manifest
from svdpp.driver.output_policy import OutputPolicy
from svdpp.driver.progress_bar import ProgressBar
from svdpp.driver.request import PipelineRequest, default_dtype, find_device
from svdpp.driver.resolve import resolve_config
from svdpp.driver.run_job import RunJob
from svdpp.driver.run_plan import PlannedClip, RunPlan, submit_and_collect
from svdpp.driver.sources import ClipSource, SourceReader, input_label
from svdpp.errors import RequestError, SvdppError, pluralize, worst_of
from svdpp.launch import process_lifetime
from svdpp.launch.fork_server import start_fork_server_early
from svdpp.launch.worker_group import end_if_importing_script
from svdpp.launch.world import find_world
from svdpp.media.output_files import lock_folder
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.plan.parallel import LayoutName

if TYPE_CHECKING:
    from svdpp.driver.clips import ClipResult
    from svdpp.driver.pipeline import Pipeline


def generate(
    inputs: ClipSource | Iterable[ClipSource] = (),
    *,
    prompts: str | Iterable[str] | None = None,
    negative_prompt: str | None = None,
    seeds: int | Iterable[int] | None = None,
    model: str | ModelConfig = DEFAULT_MODEL,
    out: str | os.PathLike[str] | None = None,
    format: VideoFormat | None = None,
    overwrite: bool = False,
    resume: bool = False,
    world_size: int | None = None,
    device: str = "auto",
    layout: LayoutName | None = None,
    num_threads: int | None = None,
    on_result: Callable[[ClipResult], object] | None = None,
    progress: bool = True,
    **parameters: Any,
) -> list[ClipResult]:
    """Make clips, as `svdpp run` does, and wait for all of them.

    Each call starts ranks and ends them. To keep ranks for further clips, use a `Pipeline`.

    Args:
        inputs: Images, as paths, folders, glob patterns or PIL images: one clip for each
            combination of image, prompt and seed. Or dicts with the fields of a line of `svdpp run
            --jobs`: one clip for each dict. Empty: clips from prompts only.
        prompts: One or several prompts.
        negative_prompt: Text that describes what clips with a prompt must not show.
        seeds: One or several seeds. None: the seed 0, or for dicts the seed of each dict.
        model: Hub id, folder or name of a demo model, which is loaded in the precision that
            `svdpp run` would use. A `ModelConfig` is used unchanged.
        out: Folder for the clips, or path of a single clip's file. None: a temporary folder, which
            is removed when the last result is garbage-collected.
        format: Format of the clips. None: the format of the suffix of `out`, or mp4 if `out` is a
            folder; without `out`, `frames`, which keeps the exact pixels.
        overwrite: Whether existing files are replaced.
        resume: Whether finished clips in `out` are kept.
        world_size: Number of ranks. None: the number of GPUs that can be used, or 2 on the CPU.
        device: `auto`, `cuda`, `cpu` or `cuda:N`.
        layout: Name of the layout. None: `pipeline`.
        num_threads: Number of CPU threads of each rank. None: 1 on CUDA; on the CPU, the number of
            cores divided by the number of ranks.
        on_result: Function that is called with the result of each clip as the clip finishes, in the
            thread that called `generate`.
        progress: Whether to show a progress bar on stderr if stderr is a terminal.
        parameters: Sampling parameters, such as `steps`, `frames`, `width` and `fps`, by their
            names in requests or in diffusers.

    Returns:
        Results, ordered by input, then by prompt, then by seed.

    Raises:
        RequestError: The clips cannot be made as requested. The error is raised before weights are
            loaded.
        InputError: An image cannot be read.
        ModelError: The model is missing or not supported.
        SvdppError: A clip failed (the error is raised when all other clips are finished), or the
            run ended with this error. The error's attribute `results` has the results of the
            finished clips.
    """
    end_if_importing_script()
    require(
        find_world() is None,
        "generate starts its own ranks, but a launcher has started this process",
        "use a Pipeline, which joins the launcher's ranks",
    )
    model_config, device, checkpoint = _find_model(model, device)
    start_fork_server_early(family=checkpoint.family, device=device)
    temporary = None
    if out is None:
        temporary = _TemporaryFolder()
        out, format = temporary.path, format or "frames"
    with _removed_on_failure(temporary), process_lifetime.temp_folder("svdpp-images-") as images:
        policy = OutputPolicy.at(Path(out), format=format, overwrite=overwrite, resume=resume)
        reader = SourceReader(
            model_config, checkpoint, parameters, format=policy.encoding.format, folder=images
        )
        requested = reader.jobs(inputs, prompts, negative_prompt, seeds)
        jobs = check_and_name_jobs(requested, policy)
        request = PipelineRequest(
            model=model_config,
            sampling=reader.sampling(from_image=jobs[0].made_from.media_file is not None),
            device=device,
            layout=layout,
            num_ranks=world_size,
            num_threads=num_threads,
            checkpoint=checkpoint,
        )
        config, _ = fit_request_to_jobs(request, jobs).resolve()
        check_outputs(jobs, policy)
        _check_jobs(jobs, config, checkpoint)
        with lock_folder(policy.folder, policy.single_clip):
            return _make_clips(config, checkpoint, jobs, policy, temporary, on_result, progress)


def _find_model(model: str | ModelConfig, device: str) -> tuple[ModelConfig, str, Checkpoint]:
    """Return the model's configuration, the device of the ranks, and the model's checkpoint.

    If `model` is a name, the configuration has the usual precision for this model and device.
    """
    config = ModelConfig(name=model) if isinstance(model, str) else model
    require(not config.is_dummy, "the dummy model makes no video files", "use `model` demo")
    device = find_device(device, config.name)
    checkpoint = find_checkpoint(config, weights=False)
    if isinstance(model, str):
        config = replace(config, dtype=default_dtype(device, checkpoint.family))
    return config, device, checkpoint


def _check_jobs(jobs: Sequence[RunJob], config: PipelineConfig, checkpoint: Checkpoint) -> None:
    """Raise an error if the model cannot make one of the clips, before any weights are loaded."""
    resolved, _ = resolve_config(config, weights="none", checkpoint=checkpoint)
    for job, error in find_refused_jobs(jobs, resolved, checkpoint):
        place = "" if job.line is None else f"{input_label(job.line)}: "
        details = {**error.details, "line": job.line}
        raise RequestError(f"{place}{error.message}", error.hint, details=details)


def _make_clips(
    config: PipelineConfig,
    checkpoint: Checkpoint,
    jobs: Sequence[RunJob],
    policy: OutputPolicy,
    temporary: _TemporaryFolder | None,
    on_result: Callable[[ClipResult], object] | None,
    progress: bool,
) -> list[ClipResult]:
    """Plan the clips of `generate`, and make them; show a progress bar if `progress` is set."""
    # This import loads torch, which takes seconds. So it comes after the start of the fork server
    # (the parent process of the ranks), which loads torch at the same time.
    from svdpp.driver.pipeline import Pipeline

    pipeline = Pipeline(config, checkpoint=checkpoint)
    assert pipeline.checkpoint is not None
    plan = plan_clips(jobs, policy, pipeline.config, pipeline.checkpoint)
    samplings = [plan.resolver.config_of(clip.sampling).sampling for clip in plan.clips]
    bar = ProgressBar(
        [sampling.num_inference_steps for sampling in samplings],
        [clip.done_steps for clip in plan.clips],
        is_shown=progress,
    )
    pipeline.observe(bar)
    with bar:
        return _run_plan(pipeline, plan, policy, temporary, on_result)


def _run_plan(
    pipeline: Pipeline,
    plan: RunPlan,
    policy: OutputPolicy,
    temporary: _TemporaryFolder | None,
    on_result: Callable[[ClipResult], object] | None,
) -> list[ClipResult]:
    """Make the planned clips of `generate`, and return all results in the order of the jobs.

    The results include finished clips that are kept from an earlier run.

    Raises:
        SvdppError: A clip failed, or the run has ended. The error's attribute `results` has the
            results of the finished clips.
    """
    from svdpp.driver.clips import ClipResult  # imported late, because it loads torch

    results: dict[int, ClipResult] = {}
    for (index, job), metadata in zip(plan.skipped_jobs, plan.skipped, strict=True):
        clip = PlannedClip(index=index, job=job, sampling=plan.resolver.sampling_of(job))
        results[index] = ClipResult(index, plan.resolver.request_of(clip), metadata)
    manifest_file = open_manifest(policy.manifest, pipeline.config, plan, [], policy.clip_table)
    try:
        with manifest_file as manifest:
            if plan.clips:
                pipeline.observe(manifest)
                with pipeline:
                    for made in submit_and_collect(pipeline, plan):
                        index = plan.clips[made.clip].index
                        results[index] = replace(made, clip=index, owner=temporary)
                        if on_result is not None:
                            on_result(results[index])
        if errors := [failure.error for failure in pipeline.failures]:
            num_clips = len(results) + len(errors)
            count = f"{len(errors)} of {pluralize(num_clips, 'clip')} failed"
            raise worst_of(errors, count)
    except SvdppError as error:
        error.results = [results[index] for index in sorted(results)]
        raise
    return [results[index] for index in sorted(results)]


@contextlib.contextmanager
def _removed_on_failure(temporary: _TemporaryFolder | None) -> Iterator[None]:
    """Remove `generate`'s temporary folder if the `with` block fails before a clip is finished."""
    try:
        yield
    except BaseException as error:
        if temporary is not None and not getattr(error, "results", ()):
            temporary.remove()
        raise


class _TemporaryFolder:
    """Temporary folder of `generate`.

    It is removed when this object is garbage-collected, or at the end of the process.
    """

    def __init__(self) -> None:
        self.path = process_lifetime.make_temp_folder("svdpp-clips-")
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
