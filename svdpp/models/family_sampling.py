"""Owns the checks of sampling parameters that several families share; knows no torch."""

from __future__ import annotations

from typing import Protocol

from svdpp.config.limits import require
from svdpp.errors import RequestError


class Modes(Protocol):
    """What a checkpoint can animate."""

    @property
    def text_to_video(self) -> bool:
        """Whether it runs without an image."""
        ...

    @property
    def image_to_video(self) -> bool:
        """Whether it runs with an image."""
        ...


class Request(Protocol):
    """The part of a clip's request that the model reads."""

    @property
    def seed(self) -> int:
        """Of the noise."""
        ...

    @property
    def prompt(self) -> str | None:
        """What the clip shows."""
        ...

    @property
    def negative_prompt(self) -> str | None:
        """What it does not show; None: an empty text."""
        ...


def check_mode(checkpoint: Modes, *, has_image: bool) -> None:
    """RequestError if the model needs an image and there is none, or the other way round."""
    if has_image:
        require(
            checkpoint.image_to_video,
            "the model makes videos from text alone, but an image was given",
            "omit the image, or use an image-to-video model",
        )
    else:
        require(
            checkpoint.text_to_video,
            "the model animates an image, but none was given",
            "give an image, or use a text-to-video model",
        )


def check_prompt(request: Request, guidance_scale: float) -> None:
    """RequestError if there is no prompt, or a negative one that would have no effect."""
    prompt, negative = request.prompt, request.negative_prompt
    require(prompt is not None and bool(prompt.strip()), "the prompt is empty", '--prompt "..."')
    require(
        not negative or guidance_scale > 1,
        "--negative-prompt has no effect: --guidance-scale of 1 or less turns guidance off",
    )


def check_frames(num_frames: int, factor: int) -> None:
    """RequestError unless `num_frames` is a multiple of `factor` plus 1."""
    if (num_frames - 1) % factor == 0 and num_frames >= 1:
        return
    lower = max(num_frames - 1, 0) // factor * factor + 1
    raise RequestError(
        f"--frames must be a multiple of {factor} plus 1, got {num_frames}",
        f"--frames {lower} or --frames {lower + factor}",
    )


def check_multiple(name: str, value: int, multiple: int) -> None:
    """RequestError unless `value` is a multiple of `multiple`."""
    if value % multiple == 0 and value > 0:
        return
    lower = value // multiple * multiple
    nearest = [size for size in (lower, lower + multiple) if size > 0]
    raise RequestError(
        f"{name} must be a multiple of {multiple}, got {value}",
        " or ".join(f"{name} {size}" for size in nearest),
    )
