"""Finished clips without a model: real files with the metadata of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from svdpp.config import ModelConfig, OutputConfig, PipelineConfig, SvdSampling, VideoFormat
from svdpp.media import output_files, video
from svdpp.media.inputs import ClipInput, read_photo
from svdpp.models.checkpoint import find_checkpoint
from svdpp.worker.clip_metadata import clip_metadata
from tests.cli.shell import PHOTO

SHAPE = (3, 32, 48, 3)


def frames_of(seed: int) -> video.Frames:
    """Smooth frames that differ by seed and from one to the next."""
    y, x = np.mgrid[: SHAPE[1], : SHAPE[2]]
    pictures = [
        np.stack([x * 3 + 20 * seed, y * 5, 40 * seed + 30 * index + 0 * x], -1)
        for index in range(SHAPE[0])
    ]
    return np.stack(pictures).clip(0, 255).astype(np.uint8)


def put_clip(
    folder: Path,
    name: str,
    format: VideoFormat = "mp4",
    *,
    seed: int = 1,
    frames: video.Frames | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Writes a clip as the clip writer does; returns its JSON.

    Args:
        seed: of the frames that the metadata describes.
        frames: in the file; None: those of `seed`.
        changes: to the metadata, also inside the file.
    """
    pixels = frames_of(seed)
    sampling = SvdSampling(
        num_inference_steps=2, height=32, width=48, num_frames=3, decode_chunk_size=3
    )
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)
    output = OutputConfig(path=str(folder / f"{name}{video.SUFFIXES[format]}"), format=format)
    _, photo = read_photo(Path(PHOTO))
    record = clip_metadata(ClipInput(photo), seed, output, config, find_checkpoint(config.model))
    latent = hashlib.sha256(bytes([seed])).hexdigest()
    record |= {"latents_sha256": latent, "frames_sha256": video.frames_sha256(pixels), **changes}
    shown = pixels if frames is None else frames
    record["file_sha256"] = video.write_clip(shown, output, fps=7, metadata=record)
    write_json(output, record)
    return record


def write_json(output: OutputConfig, record: Mapping[str, Any]) -> None:
    """The JSON beside a clip's file."""
    output_files.write_json(Path(output.json_path), record)
