"""Owns the proof as a page: verdict, checks, pictures of both sides, and the conditions."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.launch import gpus
from svdpp.models import determinism
from svdpp.models.base import Frames
from svdpp.verification.difference_image import (
    DifferenceImage,
    Pixels,
    frame_difference,
    latent_difference,
)
from svdpp.verification.html import Html, picture, table, tag, write_page
from svdpp.verification.result import Check, VerificationResult
from svdpp.verification.verify import both_sides, our_frames
from svdpp.worker.clip_metadata import versions

# A page of a few MB; the table has every clip.
_MAX_CLIPS = 4


def write_report(
    path: Path,
    verdict: VerificationResult,
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    asked: Mapping[str, str],
) -> None:
    """Writes one self-contained HTML page. No path of this machine is in it, but files' names.

    Args:
        path: replaced where it exists.
        verdict: of all clips.
        config: of the pipelined side.
        requests: by clip.
        folder: what `run_pipelined` and `run_sequential` kept.
        asked: what else the user asked of the proof, by name.

    Raises:
        OutputError: the page cannot be written.
    """
    content = [
        tag("h1", "svdpp verify: pipelined against sequential"),
        _verdict(verdict, "a plain loop's" if config.model.is_dummy else "diffusers' own"),
        tag("h2", "Checks"),
        tag("div", _checks(verdict), class_="scroll"),
        *_drafts(verdict, config),
        *_pictures(verdict, config, requests, folder),
        tag("h2", "Conditions"),
        table((), _conditions(config, requests, asked)),
    ]
    write_page(path, f"svdpp verify: {_word(verdict)[1]}", content)


def _word(verdict: VerificationResult | Check) -> tuple[str, str]:
    """The colour of a verdict, and the word for it."""
    if verdict.bitwise:
        return "good", "bitwise equal"
    return ("fair", "equal within tolerance") if verdict.equal else ("bad", "different")


def _verdict(verdict: VerificationResult, oracle: str) -> Html:
    colour, word = _word(verdict)
    clips = len({check.clip for check in verdict.checks})
    sentence = (
        f"{clips} clip{'s' if clips > 1 else ''}, {len(verdict.checks)} comparisons of the "
        f"pipeline's result with {oracle}, on one device."
    )
    different = next((check for check in verdict.checks if not check.bitwise), None)
    if different is not None:
        sentence += f" First difference: {different}."
    headline = tag("b", word[0].upper() + word[1:])
    return tag("div", headline, tag("p", sentence), class_=f"verdict {colour}")


def _checks(verdict: VerificationResult) -> Html:
    rows = []
    for check in verdict.checks:
        colour, word = _word(check)
        rows.append(
            (
                str(check.clip),
                check.what.replace("_", " "),
                str(check.step),
                str(check.rank),
                tag("span", word, class_=colour),
                f"{check.max_abs_diff:.3g}",
                str(check.max_ulp),
                str(list(check.first_index)) if check.first_index else "",
                tag("code", check.sha256[:16], title=check.sha256),
            )
        )
    columns = ("clip", "what", "steps done", "rank", "verdict", "max difference", "max ULP")
    return table((*columns, "first at", "sha256, pipelined"), rows)


def _drafts(verdict: VerificationResult, config: PipelineConfig) -> Iterator[Html]:
    """What each rank of a draft came to, beside the exact result."""
    if not verdict.drafts:
        return
    num_steps = config.sampling.num_inference_steps
    yield tag("h2", "Drafts")
    yield tag("p", "Approximations, by their distance from the sequential result.", class_="faint")
    columns = ("clip", "rank", "start", "rounds", "sooner", "latent, max difference")
    rows = [
        (
            *map(str, (each.clip, each.rank, each.start, each.rounds)),
            f"{num_steps / each.rounds:.2f}x",
            "lost" if each.latent_max_abs_diff is None else f"{each.latent_max_abs_diff:.3g}",
            "" if each.frames is None else str(each.frames.whole),
        )
        for each in verdict.drafts
    ]
    yield table((*columns, "frames"), rows)


def _pictures(
    verdict: VerificationResult,
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
) -> Iterator[Html]:
    """The clips that differ before the others."""
    different = {check.clip for check in verdict.checks if not check.bitwise}
    clips = sorted(range(len(requests)), key=lambda clip: clip not in different)
    num_steps = config.sampling.num_inference_steps
    ours, theirs = both_sides(folder)
    for clip in clips[:_MAX_CLIPS]:
        yield tag("h2", f"Clip {clip}: {_input(requests[clip])}")
        if config.decodes:
            sequential = theirs.frames(clip)
            yield _frames_strip("pipelined", our_frames(config, ours, clip), sequential)
            for draft in (each for each in verdict.drafts if each.clip == clip):
                if draft.is_lost:
                    yield tag("h3", f"Draft by rank {draft.rank}: lost, its walk came to harm")
                    continue
                yield tag("h3", f"Draft by rank {draft.rank}, after {draft.rounds} rounds")
                walked = ours.frames(clip, draft_rank=draft.rank)
                yield _frames_strip(f"rank {draft.rank}", walked, sequential)
        if not config.decodes or clip in different:
            latents = [side.latent(clip, num_steps).float().numpy() for side in (ours, theirs)]
            contrast = latent_difference(*latents)
            largest = f"{contrast.largest:.3g}"
            yield _strip("pipelined", "final latent, plane", contrast, largest)
    if len(clips) > _MAX_CLIPS:
        left_out = f"{len(clips) - _MAX_CLIPS} further clips are in the table of checks alone."
        yield tag("p", left_out, class_="faint")


def _input(request: ClipRequest) -> str:
    name = f"{Path(request.image).name}, " if request.image else ""
    return f"{name}seed {request.seed}"


def _frames_strip(side: str, ours: Frames, sequential: Frames) -> Html:
    contrast = frame_difference(ours, sequential)
    return _strip(side, "frame", contrast, f"{contrast.largest:.0f} of 255 levels")


def _strip(ours: str, what: str, contrast: DifferenceImage, largest: str) -> Html:
    """Three rows of pictures: ours, theirs, and the difference."""
    names = [f"{what} {index}" for index in contrast.indices]

    def row(side: str, pictures: Sequence[Pixels]) -> list[str]:
        texts = (f"{side}, {name}" for name in names)
        return [tag("b", side), *map(picture, pictures, texts)]

    rows = [
        row(ours, contrast.ours),
        row("sequential", contrast.theirs),
        row("difference", contrast.differences),
    ]
    note = "No difference: the maps are black."
    if contrast.largest:
        note = f"Differences are amplified x{contrast.factor:.3g}: white is {largest}, the largest."
    return tag("div", table(("", *names), rows, class_="strip"), tag("p", note, class_="faint"))


def _conditions(
    config: PipelineConfig, requests: Sequence[ClipRequest], asked: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    model = config.model
    # A local checkpoint's folder would say whose machine this is.
    is_local = Path(model.name).exists()
    yield "model", Path(model.name).name if is_local else model.name
    yield "dtype", model.dtype
    yield "device", config.device
    yield "ranks", str(config.world_size)
    yield "threads a rank", str(config.num_threads)
    yield "clips", str(len(requests))
    knobs = asdict(config.sampling)
    for name in ["num_inference_steps"] if model.is_dummy else knobs:
        if knobs[name] is not None:
            yield name.replace("_", " "), str(knobs[name])
    yield from asked.items()
    if config.device == "cpu":
        for name, value in determinism.conditions("cpu").items():
            yield name.replace("_", " "), str(value)
    else:
        yield "gpus", ", ".join(gpu.name for gpu in gpus.visible_gpus())
    yield "machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions().items())
    yield "written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
