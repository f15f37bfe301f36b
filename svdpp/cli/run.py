"""`svdpp run`: images, prompts or a jobs file in, clips out."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from svdpp.cli.clip_results import print_clips, raise_failed
from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.dry_run import describe_run, show_plan
from svdpp.cli.options.files import LogOptions, TraceOptions
from svdpp.cli.options.model import parse_seeds
from svdpp.cli.server_run import ServerRunOptions, run_at_server
from svdpp.config import PipelineConfig, PromptedSampling, SamplingConfig
from svdpp.config.limits import require
from svdpp.config.pipeline import repeats_bits
from svdpp.errors import InputError, Interrupted, OutputError, RankError, SvdppError, pluralize
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from svdpp.diagnostics.run_metrics import RunMetrics
    from svdpp.driver.clip_names import NameTemplate
    from svdpp.driver.job_lines import JobLineReader, LineDefaults
    from svdpp.driver.manifest import RunManifest
    from svdpp.driver.output_policy import OutputPolicy
    from svdpp.driver.pipeline import Pipeline
    from svdpp.driver.run_job import RunJob
    from svdpp.driver.run_plan import RunPlan
    from svdpp.media.images import MediaFile

# Number of clips whose measurements a run keeps, in about 10 MB of memory.
_TRACE_CLIPS = 1000
# Checking this number of existing clips takes a second or two; only a longer check is announced.
_FEW_CLIPS = 8

# Maximum number of remarks on images that are printed. Each size of clips can cause a remark.
_MAX_REMARKS = 8

_UNLOCKED = (
    "warning: the --out folder cannot be locked ({}): do not start another run with this folder "
    "until this run has ended"
)


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ServerRunOptions):
    """Options of `svdpp run`: those of the pipeline and of its clips."""

    # `svdpp run` has no option for `latent_shape`, a setting of the dummy model only: the dummy
    # model makes no video files, so `svdpp run` refuses it.
    latent_shape: tuple[int, int, int, int, int] | None = None

    @property
    def from_image(self) -> bool:
        """Whether the ranks must be able to make clips from an image or a video.

        True if there is an INPUT; with `--jobs`, if the model takes an image or a video.
        """
        if self.jobs is None:
            return bool(self.inputs)
        return self.image_use != "refused"

    @property
    def has_last_image(self) -> bool | None:
        """Whether the ranks must be able to make clips that end at a given last image.

        With `--jobs`, the value is None, because each line of the jobs file names its own last
        image or none. Clips then count as having a last image only if the model needs one.
        """
        return None if self.jobs is not None else self.last_image is not None

    @property
    def num_references(self) -> int:
        """Number of reference images of each clip; 0 with `--jobs`, whose lines name them."""
        return 0 if self.jobs is not None else len(self.reference_paths)

    def all_seeds(self) -> list[int]:
        """Return the seeds of each input's clips, from `--seed` or `--seeds`.

        Raises:
            RequestError: `--seed` and `--seeds` are given, or the list is wrong.
        """
        require(None in (self.seed, self.seeds), "--seed and --seeds contradict each other")
        return [self.seed or 0] if self.seeds is None else parse_seeds(self.seeds)

    def check_jobs_option(self) -> None:
        """Raise a `RequestError` if `--jobs` is combined with inputs, prompts or `--seeds`.

        Each line of a jobs file describes one clip, with an input, a prompt and a seed of its own.

        Raises:
            RequestError: `--jobs` is combined with one of these.
        """
        if self.jobs is None:
            return
        given = {
            "INPUT": self.inputs,
            **{"--prompt": self.prompt, "--prompts": self.prompts, "--seeds": self.seeds},
        }
        for name, value in given.items():
            wrong = f"--jobs and {name} contradict each other: each line of the file is one clip"
            require(
                not value,
                wrong,
                f"leave {name} out, and give each line of the jobs file its own value",
            )

    def line_defaults(self, sampling: SamplingConfig) -> LineDefaults:
        """Return the default values of fields that a line of `--jobs` leaves out.

        Args:
            sampling: Sampling parameters of these options.
        """
        from svdpp.driver.job_lines import LineDefaults

        checkpoint = self.checkpoint
        return LineDefaults(
            model=self.model,
            sampling=sampling,
            image_use=self.image_use,
            prompt_use="refused" if checkpoint is None else checkpoint.prompt_use,
            seed=self.seed or 0,
            negative_prompt=self.negative_prompt,
            last_image_use=self.last_image_use,
            last_image_reason="" if checkpoint is None else checkpoint.last_image_reason,
            last_image=None if self.last_image is None else str(self.last_image),
            references=self.reference_paths,
            videos=self.video_paths,
            format=self.policy(is_restarted=False).encoding.format,
            max_pixels=self.max_megapixels * 10**6,
        )


@app.command(
    **command_settings(
        "svdpp run photo.jpg",
        "svdpp run photos/ --seeds 1-4 --out clips --resume",
        "svdpp run --jobs clips.csv --model demo --device cpu",
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
    """Animate images, or make clips from prompts: each is OUT/NAME_SEED.mp4 with a JSON file."""
    if options.server is not None:
        run_at_server(console, launched, options, log)
        return
    from svdpp.launch.fork_server import start_fork_server_early

    command = RunCommand.create(console, launched, options, traces)
    device = options.device_name()
    if launched is None and not options.dry_run:
        # The fork server is started early, so that it imports torch while this process does too.
        start_fork_server_early(family=options.family, device=device)
    # Imported after the start of the fork server, because they take 0.2 s.
    from svdpp.driver.jobs import fit_request_to_jobs, loras_of
    from svdpp.media.output_files import lock_folder

    jobs, input_errors = command.read_jobs()
    request = options.request(
        launched=launched,
        device=device,
        from_image=options.from_image,
        has_last_image=options.has_last_image,
        num_references=options.num_references,
        clip_loras=loras_of(jobs),
    )
    # Under a launcher, only rank 0 knows the jobs, but all ranks must make the same request. So the
    # request depends on the jobs only without a launcher.
    if launched is None:
        request = fit_request_to_jobs(request, jobs)
    config, why = request.resolve()
    log.open(console, launched)
    if is_secondary_rank(launched):
        from svdpp.cli.progress import serve_member

        serve_member(command.pipeline(config), launched, console)
        return
    jobs, input_errors = command.check_jobs(config, jobs, input_errors)
    # Jobs that were rejected may name further LoRAs, which need not be loaded.
    config = replace(config, model=replace(config.model, clip_loras=loras_of(jobs)))
    if options.dry_run:
        show_plan(
            console,
            command.policy,
            config,
            jobs,
            why,
            input_errors,
            assumes_costs=options.costs is None,
        )
        return
    traces.check()
    with lock_folder(command.policy.folder, command.policy.single_clip) as why_not:
        pipeline, clips = command.plan(config, jobs)
        console.info(why, _UNLOCKED.format(why_not) if why_not else "")
        command.execute(pipeline, clips, input_errors)


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """One call of `svdpp run`: its options, and the values that are computed from the options."""

    console: Console
    launched: World | None
    """Rank and world size from the launcher (torchrun or srun); None: no launcher started this
    process."""
    options: RunOptions
    traces: TraceOptions
    policy: OutputPolicy
    """Folder and encoding of the clips, and treatment of existing files."""
    sampling: SamplingConfig
    """Sampling parameters of the clips, from the options."""
    seeds: list[int]
    """Seeds from `--seed` or `--seeds`. Each input becomes one clip for each seed."""
    template: NameTemplate | None
    """Template of the clips' names, from `--name`; None: names follow from the inputs."""

    @classmethod
    def create(
        cls,
        console: Console,
        launched: World | None,
        options: RunOptions,
        traces: TraceOptions,
    ) -> RunCommand:
        """Create the `RunCommand`, after checks that need neither torch nor the inputs' contents.

        Args:
            console: Console of the command.
            launched: Rank and world size from the launcher (torchrun or srun); None: no launcher
                started this process.
            options: Options of the pipeline and its clips.
            traces: Options of the trace.

        Raises:
            RequestError: An option is wrong, or options contradict each other.
        """
        options.check_prompts()
        is_restarted = launched is not None and launched.restarts > 0
        has_jobs = options.jobs is not None
        policy = options.policy(is_restarted=is_restarted, replaces_changed=has_jobs)
        sampling = options.sampling_config(
            from_image=options.from_image,
            has_last_image=options.has_last_image,
            num_references=options.num_references,
        )
        command = cls(
            console=console,
            launched=launched,
            options=options,
            traces=traces,
            policy=policy,
            sampling=sampling,
            seeds=options.all_seeds(),
            template=options.template(sampling),
        )
        command.check()
        return command

    @cached_property
    def line_reader(self) -> JobLineReader | None:
        """Reader of the lines of the jobs file; None: `--jobs` is not given.

        Raises:
            InputError: The file cannot be read.
        """
        path, table = self.options.jobs, self.policy.clip_table
        if path is None:
            return None
        from svdpp.driver.job_files import read_job_file
        from svdpp.driver.job_lines import JobLineReader

        is_own = table.exists() and path.exists() and table.samefile(path)
        wrong = f"--jobs {str(path)!r} is the file to which the run writes its table of clips"
        require(not is_own, wrong, "rename the jobs file, or name another `out` folder")
        return JobLineReader(self.options.line_defaults(self.sampling), read_job_file(path))

    def check(self) -> None:
        """Raise a `RequestError` if the options of `svdpp run` contradict each other.

        Raises:
            RequestError: The request cannot succeed.
        """
        options = self.options
        options.check_jobs_option()
        require(not options.is_dummy, "the dummy model makes no video files", "use --model demo")
        is_dry = options.dry_run and self.launched is not None
        require(not is_dry, "--dry-run starts no ranks", "start it without torchrun or srun")
        has_prompt = options.prompt is not None or options.prompts is not None
        # This check comes before the clips get their names, some of which contain the prompt. So a
        # model that takes no prompt causes an error about the prompt, not about equal names.
        takes_it = not has_prompt or isinstance(self.sampling, PromptedSampling)
        refused = f"model {options.model!r} takes no prompt"
        require(takes_it, refused, "leave it out, or try --model demo-text", model=options.model)
        missing = "INPUT is missing: name an image, or give a prompt to a model that takes one"
        is_given = has_prompt or bool(options.inputs) or options.jobs is not None
        require(is_given, missing, "try: svdpp run photo.jpg")

    def read_jobs(self) -> tuple[list[RunJob], list[SvdppError]]:
        """Return the clips that a run is asked for, with their names; empty on ranks other than 0.

        Returns:
            Jobs, and with `--keep-going` an error for each file or line for which there is no job.

        Raises:
            InputError: A file is missing, unreadable or hostile.
            RequestError: A line of `--jobs` is wrong, or two clips would have the same name.
        """
        if is_secondary_rank(self.launched):
            return [], []
        from svdpp.driver.jobs import check_and_name_jobs

        jobs, errors = self._read_lines() if self.line_reader else self._read_inputs()
        return check_and_name_jobs(jobs, self.policy, self.template), errors

    def _read_inputs(self) -> tuple[list[RunJob], list[SvdppError]]:
        from svdpp.driver.run_job import combine_jobs
        from svdpp.media.inputs import collect_inputs, raise_problems

        options, sampling = self.options, self.sampling
        max_pixels = options.max_megapixels * 10**6
        if not options.inputs:
            return combine_jobs(options.combined([None], sampling, max_pixels), self.seeds), []
        found, problems = collect_inputs(
            options.inputs,
            max_pixels=max_pixels,
            video_frames=sampling.video_frames,
        )
        if problems and not options.keep_going:
            raise_problems(problems, "use --keep-going to make the other clips" if found else "")
        inputs = options.combined(found, sampling, max_pixels)
        return combine_jobs(inputs, self.seeds), [*problems]

    def _read_lines(self) -> tuple[list[RunJob], list[SvdppError]]:
        reader = self.line_reader
        assert reader is not None
        jobs, errors = reader.read(reader.file.lines())
        # If there are jobs, `check_jobs` checks them, and raises the errors of all lines together.
        if not jobs:
            self._raise_line_errors(errors, 0)
            raise InputError(f"{reader.file.name} has no lines", "write one clip in each line")
        return jobs, errors

    def _raise_line_errors(self, errors: Sequence[SvdppError], num_jobs: int) -> None:
        """Raise the errors of a jobs file's lines, unless `--keep-going` skips these lines."""
        from svdpp.driver.job_lines import raise_line_errors

        reader = self.line_reader
        if reader is not None and not (self.options.keep_going and num_jobs):
            hint = "use --keep-going to make the other clips" if num_jobs else ""
            raise_line_errors(errors, reader.file, num_jobs, hint)

    def check_jobs(
        self, config: PipelineConfig, jobs: Sequence[RunJob], errors: Sequence[SvdppError]
    ) -> tuple[list[RunJob], list[SvdppError]]:
        """Return the clips that the model can make, and errors of the others; loads no weights.

        Args:
            config: Configuration of the run.
            jobs: Jobs of the run.
            errors: Errors of inputs and lines for which there is no job.

        Returns:
            Valid jobs, and with `--keep-going` the errors of all inputs, lines and jobs for which
            no clip will be made.

        Raises:
            RequestError: The model or the ranks cannot make a clip, or an output file exists.
            ModelError: The model is missing or not supported.
        """
        from svdpp.driver.jobs import check_outputs, find_refused_jobs
        from svdpp.driver.resolve import resolve_config

        reader = self.line_reader
        num_there = check_outputs(jobs, self.policy)
        if self.policy.keeps_finished and num_there > _FEW_CLIPS:
            self.console.info(f"checking {num_there} existing clips frame by frame ...")
        try:
            resolved, checkpoint = resolve_config(config, weights="none")
        except SvdppError:
            self._raise_line_errors(errors, len(jobs))
            raise
        assert checkpoint is not None
        refused = find_refused_jobs(jobs, resolved, checkpoint)
        if refused and reader is None:
            raise refused[0][1]
        left, errors = [*jobs], [*errors]
        if reader is not None:
            lines = {job.line for job, _ in refused}
            left = [job for job in jobs if job.line not in lines]
            errors += [reader.line_error(job.line or 0, error) for job, error in refused]
            self._raise_line_errors(errors, len(left))
        return left, errors

    def pipeline(self, config: PipelineConfig, jobs: Sequence[RunJob] = ()) -> Pipeline:
        """Create the pipeline of a run, without starting its ranks.

        Args:
            config: Configuration of the run.
            jobs: Jobs of the run; empty on ranks other than 0. The folders of the input files must
                be on a file system that all hosts share.
        """
        from svdpp.driver.pipeline import Pipeline

        latents = self.options.latents_dir
        files = [image for job in jobs for image in job.made_from.images]
        files += [video for job in jobs for _, video in job.made_from.videos]
        folders = {file.path.parent: file.path for file in files}
        loras = {Path(lora.name).expanduser() for lora in config.model.clip_loras}
        shared = [self.policy.folder, *folders.values(), *filter(Path.exists, sorted(loras))]
        return Pipeline(
            config,
            checkpoint=self.options.checkpoint,
            latents_folder=None if latents is None else str(latents.absolute()),
            shared_paths=[str(path.absolute()) for path in shared],
            trace_clips=_TRACE_CLIPS,
        )

    def plan(self, config: PipelineConfig, jobs: Sequence[RunJob]) -> tuple[Pipeline, RunPlan]:
        """Create the pipeline of a run, and select the clips that it has to make.

        Args:
            config: Configuration of the run.
            jobs: Jobs of the run, which `check_jobs` has accepted.

        Raises:
            RequestError: The model cannot make a clip, or an existing clip has other parameters.
            ModelError: The model cannot be used.
        """
        from svdpp.driver.jobs import plan_clips

        pipeline = self.pipeline(config, jobs)
        assert pipeline.checkpoint is not None
        clips = plan_clips(jobs, self.policy, pipeline.config, pipeline.checkpoint)
        written = [
            f"remark: {self.console.write_fields(text)}"
            for text in _remarks(jobs, pipeline.config.sampling)
        ]
        self.console.info(*pipeline.checkpoint.remarks, *written)
        if replaced := sum(clip.replaces for clip in clips.clips):
            noun = pluralize(replaced, "clip")
            self.console.info(f"{noun} will be made again, because parameters have changed")
        return pipeline, clips

    def execute(
        self, pipeline: Pipeline, clips: RunPlan, input_errors: Sequence[SvdppError]
    ) -> None:
        """Make the clips of a run, write its manifest, and print the clips or raise an error.

        Args:
            pipeline: Pipeline, which is not started.
            clips: Clips to make, and clips that are finished.
            input_errors: Errors of inputs and lines for which no clip is made.

        Raises:
            SvdppError: A clip failed or was rejected. Of several errors, the one with the highest
                exit code is raised.
        """
        from svdpp.diagnostics.report import analyze
        from svdpp.driver.manifest import open_manifest

        console, policy = self.console, self.policy
        failed: list[dict[str, Any]] = [
            {"output": None, "error": console.error_record(error)} for error in input_errors
        ]
        table = policy.clip_table
        manifest = open_manifest(policy.manifest, pipeline.config, clips, failed, table)
        made, missing, metrics = self._run_pipeline(pipeline, clips, manifest)
        failed += [
            {"output": output, "error": console.error_record(error)}
            for output, error in missing.items()
        ]
        for failure in pipeline.failures:
            name = policy.file_name(clips.clips[failure.clip].job.name)
            failed.append({"output": name, "error": console.error_record(failure.error)})
        if made and metrics is not None and metrics.clips > metrics.world_size:
            limits = analyze(metrics, policy.manifest).lines
            report = f"  svdpp report {shlex.quote(str(policy.manifest))}"
            console.info(*limits, report if limits else "")
        skipped = [each for each in clips.skipped if each["output"] not in missing]
        print_clips(console, policy.folder, skipped, made, failed)
        self._print_remarks(made)
        raise_failed(failed, len(skipped) + len(made) + len(failed))

    def _print_remarks(self, made: list[dict[str, Any]]) -> None:
        """Print why clips may differ from diffusers' clips, and a command that verifies a clip."""
        console, out = self.console, self.policy.folder
        if any(metadata.get("memory_pressure") for metadata in made):
            console.info(
                "warning: GPU memory ran short, so cuDNN may have used another kernel and the bits "
                "may differ; a smaller --decode-chunk-size or fewer --gpus lower memory"
            )
        if any(each.get("cfg_parallel", 1) > 1 and each["exact"] == "unproven" for each in made):
            console.info(
                "exactness is not claimed, because CFG pairs divide a batch of two; to check it: "
                "svdpp verify --cfg-parallel 2"
            )
        if any(not repeats_bits(each.get("conditions", {})) for each in made):
            console.info(
                "exactness is not claimed, because the attention backend gives different bits for "
                "equal inputs here; to check it: svdpp verify --atol with the same options"
            )
        if exact := [metadata for metadata in made if metadata["exact"] is True]:
            path = shlex.quote(str(out / exact[0]["output"]))
            console.info(f"to verify a clip: svdpp verify {path}")

    def _run_pipeline(
        self, pipeline: Pipeline, clips: RunPlan, manifest: RunManifest
    ) -> tuple[list[dict[str, Any]], dict[str, OutputError], RunMetrics | None]:
        """Make the clips of a run, and update the run's manifest and progress meanwhile.

        Returns:
            Three values: metadata of the finished clips, in order; errors for finished clips whose
            files someone removed during the run, by the clip's file name; and the run's metrics,
            None if nothing was measured.
        """
        from svdpp.cli.progress import EventLog, Progress, labels
        from svdpp.diagnostics.run_metrics import metrics_of_pipeline
        from svdpp.driver.manifest import find_missing_outputs
        from svdpp.driver.run_plan import BATCH_SIZE, submit_and_collect

        console, requests, config = self.console, clips.requests, pipeline.config
        if not requests:
            pipeline.dismiss()
            # The manifest is written even if all clips exist, because a killed run may have left an
            # outdated one.
            with manifest:
                return [], {}, None
        console.info(describe_run(config, clips.clips))
        progress = Progress(
            console,
            "run",
            pipeline.schedule(requests[:BATCH_SIZE]),
            labels=labels(requests),
            num_clips=len(requests),
            costs=config.costs,
        )
        with progress, manifest:
            for observer in (progress, EventLog(config.layout), manifest):
                pipeline.observe(observer)
            try:
                with self.traces.write_trace(pipeline), pipeline:
                    results = sorted(
                        submit_and_collect(pipeline, clips), key=lambda result: result.clip
                    )
            except (Interrupted, RankError) as error:
                finished = (
                    f"{progress.num_done} of {pluralize(progress.num_clips, 'clip')} finished"
                )
                hint = f"{finished}; run the same command with --resume to go on"
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


def _remarks(jobs: Sequence[RunJob], sampling: SamplingConfig) -> list[str]:
    """Return remarks on conversions of images that a user may not expect, such as a stretch."""
    from svdpp.media.inputs import input_remarks

    files: dict[tuple[int, int, str], tuple[SamplingConfig, dict[MediaFile, None]]] = {}
    for job in jobs:
        own = job.sampling or sampling
        _, found = files.setdefault((own.width, own.height, own.fit), (own, {}))
        found |= dict.fromkeys(job.made_from.images)
    remarks = [text for own, found in files.values() for text in input_remarks(found, own)]
    more = len(remarks) - _MAX_REMARKS
    return remarks[:_MAX_REMARKS] + (
        [f"further remarks on images, not printed: {more}"] if more > 0 else []
    )
