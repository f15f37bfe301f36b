"""Owns the upper limits of a request, and the checks that hold a value against them.

Every limit lies far above the use that Stable Video Diffusion has for it. They keep a request that
is hostile, or has a digit too many, from occupying the machine: whoever makes the request (options,
a bench's YAML, a clip's JSON, Python), the same dataclasses check it before any work. Whether a run
within the limits fits in this machine's memory is checked apart, in `driver.memory_check`.

docs/security.md lists the limits; a test compares the list with this file.
"""

from __future__ import annotations

import math
import os
from typing import Any

from svdpp.errors import RequestError

#: Denoising steps: SVD was trained with 1000 noise levels, so more steps tell nothing apart.
MAX_STEPS = 1000
#: Frames of a clip; SVD-XT was trained for 25.
MAX_FRAMES = 1024
#: Height and width of a frame, in pixels; SVD-XT was trained at 576 x 1024.
MAX_SIDE = 4096
#: Height x width x frames: 25 frames of 4096 x 2304 are within it.
MAX_CLIP_PIXELS = 2**28
#: Classifier-free guidance; SVD's default is 1 to 3.
MAX_GUIDANCE_SCALE = 100.0
#: Noise added to the image, as a multiple of the image's own range; SVD's default is 0.02.
MAX_NOISE_AUG_STRENGTH = 10.0
MAX_FPS = 240
MAX_MOTION_BUCKET_ID = 1023
#: Clips of one request: images x seeds.
MAX_CLIPS = 100_000
#: Intra-op threads of a rank, for each core of this machine. A clip made with more threads than
#: this machine has cores can so still be recomputed here, slowly, to the same bits.
MAX_THREADS_PER_CORE = 16
#: Elements of the dummy model's latent.
MAX_LATENT_ELEMENTS = 2**28
#: Any timeout: a week, which is also the process group's own (`launch.process_group`).
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0
#: The index in `cuda:N`.
MAX_CUDA_INDEX = 1023


def max_threads() -> int:
    """The most intra-op threads of a rank on this machine."""
    return MAX_THREADS_PER_CORE * (os.cpu_count() or 1)


def require(condition: bool, message: str, hint: str = "") -> None:
    """Raises RequestError with `message` and `hint` unless `condition` holds."""
    if not condition:
        raise RequestError(message, hint)


def check_whole(name: str, value: Any, low: int, high: int, unit: str = "") -> None:
    """Refuses what is not a whole number from `low` to `high`; `True` and `2.0` are none.

    Args:
        name: as the user knows the value, such as `--steps`.
        value: of any type.
        low: the smallest value allowed.
        high: the largest value allowed.
        unit: what follows the limits in the message, with a leading space; mostly nothing.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    what = "" if is_whole else "a whole number, "
    message = f"{name} must be {what}{low} to {high}{unit}, got {shown(value)}"
    require(is_whole and low <= value <= high, message)


def check_number(name: str, value: Any, high: float) -> None:
    """Refuses what is not a finite number from 0 to `high`."""
    require(
        is_number(value) and 0 <= value <= high,
        f"{name} must be a finite number, 0 to {high:g}, got {shown(value)}",
    )


def check_seconds(name: str, value: Any) -> None:
    """Refuses what is not a number of seconds above 0, a week at most."""
    require(
        is_number(value) and 0 < value <= MAX_TIMEOUT_SECONDS,
        f"{name} must be above 0, {MAX_TIMEOUT_SECONDS:.0f} s at most, got {shown(value)}",
    )


def check_type(name: str, value: Any, *types: type) -> None:
    """Refuses a value of another type than one of `types`; None is meant by `type(None)`."""
    names = " or ".join("null" if each is type(None) else each.__name__ for each in types)
    require(type(value) in types, f"{name} must be {names}, got {shown(value)}")


def check_num_clips(number: Any, name: str = "--clips") -> None:
    """Refuses a number of clips that is not 1 to `MAX_CLIPS`."""
    check_whole(name, number, 1, MAX_CLIPS)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out a number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
