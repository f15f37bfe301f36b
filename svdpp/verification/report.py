"""The proof's HTML report: verdict, checks, pictures of both sides, and conditions."""

from __future__ import annotations

import base64
import io
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.media.html_page import write_html_page
from svdpp.models.base import Frames
from svdpp.verification.difference_image import (
    DifferenceImage,
    Pixels,
    frame_difference,
    latent_difference,
)
from svdpp.verification.result import Check, VerificationResult, describe_index
from svdpp.verification.verify import both_sides, latent_axes
from svdpp.worker.clip_metadata import versions
from svdpp.worker.tensor_store import TensorStore

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_FRAME_AXES = "FHWC"
# Keeps the page at a few MB; its table has every clip.
_MAX_CLIPS = 4


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """Pictures of planes, one column each: both sides, and their difference."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Name of the side, and its pictures as data URLs."""
    note: str


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The pictures of one clip, under headings."""

    title: str
    strips: list[tuple[str, _Strip | None]]
    """Heading and pictures; None if there are no pictures."""


def write_report(
    path: Path,
    verdict: VerificationResult,
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    asked: Mapping[str, str],
    conditions: Mapping[str, Any],
) -> None:
    """Writes one self-contained HTML page, which names files without their folders.

    Args:
        path: of the page; replaced if it exists.
        verdict: of all clips.
        config: of the pipelined side.
        requests: by clip.
        folder: of the tensors that `run_pipelined` and `run_sequential` kept.
        asked: further options of the proof, by name.
        conditions: what `run_pipelined` returned.
    """
    write_html_page(
        _TEMPLATE,
        path,
        verdict=verdict,
        colours={"bitwise equal": "good", "equal within tolerance": "fair", "different": "bad"},
        word=_word,
        oracle="a plain loop" if config.model.is_dummy else "diffusers' own pipeline",
        num_clips=len(requests),
        different=next((check for check in verdict.checks if not check.bitwise), None),
        num_steps=config.sampling.num_inference_steps,
        sections=list(_sections(verdict, config, requests, folder)),
        num_left_out=max(0, len(requests) - _MAX_CLIPS),
        conditions=list(_conditions(config, requests, {**asked, **conditions})),
    )


def _word(verdict: VerificationResult | Check) -> str:
    if verdict.bitwise:
        return "bitwise equal"
    return "equal within tolerance" if verdict.equal else "different"


def _sections(
    verdict: VerificationResult,
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
) -> Iterator[_Section]:
    """The sections of the first clips; clips that differ come first."""
    different = {check.clip for check in verdict.checks if not check.bitwise}
    clips = sorted(range(len(requests)), key=lambda clip: clip not in different)
    ours, theirs = both_sides(folder)
    for clip in clips[:_MAX_CLIPS]:
        strips: list[tuple[str, _Strip | None]] = []
        if not config.decodes or clip in different:
            strips.append(("Final latent", _latents_strip(config, clip, ours, theirs)))
        if config.decodes:
            sequential = theirs.frames(clip)
            frames = ours.frames(clip)
            strips.append(("Frames", _frames_strip("pipelined", frames, sequential)))
        yield _Section(title=f"Clip {clip}: {_input(requests[clip])}", strips=strips)


def _input(request: ClipRequest) -> str:
    name = f"{Path(request.image).name}, " if request.image else ""
    prompt = f"{request.prompt!r}, " if request.prompt else ""
    return f"{name}{prompt}seed {request.seed}"


def _latents_strip(
    config: PipelineConfig, clip: int, ours: TensorStore, theirs: TensorStore
) -> _Strip | None:
    """Maps of the final latents; None if they are packed, so that they have no rows."""
    num_steps, axes = config.sampling.num_inference_steps, latent_axes(config)
    if "H" not in axes:
        return None
    one, other = (side.latent(clip, num_steps).float().numpy() for side in (ours, theirs))
    difference = latent_difference(one, other)
    values, place = "", difference.largest_at
    if place is not None:
        values = f": {one[place]:.9g} against {other[place]:.9g}"
    return _strip("pipelined", difference, axes, f"{difference.largest:.3g}", values)


def _frames_strip(side: str, ours: Frames, sequential: Frames) -> _Strip:
    difference = frame_difference(ours, sequential)
    return _strip(side, difference, _FRAME_AXES, f"{difference.largest:.0f} of 255 levels", "")


def _strip(side: str, difference: DifferenceImage, axes: str, largest: str, values: str) -> _Strip:
    note = "No element differs: the maps are black."
    if difference.largest_at is not None:
        note = (
            f"{difference.num_different:,} of {difference.num_elements:,} elements differ; in the "
            "maps they are bright on black, the larger the brighter, and outlined. "
            f"Largest difference: {largest}, at {describe_index(difference.largest_at, axes)} "
            f"(index {list(difference.largest_at)}){values}."
        )
    rows = ((side, difference.ours), ("sequential", difference.theirs))
    return _Strip(
        columns=[describe_index(index, axes) for index in difference.indices],
        rows=[
            (name, [_data_url(pixels) for pixels in pictures])
            for name, pictures in (*rows, ("difference", difference.maps))
        ],
        note=note,
    )


def _data_url(pixels: Pixels) -> str:
    """The picture as PNG in a data URL."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _conditions(
    config: PipelineConfig, requests: Sequence[ClipRequest], others: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    model = config.model
    # The folder of a local checkpoint may reveal the user's name.
    is_local = Path(model.name).exists()
    yield "model", Path(model.name).name if is_local else model.name
    yield "dtype", model.dtype
    yield "device", config.device
    yield "ranks", str(config.world_size)
    yield "threads of each rank", str(config.num_threads)
    yield "clips", str(len(requests))
    sampling: dict[str, Any] = asdict(config.sampling)
    for name in ["num_inference_steps"] if model.is_dummy else sampling:
        if sampling[name] is not None:
            yield name.replace("_", " "), str(sampling[name])
    for name, value in others.items():
        yield name.replace("_", " "), str(value)
    yield "machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions().items())
    yield "written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
