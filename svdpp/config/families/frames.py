"""Checks of numbers of frames that several families share."""

from __future__ import annotations

from typing import Any

from svdpp.config.limits import require


def check_frames_from_image(_: object, sampling: Any) -> None:
    """Raise a `RequestError` if a clip from an image has only one frame.

    Specs use this function as `FamilySpec.check_sampling`.

    Args:
        sampling: Sampling parameters.

    Raises:
        RequestError: The clip starts from an image and has only one frame.
    """
    require(
        not sampling.from_image or sampling.frames > 1,
        f"`num_frames` of a clip from an image must be more than 1, got {sampling.frames}",
        frames=sampling.frames,
        above=1,
    )


def check_video_frames(sampling: Any) -> None:
    """Raise a `RequestError` unless the VAE can encode `video_frames` frames of the input video.

    The VAE can encode 1 frame, and then groups of `frames_unit` frames.

    Args:
        sampling: Sampling parameters with `video_frames`.

    Raises:
        RequestError: `video_frames` is not a multiple of `frames_unit` plus 1.
    """
    given, unit = sampling.video_frames, sampling.frames_unit
    require(
        given % unit == 1,
        f"`video_frames` must be a multiple of {unit} plus 1, got {given}",
        video_frames=given,
        unit=unit,
        remainder=1,
    )
