"""The pictures of a difference: planes of both sides, and maps of where they differ.

A difference of one ULP in one element is invisible in the pictures themselves. The map shows every
element that differs bright on black, and outlines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from svdpp.media.video import Frames

Pixels = npt.NDArray[np.uint8]

#: The longest side of a picture in pixels; pictures are scaled to about this size.
_SIDE = 256
# The brightness of the smallest difference.
_DIMMEST = 110
_OUTLINE = (255, 82, 82)
_MARGIN = 5
# Up to this number of differing elements each has its own outline; more share one.
_MAX_OUTLINES = 24


@dataclass(frozen=True, kw_only=True)
class DifferenceImage:
    """Planes of two tensors of one shape (..., H, W), with maps of their differences.

    Args:
        indices: of the planes shown, in the axes before H and W: the first, middle and last plane,
            and the one with the largest difference.
        ours: one picture for each index, shape (h, w) or (h, w, 3), no side above 256 pixels.
        theirs: the same for the other side.
        maps: shape (h, w, 3): black where both are equal, brighter for larger differences.
        num_different: number of elements that differ, in all planes.
        num_elements: number of elements, in all planes.
        largest: the largest difference of two elements.
        largest_at: index of these elements, in all axes; None if nothing differs.
    """

    indices: list[tuple[int, ...]]
    ours: list[Pixels]
    theirs: list[Pixels]
    maps: list[Pixels]
    num_different: int
    num_elements: int
    largest: float
    largest_at: tuple[int, ...] | None


def frame_difference(ours: Frames, theirs: Frames) -> DifferenceImage:
    """The difference of two clips' frames, uint8, shape (F, H, W, 3); a plane is a frame."""
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).astype(np.float64)
    return _difference_image(ours, theirs, difference, difference > 0, num_plane_axes=3)


def latent_difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> DifferenceImage:
    """The difference of two floating-point latents, shape (..., H, W); zero is middle grey."""
    bits = np.dtype(f"u{ours.itemsize}")
    differs = np.ascontiguousarray(ours).view(bits) != np.ascontiguousarray(theirs).view(bits)
    # NaN and infinity are shown as the largest finite magnitude.
    one, other = _finite(ours), _finite(theirs)
    scale = max(float(np.abs(one).max()), float(np.abs(other).max())) or 1.0
    return _difference_image(
        _grey(one, scale), _grey(other, scale), np.abs(one - other), differs, num_plane_axes=2
    )


def _grey(side: npt.NDArray[np.float64], scale: float) -> Pixels:
    return ((side / scale + 1) * 127.5).astype(np.uint8)


def _finite(side: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = side.astype(np.float64)
    known = np.abs(wide[np.isfinite(wide)])
    limit = float(known.max()) if known.size else 1.0
    return np.nan_to_num(wide, nan=limit, posinf=limit, neginf=-limit)


def _difference_image(
    ours: Pixels,
    theirs: Pixels,
    difference: npt.NDArray[np.float64],
    differs: npt.NDArray[np.bool_],
    *,
    num_plane_axes: int,
) -> DifferenceImage:
    """The last `num_plane_axes` axes form a plane: height, width, and colour for frames."""
    axes = ours.shape[:-num_plane_axes]
    planes = [side.reshape(-1, *side.shape[-num_plane_axes:]) for side in (ours, theirs)]
    # If bits differ but numbers do not, such as 0 and -0, the first such element is the largest.
    weight = np.where(differs, difference + np.finfo(np.float64).tiny, 0.0)
    place = np.unravel_index(int(weight.argmax()), weight.shape) if differs.any() else None
    shown = _shown(len(planes[0]), place, axes)
    largest = float(difference.max())
    strength = np.where(differs, _DIMMEST + (255 - _DIMMEST) * difference / (largest or 1.0), 0.0)
    strength = strength.reshape(planes[0].shape)
    if num_plane_axes == 3:
        strength = strength.max(axis=-1)
    return DifferenceImage(
        indices=[tuple(int(i) for i in np.unravel_index(plane, axes)) for plane in shown],
        ours=[_scaled(planes[0][plane]) for plane in shown],
        theirs=[_scaled(planes[1][plane]) for plane in shown],
        maps=[_map(strength[plane]) for plane in shown],
        num_different=int(differs.sum()),
        num_elements=differs.size,
        largest=largest,
        largest_at=None if place is None else tuple(int(i) for i in place),
    )


def _shown(count: int, place: Sequence[Any] | None, axes: tuple[int, ...]) -> list[int]:
    """The numbers of the planes to show, ascending."""
    chosen = {0, count // 2, count - 1}
    if place is not None:
        chosen.add(int(np.ravel_multi_index(tuple(place[: len(axes)]), axes)))
    return sorted(chosen)


def _map(strength: npt.NDArray[np.float64]) -> Pixels:
    """A plane's map in colour, with outlines around the elements that differ."""
    grey = _scaled(np.ceil(strength).astype(np.uint8), brightest=True)
    picture = np.repeat(grey[:, :, None], 3, axis=2)
    places = np.argwhere(grey > 0)
    if not len(places):
        return picture
    size = _factor(strength.shape)
    corners = np.unique(places // size * size, axis=0)
    outline = np.zeros(grey.shape, bool)
    if len(corners) > _MAX_OUTLINES:
        _outline(outline, places.min(axis=0), places.max(axis=0) + 1)
    else:
        for corner in corners:
            _outline(outline, corner, corner + size)
    picture[outline & (grey == 0)] = _OUTLINE
    return picture


def _outline(mask: npt.NDArray[np.bool_], start: Any, end: Any) -> None:
    """Draws a box around rows and columns `start` to `end`, clipped to the picture."""
    top, left = np.maximum(start - _MARGIN, 0)
    bottom, right = np.minimum(end + _MARGIN, mask.shape) - 1
    mask[[top, bottom], left : right + 1] = True
    mask[top : bottom + 1, [left, right]] = True


def _factor(shape: Sequence[int]) -> int:
    """The factor by which a picture of this height and width is enlarged."""
    return max(1, _SIDE // max(shape[:2]))


def _scaled(pixels: Pixels, *, brightest: bool = False) -> Pixels:
    """`pixels` with a longest side near 256, enlarged or reduced by an integer factor.

    A reduced pixel is the mean of its block, or with `brightest` the maximum, so that no
    difference is lost.
    """
    factor = _factor(pixels.shape)
    if factor > 1:
        return pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    block = -(-max(pixels.shape[:2]) // _SIDE)
    rest = [(0, -side % block) for side in pixels.shape[:2]]
    whole = np.pad(pixels, [*rest, *[(0, 0)] * (pixels.ndim - 2)], mode="edge")
    height, width = (side // block for side in whole.shape[:2])
    blocks = whole.reshape(height, block, width, block, *pixels.shape[2:])
    smaller = blocks.max(axis=(1, 3)) if brightest else blocks.mean(axis=(1, 3)).round()
    return np.asarray(smaller, dtype=np.uint8)
