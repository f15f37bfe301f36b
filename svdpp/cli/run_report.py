"""What `svdpp run` prints: before and after a run, for each clip, and with `--dry-run`."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console, counted
from svdpp.config import ClipRequest, PipelineConfig

if TYPE_CHECKING:
    from svdpp.cli.run_request import RunRequest
    from svdpp.driver.jobs import ClipPlan, OutputPolicy
    from svdpp.media.inputs import ClipInput

Metadata = Mapping[str, Any]


def announce(
    console: Console, config: PipelineConfig, clips: ClipPlan, latents_dir: Path | None
) -> None:
    """Announces the clips, the devices and the model."""
    num_clips = len(clips.requests)
    begun = sum(request.done_steps > 0 for request in clips.requests)
    if latents_dir is not None and not config.layout.links:
        console.info("--latents-dir has no effect: in this layout no rank sends a latent")
    console.info(
        f"{counted(num_clips, 'clip')} of {counted(config.sampling.frames, 'frame')}, "
        f"{config.sampling.width}x{config.sampling.height}, on "
        f"{counted(config.world_size, f'{config.device} rank')} with {config.model.name}"
        + (f"; {begun} of them continued from an earlier run" if begun else "")
    )
    if clips.other_threads is not None:
        console.info(
            f"some clips in --latents-dir start again from the image: only with --threads "
            f"{clips.other_threads} can they continue"
        )


def labels(requests: Sequence[ClipRequest]) -> list[str]:
    """A name for each clip in the progress: its input, and the seed if there are several."""
    names = [_name(request) for request in requests]
    if len({request.seed for request in requests}) == 1:
        return names
    return [f"{name} seed {request.seed}" for name, request in zip(names, requests, strict=True)]


def _name(request: ClipRequest) -> str:
    if request.image is not None:
        return Path(request.image).name
    return "clip" if request.prompt is None else textwrap.shorten(request.prompt, 40)


def print_clips(
    console: Console,
    out: Path,
    skipped: Sequence[Metadata],
    made: Sequence[Metadata],
    lost: Sequence[Metadata],
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


def show_dry_run(
    console: Console,
    asked: RunRequest,
    config: PipelineConfig,
    found: Sequence[ClipInput],
    remarks: Sequence[str],
) -> None:
    """Checks a run, and prints what it would make; `svdpp plan` forecasts its times."""
    from svdpp.driver.jobs import check_outputs, plan_clips
    from svdpp.driver.memory import estimate_ranks
    from svdpp.driver.resolve import resolve

    policy = asked.policy
    config, checkpoint = resolve(config, weights="none")
    assert checkpoint is not None
    check_outputs(found, asked.seeds, policy)
    clips = plan_clips(found, asked.seeds, policy, config, checkpoint)
    console.info(*remarks)
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
        "ranks": [
            {"rank": each.rank, "peak_bytes": each.total_bytes}
            for each in estimate_ranks(config, weights="none")
        ],
        "disk": _disk(policy, config, len(clips.requests)),
    }
    if not console.as_json:
        about["clips"] = [str(policy.folder / clip["output"]) for clip in about["clips"]]
        sampling = config.sampling
        console.result(
            f"{counted(len(clips.requests), 'clip')} to make: "
            f"{counted(sampling.frames, 'frame')} of {sampling.width}x{sampling.height}, "
            f"{counted(sampling.num_inference_steps, 'step')}, "
            f"{config.model.name} {config.model.dtype}"
        )
    console.answer(about)


def _disk(policy: OutputPolicy, config: PipelineConfig, num_clips: int) -> dict[str, int]:
    from svdpp.media.disk_space import estimated_bytes, free_bytes

    one = estimated_bytes(policy.format, policy.crf, config.sampling)
    return {"needed_bytes": num_clips * one, "free_bytes": free_bytes(policy.folder)}
