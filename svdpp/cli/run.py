"""`svdpp run`: images in, clips out."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.failures import worst_of
from svdpp.cli.options.outputs import LogOptions, TraceOptions
from svdpp.cli.run_request import RunOptions, RunRequest
from svdpp.errors import Interrupted, RankError, error_from_dict, error_to_dict
from svdpp.launch.world import World, is_member

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from svdpp.config import ClipRequest, PipelineConfig
    from svdpp.diagnostics.figures import RunFigures
    from svdpp.driver.clips import ClipResult
    from svdpp.driver.jobs import ClipPlan
    from svdpp.driver.pipeline import Pipeline
    from svdpp.driver.run_manifest import RunManifest
    from svdpp.errors import SvdppError
    from svdpp.media.inputs import ClipInput


# Clips that go to the ranks at once, and that a forecast replays: their actions need memory.
_AT_ONCE = 1000
# Checking these takes a second or two.
_FEW_CLIPS = 8

_UNLOCKED = "warning: the --out folder cannot be locked ({}): start no other run into it meanwhile"


@command(
    examples=(
        "svdpp run photo.jpg",
        "svdpp run photos/ --seeds 1-4 --out clips --resume",
        "svdpp run photo.jpg --model demo --device cpu",
    ),
    common=(
        *("out", "world", "model", "seeds", "layout", "resume", "overwrite", "steps"),
        *("num_frames", "decode_chunk_size"),
    ),
    without=("latent_shape",),
    defaults={"world": "all GPUs, if they divide the steps; on the CPU 2"},
)
def run(
    console: Console,
    launched: World | None,
    options: RunOptions,
    traces: TraceOptions,
    log: LogOptions,
) -> None:
    """Animate images, or make clips from prompts.

    Clips are OUT/NAME_SEED.mp4; parameters and hashes are in NAME_SEED.mp4.json.
    """
    from svdpp.launch import fork_server
    from svdpp.media.output_files import locked

    asked = _Run(console=console, traces=traces, launched=launched, options=options)
    asked.check()
    found, refused = asked.clip_inputs()
    if launched is None and not options.dry_run:
        # The fork server imports torch at the same time as this process.
        fork_server.start_early(family=options.family, device=asked.device)
    config, why = asked.config(len(found) * len(asked.seeds))
    log.open(console, launched)
    if is_member(launched):
        from svdpp.cli.log import serve_member

        serve_member(asked.pipeline(config), launched, console)
        return
    remarks = [*filter(None, (asked.stretched(found), why))]
    if options.dry_run:
        asked.show(config, found, remarks)
        return
    traces.check()
    with locked(asked.policy.folder, asked.policy.single_clip) as why_not:
        pipeline, clips = asked.planned(config, found)
        console.info(*remarks, *([_UNLOCKED.format(why_not)] if why_not else []))
        asked.make(pipeline, clips, refused)


@dataclass(frozen=True, kw_only=True)
class _Run(RunRequest):
    console: Console
    traces: TraceOptions

    def planned(
        self, config: PipelineConfig, found: Sequence[ClipInput]
    ) -> tuple[Pipeline, ClipPlan]:
        """The pipeline, and the clips that it is to make."""
        from svdpp.driver.jobs import check_outputs, plan_clips

        policy = self.policy
        num_there = check_outputs(found, self.seeds, policy)
        if policy.keeps_finished and num_there > _FEW_CLIPS:
            self.console.info(f"checking {num_there} existing clips frame by frame ...")
        pipeline = self.pipeline(config, found, self.traces.profile_path)
        assert pipeline.checkpoint is not None
        clips = plan_clips(found, self.seeds, policy, pipeline.config, pipeline.checkpoint)
        return pipeline, clips

    def make(self, pipeline: Pipeline, clips: ClipPlan, refused: Sequence[SvdppError]) -> None:
        """Makes the clips, prints them, and ends the command if one is lost or was `refused`."""
        from svdpp.diagnostics.report import diagnose
        from svdpp.driver.jobs import open_manifest

        console, policy = self.console, self.policy
        lost: list[dict[str, Any]] = [
            {"output": None, "error": error_to_dict(error)} for error in refused
        ]
        manifest = open_manifest(policy.manifest, pipeline.config, clips, lost)
        made, figures = self._perform(pipeline, clips, manifest)
        for failure in pipeline.failures:
            output = clips.metadata[failure.clip]["output"]
            lost.append({"output": output, "error": error_to_dict(failure.error)})
        if made and figures is not None:
            limits = diagnose(figures, policy.manifest).lines
            report = f"  svdpp report {shlex.quote(str(policy.manifest))}"
            console.info(*limits, *([report] if limits else []))
        if console.as_json:
            console.json([*clips.skipped, *made, *lost])
        else:
            print_clips(console, policy.folder, clips.skipped, made, lost)
        if lost:
            num_clips = counted(len(clips.skipped) + len(made) + len(lost), "clip")
            errors = [error_from_dict(clip["error"]) for clip in lost]
            raise worst_of(errors, f"{len(lost)} of {num_clips} lost")

    def _perform(
        self, pipeline: Pipeline, clips: ClipPlan, manifest: RunManifest
    ) -> tuple[list[dict[str, Any]], RunFigures | None]:
        """The metadata of the finished clips, in the order of the request, and the figures."""
        from svdpp.cli.log import EventLog
        from svdpp.cli.progress import Progress, labels
        from svdpp.diagnostics.figures import figures_of_run

        console, requests, config = self.console, clips.requests, pipeline.config
        if not requests:
            pipeline.dismiss()
            with manifest:  # a run that was killed after its last clip left an old manifest
                return [], None
        self._announce(config, requests)
        progress = Progress(
            console,
            "run",
            pipeline.schedule(requests[:_AT_ONCE]),
            labels=labels(requests),
            num_clips=len(requests),
            costs=config.costs,
        )
        with progress, manifest:
            for observer in (progress, EventLog(config.layout), manifest):
                pipeline.observe(observer)
            try:
                with self.traces.of(pipeline), pipeline:
                    results = sorted(results_of(pipeline, clips), key=lambda result: result.clip)
            except (Interrupted, RankError) as error:
                finished = f"{progress.num_done} of {counted(progress.num_clips, 'clip')} finished"
                hint = f"{finished}; to go on: the same command with --resume"
                error.hint = "; ".join(filter(None, [error.hint, hint]))
                raise
            finally:
                if (figures := figures_of_run(pipeline, requests)) is not None:
                    manifest.measured(figures.to_json())
        console.info(", wrote ".join([progress.closing, *self.traces.paths]))
        return [result.metadata for result in results], figures

    def _announce(self, config: PipelineConfig, requests: Sequence[ClipRequest]) -> None:
        begun = sum(request.done_steps > 0 for request in requests)
        if self.options.latents_dir is not None and not config.layout.links:
            self.console.info("--latents-dir has no effect: in this layout no rank sends a latent")
        self.console.info(
            f"{counted(len(requests), 'clip')} of {counted(config.sampling.frames, 'frame')}, "
            f"{config.sampling.width}x{config.sampling.height}, on "
            f"{counted(config.world_size, f'{config.device} rank')} with {config.model.name}"
            + (f"; {begun} of them continued from an earlier run" if begun else "")
        )

    def show(
        self, config: PipelineConfig, found: Sequence[ClipInput], remarks: Sequence[str]
    ) -> None:
        """Checks a run, and prints what it would make; `svdpp plan` forecasts its times."""
        from svdpp.driver.jobs import check_outputs, estimated_bytes, free_bytes, plan_clips
        from svdpp.driver.memory import estimate_ranks
        from svdpp.driver.resolve import resolve

        console, policy = self.console, self.policy
        config, checkpoint = resolve(config, weights="none")
        assert checkpoint is not None
        check_outputs(found, self.seeds, policy)
        clips = plan_clips(found, self.seeds, policy, config, checkpoint)
        console.info(*remarks)
        num_clips, sampling = len(clips.requests), config.sampling
        needed = num_clips * estimated_bytes(policy.format, policy.crf, sampling)
        ranks = estimate_ranks(config, weights="none")
        console.result(
            f"{counted(num_clips, 'clip')} to make: "
            f"{counted(sampling.frames, 'frame')} of {sampling.width}x{sampling.height}, "
            f"{counted(sampling.num_inference_steps, 'step')}, "
            f"{config.model.name} {config.model.dtype}"
        )
        about: dict[str, Any] = {
            "schema_version": 1,
            "clips": [
                {name: metadata[name] for name in ("output", "input", "seed")}
                for metadata in clips.metadata
            ],
            "finished": [metadata["output"] for metadata in clips.skipped],
            "layout": str(config.layout),
            "world_size": config.world_size,
            "device": config.device,
            "ranks": [{"rank": rank, "peak_bytes": peak} for rank, peak in enumerate(ranks)],
            "disk": {"needed_bytes": needed, "free_bytes": free_bytes(policy.folder)},
        }
        if not console.as_json:
            about["clips"] = [
                {"output": str(policy.folder / clip["output"]), "seed": clip["seed"]}
                for clip in about["clips"]
            ]
        console.answer(about)


def results_of(pipeline: Pipeline, clips: ClipPlan) -> Iterator[ClipResult]:
    """Submits the clips, the last ones while earlier ones are made; yields finished ones."""
    for first in range(0, len(clips.requests), _AT_ONCE):
        batch = slice(first, first + _AT_ONCE)
        handles = pipeline.submit(clips.requests[batch], clips.metadata[batch])
        for result in pipeline.results():
            yield result
            if handles[0].done() and first + _AT_ONCE < len(clips.requests):
                break


def print_clips(
    console: Console,
    out: Path,
    skipped: Sequence[Mapping[str, Any]],
    made: Sequence[Mapping[str, Any]],
    lost: Sequence[Mapping[str, Any]],
) -> None:
    """Prints a line for each clip, and says if it was finished before or lost."""
    for metadata in skipped:
        console.result(f"{out / metadata['output']}  (was finished)")
    for metadata in made:
        console.result(f"{out / metadata['output']}")
    for clip in lost:
        name = out / clip["output"] if clip["output"] else "(no clip)"
        console.result(f"{name}  (lost: {clip['error']['message']})")
    if any(metadata.get("memory_pressure") for metadata in made):
        console.info(
            "warning: GPU memory ran short, so cuDNN may have used another kernel and the bits may "
            "differ; a smaller --decode-chunk-size or fewer --gpus lower memory"
        )
    if skipped:
        console.info(f"already finished: {counted(len(skipped), 'clip')}")
    exact = [metadata for metadata in made if metadata["exact"] is True]
    if any(metadata.get("cfg_parallel", 1) > 1 for metadata in made) and not exact:
        console.info("not called exact: pairs divide a batch of two; how far apart that is:")
        console.info("  svdpp verify --cfg-parallel 2, with the options of this run")
    if exact:
        path = shlex.quote(str(out / exact[0]["output"]))
        console.info(f"to prove one: svdpp verify {path}")
