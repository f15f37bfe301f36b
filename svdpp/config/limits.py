"""The upper limits of a request; docs/security.md lists them.

The limits are far above any use of Stable Video Diffusion. They stop hostile or mistyped requests
before any work. `driver.resolve` checks whether a run fits in the machine's memory. The ranges of
sampling parameters are in `config.sampling`.
"""

from __future__ import annotations

import math
import os
from typing import Any

from svdpp.errors import RequestError

#: Denoising steps; SVD was trained with 1000 noise levels, so more steps gain nothing.
MAX_STEPS = 1000
#: torch.Generator.manual_seed takes 64 bits and maps negative seeds to positive ones.
MAX_SEED = 2**63 - 1
#: Frames of a clip; SVD-XT was trained for 25.
MAX_FRAMES = 1024
#: Height and width of a frame, in pixels; SVD-XT was trained at 576 x 1024.
MAX_SIDE = 4096
#: Height x width x frames; enough for 25 frames of 4096 x 2304.
MAX_CLIP_PIXELS = 2**28
#: Weight of a LoRA, whose sign may be negative; usual are 0.5 to 1.
MAX_LORA_WEIGHT = 100.0
#: Characters of a prompt's text.
MAX_PROMPT_CHARACTERS = 20_000
#: Pixels of an image that clips are made from, in millions.
MAX_MEGAPIXELS = 50
#: Of an image beyond which others go first while it is prepared.
LARGE_MEGAPIXELS = 4
#: Clips of one request: number of images x number of seeds.
MAX_CLIPS = 100_000
#: Intra-op threads of a rank for each core of this machine. More than 1, so that `verify` can
#: reproduce the bits of a clip from a machine with more cores.
MAX_THREADS_PER_CORE = 16
#: Elements of the dummy model's latent.
MAX_LATENT_ELEMENTS = 2**28
#: Seconds of any timeout: a week, as the timeout of the process group (`launch.process_group`).
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0
#: The index in `cuda:N`.
MAX_CUDA_INDEX = 1023


def max_threads() -> int:
    """The largest number of intra-op threads of a rank on this machine."""
    return MAX_THREADS_PER_CORE * (os.cpu_count() or 1)


def require(condition: bool, message: str, hint: str = "") -> None:
    """Raise RequestError with `message` and `hint` unless `condition` is true."""
    if not condition:
        raise RequestError(message, hint)


def check_whole(name: str, value: Any, low: int, high: int, where: str = "") -> None:
    """Refuse a value that is not an int from `low` to `high`; `True` and `2.0` are not ints.

    The message names it as the user does, such as `--steps`; `where` follows the limits.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and low <= value <= high):  # the message takes long, for 100,000 clips
        what = "" if is_whole else "a whole number, "
        raise RequestError(f"{name} must be {what}{low} to {high}{where}, got {shown(value)}")


def check_seconds(name: str, value: Any) -> None:
    """Refuse a value that is not a number of seconds above 0, at most a week."""
    require(
        is_number(value) and 0 < value <= MAX_TIMEOUT_SECONDS,
        f"{name} must be above 0 and at most {MAX_TIMEOUT_SECONDS:.0f} s, got {shown(value)}",
    )


def check_type(name: str, value: Any, *types: type) -> None:
    """Refuse a value whose type is not one of `types`; `type(None)` allows None."""
    if type(value) not in types:
        names = " or ".join("null" if each is type(None) else each.__name__ for each in types)
        raise RequestError(f"{name} must be {names}, got {shown(value)}")


def check_seed(seed: Any) -> None:
    """Refuse a value that is not a seed of noise."""
    is_whole = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_whole and 0 <= seed <= MAX_SEED, f"a seed must be 0 to 2^63 - 1, got {shown(seed)}")


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def shown(value: Any) -> str:
    """`value` as text for a message, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert an int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
