"""The picture of a proof: frames or latents of both runs, and where they differ."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from svdpp.config import PipelineConfig
from svdpp.media import output_files
from svdpp.models.base import Frames
from svdpp.verification.result import VerificationResult
from svdpp.verification.verify import both_sides, latent_axes

# A difference has this brightness or more, so that one ULP is visible, and covers this many pixels.
_DIMMEST, _DOT = 128, 5
_SMALLEST = 128  # pixels of a picture's shorter side
_TITLE = 16


def draw_differences(
    path: Path, verdict: VerificationResult, config: PipelineConfig, folder: Path
) -> None:
    """Draws the first clip that differs, or else the first: pipelined, sequential, difference.

    It has the first, the middle and the last frame, and the one that differs most. Differences are
    bright on black, the larger the brighter. Clips that are not decoded show planes of the final
    latent.

    Args:
        folder: where both runs have kept their tensors.
    """
    different = verdict.first_difference
    clip = 0 if different is None else different.clip
    ours, theirs = both_sides(folder)
    if config.decodes:
        pictures, expected = ours.frames(clip), theirs.frames(clip)
        difference = np.abs(pictures.astype(np.float64) - expected).max(-1)
    else:
        num_steps = config.sampling.num_inference_steps
        planes = [_planes(side.latent(clip, num_steps), config) for side in (ours, theirs)]
        difference = np.abs(planes[0] - planes[1])
        pictures, expected = (_grey(plane) for plane in planes)
    difference = np.nan_to_num(difference, nan=np.inf)
    worst = int(difference.max((1, 2)).argmax())
    last = len(difference) - 1
    columns = sorted({0, last // 2, last, worst})
    rows = {"pipelined": pictures, "sequential": expected, "difference": _maps(difference)}
    with output_files.atomic_output(str(path), ".png") as temporary:
        _sheet(f"clip {clip}", rows, columns).save(temporary, "PNG")


def _planes(latent: torch.Tensor, config: PipelineConfig) -> np.ndarray:
    """Planes of rows and columns; a packed latent is one plane."""
    has_rows = "H" in latent_axes(config)
    planes = latent.double().flatten(0, -3) if has_rows else latent.double().flatten(0, -2)[None]
    return planes.numpy()


def _grey(planes: np.ndarray) -> Frames:
    known = np.nan_to_num(planes, posinf=0.0, neginf=0.0)
    spread = known.max() - known.min() or 1.0
    levels = (255 * ((known - known.min()) / spread)).astype(np.uint8)
    return np.repeat(levels[..., None], 3, axis=-1)


def _maps(difference: np.ndarray) -> Frames:
    largest = difference[np.isfinite(difference)].max(initial=0.0) or 1.0
    share = np.minimum(difference / largest, 1.0)
    levels = np.where(difference > 0, _DIMMEST + (255 - _DIMMEST) * share, 0).astype(np.uint8)
    return np.repeat(levels[..., None], 3, axis=-1)


def _sheet(title: str, rows: dict[str, Frames], columns: list[int]) -> Image.Image:
    height, width = next(iter(rows.values())).shape[1:3]
    scale = max(1, -(-_SMALLEST // min(height, width)))
    across, down = width * scale, height * scale
    sheet = Image.new("RGB", (across * len(columns), (down + _TITLE) * len(rows)), "white")
    text = ImageDraw.Draw(sheet)
    places = itertools.product(enumerate(rows.items()), enumerate(columns))
    for (row, (name, pictures)), (column, index) in places:
        left, top = column * across, row * (down + _TITLE)
        picture = Image.fromarray(pictures[index]).resize((across, down), Image.Resampling.NEAREST)
        if name == "difference":
            picture = picture.filter(ImageFilter.MaxFilter(_DOT))
        sheet.paste(picture, (left, top + _TITLE))
        text.text((left + 2, top), f"{title}, {name}, {index}", "black")
    return sheet
