"""Owns two sides beside each other: a few of their pictures, and where they differ, amplified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from svdpp.media.video import Frames

Pixels = npt.NDArray[np.uint8]

_MAX_SIDE = 512


@dataclass(frozen=True, kw_only=True)
class DifferenceImage:
    """The first, middle and last picture of two sides, and the one that differs most.

    Args:
        indices: of the pictures, rising.
        ours: one for each index, shape (H, W) or (H, W, 3).
        theirs: the same of the other side.
        differences: shape (H, W), each pixel's largest difference; white is `largest`.
        largest: difference over all pictures, shown ones or not, in the pictures' own numbers.
        factor: by which the differences are amplified; 0 where there is none.
    """

    indices: list[int]
    ours: list[Pixels]
    theirs: list[Pixels]
    differences: list[Pixels]
    largest: float
    factor: float


def frame_difference(ours: Frames, theirs: Frames) -> DifferenceImage:
    """Two clips' frames, uint8, shape (F, H, W, 3)."""
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max(axis=-1)
    return _difference_image(ours, theirs, difference.astype(np.float64), white=255.0)


def latent_difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> DifferenceImage:
    """Two latents, floating-point, shape (..., H, W): each plane in grey, zero in the middle."""
    # What is not a number is as far from every number as can be shown: at the largest there is.
    one, other = (_finite(side.reshape(-1, *side.shape[-2:])) for side in (ours, theirs))
    scale = max(float(np.abs(one).max()), float(np.abs(other).max())) or 1.0
    return _difference_image(
        _grey(one, scale), _grey(other, scale), np.abs(one - other), white=2 * scale
    )


def _grey(side: npt.NDArray[np.float64], scale: float) -> Pixels:
    return ((side / scale + 1) * 127.5).astype(np.uint8)


def _finite(side: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = side.astype(np.float64)
    known = np.abs(wide[np.isfinite(wide)])
    limit = float(known.max()) if known.size else 1.0
    return np.nan_to_num(wide, nan=limit, posinf=limit, neginf=-limit)


def _difference_image(
    ours: Pixels, theirs: Pixels, difference: npt.NDArray[np.float64], white: float
) -> DifferenceImage:
    largest = float(difference.max())
    count = len(difference)
    chosen = {0, count // 2, count - 1}
    if largest > 0:
        chosen.add(int(difference.max(axis=(1, 2)).argmax()))
    indices = sorted(chosen)
    maps = [np.ceil(difference[i] / (largest or 1.0) * 255).astype(np.uint8) for i in indices]
    return DifferenceImage(
        indices=indices,
        ours=[_smaller(ours[index]) for index in indices],
        theirs=[_smaller(theirs[index]) for index in indices],
        differences=[_smaller(each, brightest=True) for each in maps],
        largest=largest,
        factor=white / largest if largest else 0.0,
    )


def _smaller(pixels: Pixels, *, brightest: bool = False) -> Pixels:
    """`pixels` with no side above 512: each block's mean, or its brightest, lest one be lost."""
    block = -(-max(pixels.shape[:2]) // _MAX_SIDE)
    rest = [(0, -side % block) for side in pixels.shape[:2]]
    whole = np.pad(pixels, [*rest, *[(0, 0)] * (pixels.ndim - 2)], mode="edge")
    height, width = (side // block for side in whole.shape[:2])
    blocks = whole.reshape(height, block, width, block, *pixels.shape[2:])
    smaller = blocks.max(axis=(1, 3)) if brightest else blocks.mean(axis=(1, 3)).round()
    return np.asarray(smaller, dtype=np.uint8)
