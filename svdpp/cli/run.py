"""`svdpp run`: images in, clips out."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console, pluralize
from svdpp.cli.options.files import (
    InputOptions,
    LogOptions,
    OutputOptions,
    PromptOptions,
    TraceOptions,
)
from svdpp.cli.options.model import parse_seeds
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.config import PipelineConfig, PromptedSampling, SamplingConfig
from svdpp.config.limits import require
from svdpp.errors import (
    Interrupted,
    OutputError,
    RankError,
    SvdppError,
    error_from_dict,
    worst_of,
)
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from svdpp.config import ClipRequest
    from svdpp.diagnostics.run_metrics import RunMetrics
    from svdpp.driver.clips import ClipResult
    from svdpp.driver.jobs import OutputPolicy
    from svdpp.driver.manifest import RunManifest
    from svdpp.driver.pipeline import Pipeline
    from svdpp.driver.run_plan import RunPlan
    from svdpp.media.inputs import ClipInput

# Clips whose measurements a run keeps in memory; about 10 MB, however long it is.
_TRACE_CLIPS = 1000
_FEW_CLIPS = 8  # checking these takes a second or two

# Clips that go to the ranks at once, and that a forecast replays: their actions need memory.
_BATCH_SIZE = 1000

_UNLOCKED = "warning: the --out folder cannot be locked ({}): start no other run into it meanwhile"


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(PipelineOptions, InputOptions, PromptOptions, OutputOptions):
    """Options of the pipeline, and those of its clips."""

    # The dummy model makes no video files.
    latent_shape: tuple[int, int, int, int, int] | None = None


@app.command(
    **command_settings(
        "svdpp run photo.jpg",
        "svdpp run photos/ --seeds 1-4 --out clips --resume",
        "svdpp run photo.jpg --model demo --device cpu",
    )
)
@with_option_groups
def run(
    console: Console,
    launched: World | None,
    options: RunOptions,
    traces: TraceOptions,
    log: LogOptions,
) -> None:
    """Animate images, or make clips from prompts: OUT/NAME_SEED.mp4 and a JSON file beside it."""
    from svdpp.launch.fork_server import start_fork_server_early
    from svdpp.media.output_files import lock_folder

    command = RunCommand(console=console, traces=traces, launched=launched, options=options)
    command.check()
    found, input_errors = command.read_inputs()
    device = options.device_name()
    if launched is None and not options.dry_run:
        # The fork server imports torch at the same time as this process.
        start_fork_server_early(family=options.family, device=device)
    config, why = options.request(
        num_clips=None if launched else len(found) * len(command.seeds),
        launched=launched,
        device=device,
        from_image=bool(options.inputs),
    ).resolve()
    log.open(console, launched)
    if is_secondary_rank(launched):
        from svdpp.cli.progress import serve_member

        serve_member(command.pipeline(config), launched, console)
        return
    if options.dry_run:
        command.show_plan(config, found, why)
        return
    traces.check()
    with lock_folder(command.policy.folder, command.policy.single_clip) as why_not:
        pipeline, clips = command.plan(config, found)
        console.info(why, _UNLOCKED.format(why_not) if why_not else "")
        command.execute(pipeline, clips, input_errors)


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """One call of `svdpp run`: its request is checked and combined step by step, then made."""

    console: Console
    launched: World | None
    options: RunOptions
    traces: TraceOptions

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds of each image's clips.

        Raises:
            RequestError: `--seed` and `--seeds` are given, or the list is wrong.
        """
        seed, seeds = self.options.seed, self.options.seeds
        require(None in (seed, seeds), "--seed and --seeds contradict each other")
        return [seed or 0] if seeds is None else parse_seeds(seeds)

    @cached_property
    def policy(self) -> OutputPolicy:
        """Place of the clips, and what happens to existing files.

        Raises:
            RequestError: `--out` and `--format` contradict each other.
        """
        launched = self.launched
        return self.options.policy(is_restarted=launched is not None and launched.restarts > 0)

    def check(self) -> None:
        """Check all that needs neither torch nor the contents of files, to answer quickly.

        Raises:
            RequestError: the request cannot succeed.
        """
        self.options.check_prompts()
        # The values are computed here, so that wrong options are refused now and not at first use.
        for name in ("policy", "_sampling", "seeds"):
            getattr(self, name)
        options = self.options
        require(not options.is_dummy, "the dummy model makes no video files", "use --model demo")
        is_dry = options.dry_run and self.launched is not None
        require(not is_dry, "--dry-run starts no ranks", "start it without torchrun or srun")
        has_prompt = options.prompt is not None or options.prompts is not None
        # Before the clips' names, which would be those of one image for each prompt.
        takes_it = not has_prompt or isinstance(self._sampling, PromptedSampling)
        refused = f"model {options.model!r} takes no prompt"
        require(takes_it, refused, "leave it out, or try --model demo-text", model=options.model)
        missing = "INPUT is missing: name an image, or give a prompt to a model that takes one"
        require(has_prompt or bool(options.inputs), missing, "svdpp run photo.jpg")

    def read_inputs(self) -> tuple[list[ClipInput], list[SvdppError]]:
        """Return what clips are made from; only rank 0 has it.

        Returns:
            Inputs, and with `--keep-going` an error for each file that makes no clip.

        Raises:
            InputError: a file is missing, unreadable or hostile.
        """
        if is_secondary_rank(self.launched):
            return [], []
        from svdpp.media.inputs import collect_inputs, raise_problems

        options, sampling = self.options, self._sampling
        max_pixels = options.max_megapixels * 10**6
        if not options.inputs:
            return options.combined([None], sampling, max_pixels), []
        found, problems = collect_inputs(
            options.inputs,
            max_pixels=max_pixels,
            video_frames=sampling.video_frames,
        )
        if problems and not options.keep_going:
            raise_problems(problems, "--keep-going makes the clips of the others" if found else "")
        return options.combined(found, sampling, max_pixels), [*problems]

    def pipeline(self, config: PipelineConfig, inputs: Sequence[ClipInput] = ()) -> Pipeline:
        """Return the pipeline, which is not started.

        Args:
            config: of the run.
            inputs: of the clips, whose folders all hosts must share; only rank 0 has them.
        """
        from svdpp.driver.pipeline import Pipeline

        latents = self.options.latents_dir
        files = [each.media_file for each in inputs if each.media_file]
        files += [video for _, video in (inputs[0].videos if inputs else ())]
        folders = {file.path.parent: file.path for file in files}
        shared = [self.policy.folder, *folders.values()]
        return Pipeline(
            config,
            checkpoint=self.options.checkpoint,
            latents_folder=None if latents is None else str(latents.absolute()),
            shared_paths=[str(path.absolute()) for path in shared],
            trace_clips=_TRACE_CLIPS,
        )

    @cached_property
    def _sampling(self) -> SamplingConfig:
        return self.options.sampling_config(from_image=bool(self.options.inputs))

    def plan(self, config: PipelineConfig, found: Sequence[ClipInput]) -> tuple[Pipeline, RunPlan]:
        """Return the pipeline and the clips that it is to make.

        Args:
            config: of the run.
            found: inputs of the clips.

        Raises:
            RequestError: two clips would have one name, or one exists already.
            ModelError: the model cannot be used.
        """
        from svdpp.driver.jobs import check_outputs, plan_clips
        from svdpp.media.inputs import input_remarks

        num_there = check_outputs(found, self.seeds, self.policy)
        if self.policy.keeps_finished and num_there > _FEW_CLIPS:
            self.console.info(f"checking {num_there} existing clips frame by frame ...")
        pipeline = self.pipeline(config, found)
        assert pipeline.checkpoint is not None
        clips = plan_clips(found, self.seeds, self.policy, pipeline.config, pipeline.checkpoint)
        files = [each.media_file for each in found if each.media_file is not None]
        remarks = input_remarks(files, pipeline.config.sampling)
        written = [f"remark: {self.console.write_fields(text)}" for text in remarks]
        self.console.info(*pipeline.checkpoint.remarks, *written)
        return pipeline, clips

    def execute(
        self, pipeline: Pipeline, clips: RunPlan, input_errors: Sequence[SvdppError]
    ) -> None:
        """Make the clips and print them.

        Args:
            pipeline: not started yet.
            clips: to be made, or finished before.
            input_errors: errors of inputs that make no clip.

        Raises:
            SvdppError: a clip is lost or was refused; the error with the highest exit code.
        """
        from svdpp.diagnostics.report import analyze
        from svdpp.driver.manifest import open_manifest

        console, policy = self.console, self.policy
        lost: list[dict[str, Any]] = [
            {"output": None, "error": console.error_record(error)} for error in input_errors
        ]
        manifest = open_manifest(policy.manifest, pipeline.config, clips, lost)
        made, missing, metrics = self._run_pipeline(pipeline, clips, manifest)
        lost += [
            {"output": output, "error": console.error_record(error)}
            for output, error in missing.items()
        ]
        for failure in pipeline.failures:
            output = clips.metadata[failure.clip]["output"]
            lost.append({"output": output, "error": console.error_record(failure.error)})
        if made and metrics is not None and metrics.clips > metrics.world_size:
            limits = analyze(metrics, policy.manifest).lines
            report = f"  svdpp report {shlex.quote(str(policy.manifest))}"
            console.info(*limits, report if limits else "")
        skipped = [each for each in clips.skipped if each["output"] not in missing]
        console.json([*skipped, *made, *lost])
        self._print(skipped, made, lost)
        if lost:
            num_clips = pluralize(len(skipped) + len(made) + len(lost), "clip")
            errors = [error_from_dict(clip["error"]) for clip in lost]
            error = worst_of(errors, f"{len(lost)} of {num_clips} lost")
            error.details |= {
                "lost": len(lost),
                "clips": len(clips.skipped) + len(made) + len(lost),
            }
            raise error

    def _print(
        self,
        skipped: list[dict[str, Any]],
        made: list[dict[str, Any]],
        lost: list[dict[str, Any]],
    ) -> None:
        """Print a line for each clip, and says if it was finished before or lost."""
        console, out = self.console, self.policy.folder
        for metadata in skipped:
            console.result(f"{out / metadata['output']}  (was finished)")
        for metadata in made:
            console.result(f"{out / metadata['output']}")
        for clip in lost:
            name = out / clip["output"] if clip["output"] else "(no clip)"
            console.result(f"{name}  (lost: {clip['error']['message']})")
        if any(metadata.get("memory_pressure") for metadata in made):
            console.info(
                "warning: GPU memory ran short, so cuDNN may have used another kernel and the bits "
                "may differ; a smaller --decode-chunk-size or fewer --gpus lower memory"
            )
        if any(each.get("cfg_parallel", 1) > 1 and each["exact"] == "unproven" for each in made):
            console.info(
                "not called exact: pairs divide a batch of two; svdpp verify --cfg-parallel 2"
            )
        if exact := [metadata for metadata in made if metadata["exact"] is True]:
            path = shlex.quote(str(out / exact[0]["output"]))
            console.info(f"to prove one: svdpp verify {path}")

    def _run_pipeline(
        self, pipeline: Pipeline, clips: RunPlan, manifest: RunManifest
    ) -> tuple[list[dict[str, Any]], dict[str, OutputError], RunMetrics | None]:
        """Return what was made, in the order of the request, what is gone since, and the figures.

        Returns:
            The metadata of the finished clips; the errors of those that somebody has removed, also
            of an earlier run, by `output`; None for figures if nothing was measured.
        """
        from svdpp.cli.progress import EventLog, Progress, labels
        from svdpp.diagnostics.run_metrics import metrics_of_pipeline
        from svdpp.driver.manifest import find_missing_outputs

        console, requests, config = self.console, clips.requests, pipeline.config
        if not requests:
            pipeline.dismiss()
            with manifest:  # a run that was killed after its last clip left an old manifest
                return [], {}, None
        console.info(_describe(config, requests))
        progress = Progress(
            console,
            "run",
            pipeline.schedule(requests[:_BATCH_SIZE]),
            labels=labels(requests),
            num_clips=len(requests),
            costs=config.costs,
        )
        with progress, manifest:
            for observer in (progress, EventLog(config.layout), manifest):
                pipeline.observe(observer)
            try:
                with self.traces.of(pipeline), pipeline:
                    results = sorted(
                        submit_and_collect(pipeline, clips), key=lambda result: result.clip
                    )
            except (Interrupted, RankError) as error:
                finished = (
                    f"{progress.num_done} of {pluralize(progress.num_clips, 'clip')} finished"
                )
                hint = f"{finished}; to go on: the same command with --resume"
                error.hint = "; ".join(filter(None, [error.hint, hint]))
                raise
            finally:
                if (metrics := metrics_of_pipeline(pipeline, requests)) is not None:
                    manifest.set_measurements(metrics.to_json())
            made = [result.metadata for result in results]
            missing = find_missing_outputs(self.policy.folder, [*clips.skipped, *made])
            for output, removed in missing.items():
                manifest.mark_lost(output, removed)
        console.info(", wrote ".join([progress.summary_line, *self.traces.paths]))
        return [each for each in made if each["output"] not in missing], missing, metrics

    def show_plan(self, config: PipelineConfig, found: Sequence[ClipInput], why: str) -> None:
        """Check a run, and print what it would make; `svdpp plan` forecasts its times.

        Args:
            config: of the run.
            found: inputs of the clips.
            why: remark on the layout.
        """
        from svdpp.driver.jobs import check_outputs, plan_clips
        from svdpp.driver.resolve import estimate_ranks, resolve_config

        console, policy = self.console, self.policy
        config, checkpoint = resolve_config(config, weights="none")
        assert checkpoint is not None
        check_outputs(found, self.seeds, policy)
        clips = plan_clips(found, self.seeds, policy, config, checkpoint)
        console.info(why)
        ranks = estimate_ranks(config, checkpoint)
        console.result(_describe(config, clips.requests))
        console.report(
            {
                "schema_version": 1,
                "folder": str(policy.folder),
                "clips": [
                    {name: metadata[name] for name in ("output", "input", "seed")}
                    for metadata in clips.metadata
                ],
                "finished": [metadata["output"] for metadata in clips.skipped],
                "layout": str(config.layout),
                "world_size": config.world_size,
                "device": config.device,
                "ranks": [{"rank": rank, "peak_bytes": peak} for rank, peak in enumerate(ranks)],
            }
        )


def _describe(config: PipelineConfig, requests: Sequence[ClipRequest]) -> str:
    begun, sampling = sum(request.done_steps > 0 for request in requests), config.sampling
    return (
        f"{pluralize(len(requests), 'clip')} of {pluralize(sampling.frames, 'frame')}, "
        f"{sampling.width}x{sampling.height}, "
        f"{pluralize(sampling.num_inference_steps, 'step')}, on "
        f"{pluralize(config.world_size, f'{config.device} rank')} with {config.model.name}"
        + (f"; {begun} of them continued from an earlier run" if begun else "")
    )


def submit_and_collect(pipeline: Pipeline, clips: RunPlan) -> Iterator[ClipResult]:
    """Submit the clips, the last ones while earlier ones are made.

    Args:
        pipeline: started.
        clips: to be made.

    Yields:
        Finished clips, in the order in which they end.
    """
    for first in range(0, len(clips.requests), _BATCH_SIZE):
        batch = slice(first, first + _BATCH_SIZE)
        handles = pipeline.submit(clips.requests[batch], clips.metadata[batch])
        for result in pipeline.results():
            yield result
            if handles[0].done() and first + _BATCH_SIZE < len(clips.requests):
                break
