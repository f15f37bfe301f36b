"""`svdpp run --dry-run`: the clips that a run would make, and when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console
from svdpp.config import PipelineConfig, SamplingConfig
from svdpp.errors import SvdppError, pluralize, recorded_path

if TYPE_CHECKING:
    from svdpp.driver.output_policy import OutputPolicy
    from svdpp.driver.run_job import RunJob
    from svdpp.driver.run_plan import PlannedClip, RunPlan


def show_plan(
    console: Console,
    policy: OutputPolicy,
    config: PipelineConfig,
    jobs: Sequence[RunJob],
    why: str,
    input_errors: Sequence[SvdppError],
    *,
    assumes_costs: bool,
) -> None:
    """Check the run of `svdpp run --dry-run`, and print what it would make and when.

    Args:
        console: Console of the command.
        policy: Folder and encoding of the clips, and treatment of existing files.
        config: Configuration of the run.
        jobs: Jobs of the run, checked.
        why: Sentence on the choice of the layout; "" if the user gave the layout.
        input_errors: Errors of inputs and lines for which no clip is made.
        assumes_costs: Whether the user gave no costs; a remark then names the assumed costs.
    """
    from svdpp.driver.jobs import plan_clips
    from svdpp.driver.request import describe_assumed_costs
    from svdpp.driver.resolve import estimate_ranks, resolve_config
    from svdpp.driver.run_plan import BATCH_SIZE

    config, checkpoint = resolve_config(config, weights="none")
    assert checkpoint is not None
    clips = plan_clips(jobs, policy, config, checkpoint)
    console.info(why)
    ranks = estimate_ranks(config, checkpoint, apart=len(clips.clips) > BATCH_SIZE)
    ends, forecast = _forecast(config, clips)
    refused = [
        {
            **{name: error.details.get(name) for name in ("line", "field")},
            "message": console.error_record(error)["message"],
        }
        for error in input_errors
    ]
    console.result(describe_run(config, clips.clips))
    console.report(
        {
            "schema_version": 1,
            "folder": str(policy.folder),
            "clips": [
                _clip_row(config, clips, clip, end)
                for clip, end in itertools.zip_longest(clips.clips, ends)
            ],
            "finished": [metadata["output"] for metadata in clips.skipped],
            **({"refused": refused} if refused else {}),
            "forecast": forecast,
            "layout": str(config.layout),
            "world_size": config.world_size,
            "device": config.device,
            "ranks": [{"rank": rank, "peak_bytes": peak} for rank, peak in enumerate(ranks)],
        }
    )
    if assumes_costs:
        console.info(describe_assumed_costs(config.costs))


def _clip_row(
    config: PipelineConfig, clips: RunPlan, clip: PlannedClip, end: float | None
) -> dict[str, Any]:
    """Return the row of a clip in the table of a dry run.

    Args:
        config: Configuration of the run.
        clips: Plan of the run.
        clip: Clip of the row.
        end: Forecast of the seconds from the start of the run to the end of the clip. None: no
            forecast, because only the first `BATCH_SIZE` clips are simulated.
    """
    sampling, job = clip.sampling or config.sampling, clip.job
    file, policy = job.made_from.media_file, clips.resolver.policy
    about = {
        "output": policy.file_name(job.name),
        "input": None if file is None else recorded_path(file.path, policy.absolute_folder),
        "seed": job.seed,
        "size": f"{sampling.width}x{sampling.height}",
        "frames": sampling.frames,
        "steps": sampling.num_inference_steps,
    }
    return about if end is None else {**about, "end_seconds": round(end, 3)}


def _forecast(config: PipelineConfig, clips: RunPlan) -> tuple[list[float], dict[str, float | int]]:
    """Forecast when each of a run's first clips ends, and how long all clips take, in seconds.

    `config.costs` are the costs of a clip with the pipeline's sampling parameters. For a clip of
    another size, the costs are scaled by the number of pixels.
    """
    from svdpp.driver.run_plan import BATCH_SIZE
    from svdpp.plan.forecast import simulate_schedule

    first = clips.clips[:BATCH_SIZE]
    if not first:
        return [], {"total_seconds": 0.0}
    pixels = [_pixels(clip.sampling or config.sampling) for clip in clips.clips]
    sizes = [each / _pixels(config.sampling) for each in pixels[: len(first)]]
    schedule = clips.resolver.schedule(first)
    spans = simulate_schedule(schedule, config.costs, sizes)
    ends = [0.0] * len(first)
    for span in spans:
        ends[span.clip] = max(ends[span.clip], span.end)
    total = max(ends)
    # The clips that are not simulated are assumed to take as long for each step and pixel as the
    # simulated clips.
    if len(first) < len(clips.clips):
        steps = [
            (clip.sampling or config.sampling).num_inference_steps * each
            for clip, each in zip(clips.clips, pixels, strict=True)
        ]
        total *= sum(steps) / sum(steps[: len(first)])
    return ends, {"total_seconds": round(total, 3)}


def _pixels(sampling: SamplingConfig) -> int:
    return sampling.width * sampling.height * sampling.frames


def describe_run(config: PipelineConfig, clips: Sequence[PlannedClip]) -> str:
    """Return a sentence on the number and sizes of the clips, and on the ranks that make them.

    Args:
        config: Configuration of the run.
        clips: Clips that the run makes.
    """
    begun = sum(clip.done_steps > 0 for clip in clips)
    kinds = {
        (sampling.frames, sampling.width, sampling.height, sampling.num_inference_steps)
        for sampling in {clip.sampling or config.sampling for clip in clips} or {config.sampling}
    }
    frames, width, height, steps = (_range([kind[index] for kind in kinds]) for index in range(4))
    size = f"{width}x{height}"
    sizes = sorted({kind[1:3] for kind in kinds})
    if len(sizes) > 1:
        size = f"{len(sizes)} sizes"
    return (
        f"{pluralize(len(clips), 'clip')} of {_plural(frames, 'frame')}, "
        f"{size}, {_plural(steps, 'step')}, on "
        f"{pluralize(config.world_size, f'{config.device} rank')} with {config.model.name}"
        + (f"; {begun} of them continued from an earlier run" if begun else "")
    )


def _range(numbers: Sequence[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


def _plural(number: str, noun: str) -> str:
    return f"{number} {noun}{'' if number == '1' else 's'}"
