"""The visible difference between the frames of two clips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEVELS = 255
_Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Difference:
    """The difference of one frame, or of all frames.

    Args:
        psnr_db: peak signal-to-noise ratio of the 8-bit colours; infinite if all are equal.
        max_levels: the largest difference of one colour, in 8-bit levels.
    """

    psnr_db: float
    max_levels: int

    def to_json(self) -> dict[str, Any]:
        """The values for JSON; None for an infinite PSNR, which JSON cannot represent."""
        finite = math.isfinite(self.psnr_db)
        return {
            "psnr_db": round(self.psnr_db, 2) if finite else None,
            "max_levels": self.max_levels,
        }

    def __str__(self) -> str:
        if self.max_levels == 0:
            return "every pixel equal"
        levels = f"{self.max_levels} level{'s' if self.max_levels > 1 else ''}"
        return f"{self.psnr_db:.1f} dB, {levels} at most"


@dataclass(frozen=True)
class Distance:
    """The difference of two clips, over all frames and for each frame."""

    whole: Difference
    frames: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """The values for JSON: those of all frames, and those of each frame as `frames`."""
        return {**self.whole.to_json(), "frames": [each.to_json() for each in self.frames]}


def distance(ours: _Frames, theirs: _Frames) -> Distance:
    """Compare two clips, uint8 of shape (F, H, W, 3)."""
    if ours.shape != theirs.shape:
        raise ValueError(f"frames {ours.shape} against {theirs.shape}")
    pairs = zip(ours, theirs, strict=True)  # by frame, because int16 takes twice the memory
    parts = [_compare(one.astype(np.int16) - other.astype(np.int16)) for one, other in pairs]
    mean_square = float(np.mean([part[0] for part in parts]))
    largest = max(part[1] for part in parts)
    frames = tuple(Difference(_psnr(square), most) for square, most in parts)
    return Distance(Difference(_psnr(mean_square), largest), frames)


def _compare(difference: NDArray[np.int16]) -> tuple[float, int]:
    """Mean square and largest absolute value."""
    return float(np.square(difference, dtype=np.int32).mean()), int(np.abs(difference).max())


def _psnr(mean_square: float) -> float:
    return 10 * math.log10(_LEVELS**2 / mean_square) if mean_square else math.inf
