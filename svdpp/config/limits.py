"""The upper limits of a request, and what a parameter is; docs/security.md lists the limits.

The limits are far above any use of Stable Video Diffusion. They stop hostile or mistyped requests
before any work. `driver.memory` checks whether a run fits in the machine's memory.

A field of a sampling class is annotated with its `Param`. The checks, the options of the command
line, the fields of requests and `svdpp models` follow from it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, get_args, get_type_hints

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
#: Scale of classifier-free guidance; SVD's default is 1 to 3.
MAX_GUIDANCE_SCALE = 100.0
#: Noise added to the image, relative to the image's range; SVD's default is 0.02.
MAX_NOISE_AUG_STRENGTH = 10.0
#: Shift of a flow-matching scheduler; Wan's is 3 to 12.
MAX_FLOW_SHIFT = 100.0
#: Weight of a LoRA, whose sign may be negative; usual are 0.5 to 1.
MAX_LORA_WEIGHT = 100.0
#: Tokens of a prompt, and characters of its text; Wan uses 512 tokens.
MAX_PROMPT_TOKENS = 4096
MAX_PROMPT_CHARACTERS = 20_000
MAX_FPS = 240
#: Pixels of an image that clips are made from, in millions.
MAX_MEGAPIXELS = 50
#: Of an image beyond which others go first while it is prepared.
LARGE_MEGAPIXELS = 4
MAX_MOTION_BUCKET_ID = 1023
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


def check_whole(name: str, value: Any, low: int, high: int, unit: str = "") -> None:
    """Refuse a value that is not an int from `low` to `high`; `True` and `2.0` are not ints.

    The message names it as the user does, such as `--steps`; `unit` follows the limits.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and low <= value <= high):  # the message takes long, for 100,000 clips
        what = "" if is_whole else "a whole number, "
        raise RequestError(f"{name} must be {what}{low} to {high}{unit}, got {shown(value)}")


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


def check_num_clips(number: Any, name: str = "--clips") -> None:
    """Refuse a number of clips that is not 1 to `MAX_CLIPS`."""
    check_whole(name, number, 1, MAX_CLIPS)


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


@dataclass(frozen=True)
class Param:
    """A number that samplers take. `params_of` fills in what the annotated field says itself."""

    default: Any
    """Of its family; None: that of the model, or of another parameter."""
    highest: float
    help: str
    lowest: float = 0
    name: str = ""
    """Of the field."""
    is_shared: bool = False
    """Whether it has an option of its own, `option`."""
    api: str = ""
    """Its name in HTTP requests and benches, if it is another one."""
    unit: str = ""
    above: bool = False
    """Whether it must be above `lowest`."""
    shown_default: str = ""
    """The default in words, for the help."""
    kind: type[int] | type[float] = float
    is_optional: bool = False
    """Whether None is a value of it."""

    @property
    def option(self) -> str:
        """The option as users type it."""
        name = self.field.replace("_", "-")
        return f"--{name}" if self.is_shared else f"--param {self.name}"

    @property
    def field(self) -> str:
        """Its name in HTTP requests and benches."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Refuses a value of another type or out of range, by the option's name."""
        if value is None and self.is_optional:
            return
        if self.kind is int:
            unit = f" {self.unit}" if self.unit else ""
            check_whole(self.option, value, int(self.lowest), int(self.highest), unit)
            return
        require(
            is_number(value) and 0 <= value <= self.highest,
            f"{self.option} must be a finite number, 0 to {self.highest:g}, got {shown(value)}",
        )
        is_low = self.above and value <= self.lowest
        require(not is_low, f"{self.option} must be above {self.lowest:g}, got {value}")


def within(low: float, high: float, help: str, **more: Any) -> Param:
    """The annotation of a field, which has the type and the default."""
    return Param(None, high, help, low, **more)


def shared(low: float, high: float, help: str, api: str = "", **more: Any) -> Param:
    """The same for a parameter with an option of its own, named as in requests."""
    return within(low, high, help, api=api, is_shared=True, **more)


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """The parameters of a sampling class that have a `Param`, by the name of the field."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for each in fields(kind):
        parts = list(_parts(hints[each.name]))
        for param in (part for part in parts if isinstance(part, Param)):
            found[each.name] = replace(
                param,
                name=each.name,
                default=None if each.default is MISSING else each.default,
                kind=int if int in parts else float,
                is_optional=type(None) in parts,
            )
    return found


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
