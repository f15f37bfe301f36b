"""Differences are found wherever they are, and shown at their place, however small."""

from __future__ import annotations

import numpy as np
import pytest

from svdpp.verification.difference_image import frame_difference, latent_difference


def test_equal_sides_have_black_maps() -> None:
    frames = np.full((5, 4, 6, 3), 7, np.uint8)
    contrast = frame_difference(frames, frames.copy())

    assert (contrast.indices, contrast.largest, contrast.factor) == ([0, 2, 4], 0.0, 0.0)
    assert not np.any(contrast.differences)
    assert np.array_equal(contrast.ours, contrast.theirs)


def test_the_frame_that_differs_most_is_among_those_shown() -> None:
    ours = np.zeros((9, 4, 6, 3), np.uint8)
    theirs = ours.copy()
    theirs[3, 1, 2, 0], theirs[8, 0, 0, 1] = 2, 1
    contrast = frame_difference(ours, theirs)

    assert contrast.indices == [0, 3, 4, 8]
    assert (contrast.largest, contrast.factor) == (2.0, 127.5)
    expected = np.zeros((4, 4, 6), np.uint8)
    expected[1, 1, 2], expected[3, 0, 0] = 255, 128
    assert np.array_equal(contrast.differences, expected)


def test_one_pixel_is_not_lost_where_pictures_are_made_smaller() -> None:
    ours = np.zeros((1, 700, 1030, 3), np.uint8)
    theirs = ours.copy()
    theirs[0, 699, 1029] = 1
    contrast = frame_difference(ours, theirs)

    (shown,), (difference,) = contrast.ours, contrast.differences
    assert shown.shape == (234, 344, 3)
    assert difference.shape == (234, 344)
    assert np.argwhere(difference).tolist() == [[233, 343]]
    assert difference.max() == 255


def test_latents_are_planes_in_grey_with_zero_in_the_middle() -> None:
    ours = np.zeros((1, 2, 3, 2, 2), np.float32)
    ours[0, 0, 0] = [[-1.0, 0.0], [0.5, 1.0]]
    theirs = ours.copy()
    theirs[0, 1, 0, 0, 1] += 1e-6
    contrast = latent_difference(ours, theirs)

    assert contrast.indices == [0, 3, 5]
    assert contrast.ours[0].tolist() == [[0, 127], [191, 255]]
    assert contrast.differences[1].tolist() == [[0, 255], [0, 0]]
    assert contrast.largest == pytest.approx(1e-6)
    assert contrast.factor == pytest.approx(2e6)


def test_what_is_no_number_is_shown_as_the_largest_difference() -> None:
    ours = np.array([[[1.0, -2.0]]])
    contrast = latent_difference(ours, np.array([[[np.nan, -2.0]]]))

    assert contrast.differences[0].tolist() == [[255, 0]]


def test_two_sides_without_a_number_are_drawn_all_the_same() -> None:
    contrast = latent_difference(np.full((1, 2, 2), np.nan), np.zeros((1, 2, 2)))
    assert contrast.differences[0].tolist() == [[255, 255], [255, 255]]
