"""PSNR and largest difference, of a whole clip and of each frame."""

from __future__ import annotations

import math

import numpy as np
import pytest

from svdpp.media.distance import Difference, distance

CLIP = np.random.default_rng(0).integers(0, 250, (3, 4, 5, 3), dtype=np.uint8)


def test_equal_clips_have_no_distance() -> None:
    apart = distance(CLIP, CLIP.copy())
    assert apart.whole == Difference(math.inf, 0)
    assert apart.to_json()["psnr_db"] is None
    assert str(apart.whole) == "every pixel equal"


def test_one_level_everywhere_is_48_db() -> None:
    apart = distance(CLIP + 1, CLIP)
    assert apart.whole.psnr_db == pytest.approx(20 * math.log10(255))
    assert apart.whole.max_levels == 1
    assert str(apart.whole) == "48.1 dB, 1 level at most"


def test_the_largest_difference_there_is() -> None:
    black, white = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 255, np.uint8)
    assert distance(black, white).whole == Difference(0.0, 255)


def test_a_frame_that_differs_alone() -> None:
    other = CLIP.copy()
    other[1, 0, 0, 0] += 5
    apart = distance(other, CLIP)
    assert [each.max_levels for each in apart.frames] == [0, 5, 0]
    one = 10 * math.log10(255**2 / (25 / 60))
    assert apart.frames[1].psnr_db == pytest.approx(one)
    # The error of one frame is averaged over three frames.
    assert apart.whole.psnr_db == pytest.approx(one + 10 * math.log10(3))
    assert [each["psnr_db"] for each in apart.to_json()["frames"]] == [None, round(one, 2), None]


def test_clips_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="against"):
        distance(CLIP, CLIP[:2])
