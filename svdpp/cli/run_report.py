"""Owns the remarks of `svdpp run` before and after the run, and the line for each clip."""

from __future__ import annotations

import contextlib
import shlex
import socket
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console, counted
from svdpp.config import ClipRequest, OutputConfig, PipelineConfig
from svdpp.errors import SvdppError, error_from_dict, error_to_dict, highest_code

if TYPE_CHECKING:
    from svdpp.driver.jobs import ClipPlan, OutputPolicy

# Checking these takes a second or two.
_FEW_CLIPS = 8
# Seconds of a run from which on the few that it takes to count FLOPs are worth it.
_WORTH_COUNTING = 10.0

Metadata = Mapping[str, Any]


def announce_look(
    console: Console, config: PipelineConfig, policy: OutputPolicy, num_there: int
) -> None:
    """Announces a long check of existing outputs, and a --latents-dir without effect."""
    if policy.keeps_finished and num_there > _FEW_CLIPS:
        console.info(f"checking {num_there} existing clips frame by frame ...")
    if policy.latents_folder is not None and not config.plan.links:
        console.info(
            "--latents-dir has no effect: with this layout no latent goes from rank to rank"
        )


def announce(console: Console, config: PipelineConfig, clips: ClipPlan) -> None:
    """Announces the clips, the devices and the model."""
    num_clips = len(clips.requests)
    begun = sum(request.done_steps > 0 for request in clips.requests)
    console.info(
        f"{counted(num_clips, 'clip')} of {counted(config.sampling.frames, 'frame')}, "
        f"{config.sampling.width}x{config.sampling.height}, on "
        f"{counted(config.world_size, f'{config.device} rank')} with {config.model.name}"
        + (f"; {begun} of them continued from an earlier run" if begun else "")
    )
    if clips.other_threads is not None:
        console.info(
            f"some clips in --latents-dir start again from the photograph: only with --threads "
            f"{clips.other_threads} can they continue"
        )
    if config.draft is not None:
        draft_plan, last = config.draft_plan, config.world_size - 1
        console.info(
            f"each clip has a draft after {draft_plan.rounds(last)} of {draft_plan.num_steps} "
            f"rounds, start steps {','.join(map(str, draft_plan.start_steps))}"
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


def raise_worst(lost: Sequence[Metadata], num_clips: int) -> None:
    """Ends the command with the highest exit code of its lost clips; returns if none is lost."""
    if lost:
        worst = highest_code(error_from_dict(clip["error"]) for clip in lost)
        count = f"{len(lost)} of {counted(num_clips, 'clip')}"
        record = {**error_to_dict(worst), "message": f"{count} lost: {worst}"}
        raise error_from_dict(record)


def warn_of_memory_pressure(console: Console, made: Sequence[Metadata]) -> None:
    """Warns once if a GPU's memory ran short while clips were made."""
    if any(metadata.get("memory_pressure") for metadata in made):
        console.info(
            "warning: GPU memory ran short, so cuDNN may have used another kernel and the bits may "
            "differ; a smaller --decode-chunk-size or fewer --gpus on the card lower memory"
        )


def announce_report(console: Console, manifest: Path) -> None:
    """Announces what limits the run and what to try, and the command that shows all of it."""
    from svdpp.diagnostics.run_report import read_report

    with contextlib.suppress(SvdppError):  # a run that ended early has left no figures
        report = read_report(manifest)
        lines = [] if report.diagnosis is None else report.diagnosis.lines
        if lines:
            console.infos([*lines, f"  svdpp report {shlex.quote(str(manifest))}"])


def utilisation(manifest: Path) -> dict[str, Any] | None:
    """TFLOP/s and MFU of the run's ranks, as in its report; None if it has left no figures."""
    from svdpp.diagnostics.run_report import read_report
    from svdpp.diagnostics.utilisation import Speeds, speeds_of

    with contextlib.suppress(SvdppError):
        diagnosis = read_report(manifest).diagnosis
        if diagnosis is None:
            return None
        if diagnosis.figures.makespan < _WORTH_COUNTING:
            note = "a short run: svdpp report counts its FLOPs, which takes seconds"
            return asdict(Speeds(note=note))
        return asdict(speeds_of(diagnosis.figures))
    return None


def print_clips(
    console: Console,
    out: Path,
    skipped: Sequence[Metadata],
    made: Sequence[Metadata],
    lost: Sequence[Metadata],
) -> None:
    """Prints a line for each clip, and says if it was finished before or lost."""
    for metadata in skipped:
        console.result(f"{out / metadata['output']}{_elsewhere(metadata)}  (was finished)")
    for metadata in made:
        console.result(f"{out / metadata['output']}{_elsewhere(metadata)}")
        if "draft" in metadata:
            console.info(f"  {_of_draft(metadata)}")
    for clip in lost:
        name = out / clip["output"] if clip["output"] else "(no clip)"
        console.result(f"{name}  (lost: {clip['error']['message']})")
    if skipped:
        console.info(f"already finished: {counted(len(skipped), 'clip')}")
    exact = [each for each in made if each["exact"] and not _elsewhere(each)]
    if exact:
        output = OutputConfig(path=str(out / exact[0]["output"]), format=exact[0]["format"])
        console.infos(["to prove one:", f"  svdpp verify {shlex.quote(output.path)}"])


def _elsewhere(metadata: Metadata) -> str:
    """The host of the clip if it is another one; its --out may be another folder."""
    host = metadata.get("host", socket.gethostname())
    return "" if host == socket.gethostname() else f"  (on {host})"


def _of_draft(metadata: Metadata) -> str:
    draft = metadata["draft"]
    if not metadata["exact"]:
        agreement = draft["agreement"]
        return (
            f"approximate: the result of rank {draft['rank']}, {_psnr(agreement)} from that of "
            f"rank {agreement['with_rank']}; without --draft-psnr you get the exact clip"
        )
    if not draft["results"]:
        return "exact; its draft was lost"
    first = draft["results"][0]
    seconds, sooner = metadata["wall_seconds"], first["wall_seconds"]
    return (
        f"exact, after {seconds:.1f} s; its draft, after {sooner:.1f} s, was {_psnr(first)} from it"
    )


def _psnr(difference: Mapping[str, Any]) -> str:
    if difference["psnr_db"] is None:
        return "no pixel"
    levels = difference["max_levels"]
    return f"{difference['psnr_db']:.1f} dB ({counted(levels, 'level')} at most)"
