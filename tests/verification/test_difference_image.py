"""Differences are found and shown at their place, however small they are."""

from __future__ import annotations

import numpy as np
import pytest

from svdpp.verification.difference_image import (
    DifferenceImage,
    Pixels,
    frame_difference,
    latent_difference,
)

OUTLINE = np.array([255, 82, 82])


def _bright(picture: Pixels) -> list[list[int]]:
    """The bright pixels of a map, without the outlines."""
    is_outline = (picture == OUTLINE).all(-1)
    return np.argwhere((picture.max(-1) > 0) & ~is_outline).tolist()


def _outlined(difference: DifferenceImage) -> list[bool]:
    return [bool((picture == OUTLINE).all(-1).any()) for picture in difference.maps]


def test_equal_sides_have_black_maps() -> None:
    frames = np.full((5, 4, 6, 3), 7, np.uint8)
    difference = frame_difference(frames, frames.copy())

    assert difference.indices == [(0,), (2,), (4,)]
    assert (difference.num_different, difference.largest, difference.largest_at) == (0, 0.0, None)
    assert not np.any(difference.maps)
    assert np.array_equal(difference.ours, difference.theirs)


def test_the_frame_that_differs_most_is_among_those_shown() -> None:
    ours = np.zeros((9, 128, 256, 3), np.uint8)
    theirs = ours.copy()
    theirs[3, 40, 50, 0], theirs[8, 100, 9, 1] = 2, 1
    difference = frame_difference(ours, theirs)

    assert difference.indices == [(0,), (3,), (4,), (8,)]
    assert (difference.largest, difference.largest_at) == (2.0, (3, 40, 50, 0))
    assert (difference.num_different, difference.num_elements) == (2, 9 * 128 * 256 * 3)
    assert [_bright(picture) for picture in difference.maps] == [[], [[40, 50]], [], [[100, 9]]]
    assert difference.maps[1][40, 50].tolist() == [255] * 3
    assert difference.maps[3][100, 9].tolist() == [183] * 3, "dimmer, and not dim"
    assert _outlined(difference) == [False, True, False, True]


def test_a_small_plane_is_enlarged_and_its_one_pixel_outlined() -> None:
    ours = np.zeros((1, 2, 3, 16, 16), np.float32)
    theirs = ours.copy()
    theirs[0, 1, 0, 7, 9] = np.nextafter(np.float32(0), np.float32(1))
    difference = latent_difference(ours, theirs)

    assert difference.indices == [(0, 0, 0), (0, 1, 0), (0, 1, 2)]
    assert difference.largest_at == (0, 1, 0, 7, 9)
    picture = difference.maps[1]
    assert picture.shape == (256, 256, 3)
    square = [[row, column] for row in range(112, 128) for column in range(144, 160)]
    assert _bright(picture) == square, "16 x 16 pixels for one"
    box = np.argwhere((picture == OUTLINE).all(-1))
    assert (box.min(0).tolist(), box.max(0).tolist()) == ([107, 139], [132, 164])


def test_one_pixel_is_not_lost_where_pictures_are_made_smaller() -> None:
    ours = np.zeros((1, 700, 1030, 3), np.uint8)
    theirs = ours.copy()
    theirs[0, 699, 1029] = 1
    difference = frame_difference(ours, theirs)

    (shown,), (picture,) = difference.ours, difference.maps
    assert shown.shape == picture.shape == (140, 206, 3)
    assert _bright(picture) == [[139, 205]]
    assert _outlined(difference) == [True]


def test_an_outline_follows_the_edge_of_the_picture() -> None:
    ours = np.zeros((1, 1, 16, 16), np.float32)
    theirs = ours.copy()
    theirs[0, 0, 0, 15] = 1
    (picture,) = latent_difference(ours, theirs).maps
    box = np.argwhere((picture == OUTLINE).all(-1))
    assert (box.min(0).tolist(), box.max(0).tolist()) == ([0, 235], [20, 255])


def test_many_differences_share_an_outline() -> None:
    ours = np.zeros((1, 256, 256, 3), np.uint8)
    theirs = ours.copy()
    theirs[0, 50:100, 60:200] = 9
    (picture,) = frame_difference(ours, theirs).maps
    box = np.argwhere((picture == OUTLINE).all(-1))
    assert (box.min(0).tolist(), box.max(0).tolist()) == ([45, 55], [104, 204])
    assert len(box) == 2 * (60 + 150) - 4


def test_latents_are_planes_in_grey_with_zero_in_the_middle() -> None:
    ours = np.zeros((1, 2, 3, 2, 2), np.float32)
    ours[0, 0, 0] = [[-1.0, 0.0], [0.5, 1.0]]
    theirs = ours.copy()
    theirs[0, 1, 0, 0, 1] += 1e-6
    difference = latent_difference(ours, theirs)

    assert difference.indices == [(0, 0, 0), (0, 1, 0), (0, 1, 2)]
    assert difference.ours[0][::128, ::128].tolist() == [[0, 127], [191, 255]]
    assert difference.largest == pytest.approx(1e-6)
    assert difference.largest_at == (0, 1, 0, 0, 1)


def test_what_is_no_number_is_shown_as_the_largest_difference() -> None:
    ours = np.array([[[1.0, -2.0]]])
    difference = latent_difference(ours, np.array([[[np.nan, -2.0]]]))
    assert difference.largest_at == (0, 0, 0)
    assert difference.num_different == 1


def test_bits_that_differ_and_numbers_that_do_not_are_shown() -> None:
    difference = latent_difference(np.zeros((1, 2, 2)), np.array([[[0.0, 0.0], [-0.0, 0.0]]]))
    assert (difference.num_different, difference.largest) == (1, 0.0)
    assert difference.largest_at == (0, 1, 0)
    assert _outlined(difference) == [True]


def test_two_sides_without_a_number_are_drawn_all_the_same() -> None:
    difference = latent_difference(np.full((1, 2, 2), np.nan), np.zeros((1, 2, 2)))
    assert difference.num_different == 4
