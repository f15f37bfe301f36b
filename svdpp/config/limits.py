"""Upper limits of values in requests, and functions that check values.

The limits are far above any use of video diffusion, so they reject only hostile or mistyped
requests. docs/security.md lists them. The ranges of sampling parameters are in `config.sampling`.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

from svdpp.errors import InputError, RequestError

#: Largest number of denoising steps. Models are trained with 1000 noise levels, so more steps do
#: not improve a clip.
MAX_STEPS = 1000
#: Largest seed; the smallest is 0. `torch.Generator.manual_seed` maps negative seeds to seeds above
#: this number. If both were allowed, two different seeds could give the same clip.
MAX_SEED = 2**63 - 1
MAX_FRAMES = 1024
#: Largest height and width of a frame, in pixels.
MAX_SIDE = 4096
#: Largest product of height, width and number of frames; enough for 25 frames of 4096 x 2304.
MAX_CLIP_PIXELS = 2**28
#: Largest absolute weight of a LoRA; usual weights are 0.5 to 1.
MAX_LORA_WEIGHT = 100.0
#: Largest number of LoRAs of a model, and largest number of further LoRAs of one clip.
MAX_LORAS = 16
MAX_PROMPT_CHARACTERS = 20_000
#: Largest number of references of a clip, besides its input image.
MAX_REFERENCES = 16
#: Largest size of an input image, in millions of pixels.
MAX_MEGAPIXELS = 50
#: Images with more than this number of millions of pixels are large. Clips from large images are
#: scheduled after all other clips.
LARGE_MEGAPIXELS = 4
#: Largest number of clips of one run, which is the number of inputs times the number of seeds.
MAX_CLIPS = 100_000
#: Largest size of a jobs file in bytes: `MAX_CLIPS` lines of 1000 bytes.
JOBS_FILE_BYTES = 100_000_000
#: Largest number of threads of a rank, as a multiple of the machine's CPU cores. The limit is above
#: 1, so that `verify` can reproduce a clip that was made on a machine with more cores.
MAX_THREADS_PER_CORE = 16
#: Largest number of elements of a latent.
MAX_LATENT_ELEMENTS = 2**28
#: Largest timeout in seconds: one week, which is also the timeout of torch's process groups.
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0
#: Largest N in a device name `cuda:N`.
MAX_CUDA_INDEX = 1023
#: Default limit of `read_small_file`, in bytes.
SMALL_FILE_BYTES = 1_000_000


def max_threads() -> int:
    """Return the largest number of intra-op threads per rank that a request may ask for.

    The limit depends only on the number of CPU cores of this machine, not on the number of ranks.
    """
    return MAX_THREADS_PER_CORE * (os.cpu_count() or 1)


def require(condition: bool, message: str, hint: str = "", **details: Any) -> None:
    """Raise a `RequestError` with `message` and `hint` unless `condition` is true.

    Args:
        condition: Result of the check.
        message: One sentence that says what is wrong, with the values that matter.
        hint: Fix, usually the next command to type.
        details: Values of the message by name, for the error's `details`.

    Raises:
        RequestError: `condition` is false; the error has `message`, `hint` and `details`.
    """
    if not condition:
        raise RequestError(message, hint, details=details)


def check_int(name: str, value: Any, low: int, high: int, where: str = "") -> None:
    """Raise a `RequestError` unless a field's value is an int, not a bool or a float, in a range.

    Args:
        name: Name of the field, such as `num_inference_steps`.
        value: Value of any type.
        low: Smallest value that is allowed.
        high: Largest value that is allowed.
        where: Text that follows the limits in the message, such as " on this machine"; may be
            empty.

    Raises:
        RequestError: The value is not an int, or out of range.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    # `require` is not used here, because its message would be built for valid values, too, which is
    # slow for 100,000 clips.
    if not (is_whole and low <= value <= high):
        what = "" if is_whole else "a whole number, "
        raise RequestError(
            f"`{name}` must be {what}{low} to {high}{where}, got {shown(value)}",
            details={"field": name, "value": detail_value(value), "lowest": low, "highest": high},
        )


def check_seconds(name: str, value: Any) -> None:
    """Raise a `RequestError` unless a value is a number of seconds above 0 and at most a week.

    Args:
        name: Name of the field.
        value: Value of any type.

    Raises:
        RequestError: The value is not a number, or out of range.
    """
    require(
        is_number(value) and 0 < value <= MAX_TIMEOUT_SECONDS,
        f"`{name}` must be above 0 and at most {MAX_TIMEOUT_SECONDS:.0f} s, got {shown(value)}",
        field=name,
        value=detail_value(value),
        above_seconds=0,
        highest_seconds=MAX_TIMEOUT_SECONDS,
    )


def check_type(name: str, value: Any, *types: type) -> None:
    """Raise a `RequestError` unless a field's value has exactly one of the types, not a subclass.

    Args:
        name: Name of the field.
        value: Value of any type.
        types: Types that are allowed; `type(None)` allows None.

    Raises:
        RequestError: The value has another type.
    """
    if type(value) not in types:
        names = " or ".join("null" if each is type(None) else each.__name__ for each in types)
        raise RequestError(
            f"`{name}` must be {names}, got {shown(value)}",
            details={"field": name, "value": detail_value(value)},
        )


def check_choice(name: str, value: object, known: tuple[Any, ...]) -> None:
    """Raise a `RequestError` unless a field's value is one of the allowed values.

    Args:
        name: Name of the field.
        value: Value of any type.
        known: Values that are allowed.

    Raises:
        RequestError: The value is not one of `known`.
    """
    if value not in known:
        raise RequestError(
            f"`{name}` must be one of {', '.join(known)}, got {shown(value)}",
            details={"field": name, "value": detail_value(value), "known": list(known)},
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number and not a bool."""
    try:
        is_real = isinstance(value, int | float) and not isinstance(value, bool)
        return is_real and math.isfinite(value)
    except OverflowError:  # the int is too large for a float
        return False


def detail_value(value: Any) -> Any:
    """Return a value for an error's `details`: unchanged if JSON can hold it, else as a text.

    None, bools and finite numbers below 2^63 are unchanged.
    """
    is_plain = value is None or isinstance(value, bool) or is_number(value)
    return value if is_plain and abs(value or 0) < 2**63 else shown(value)


def shown(value: Any) -> str:
    """Return the `repr` of `value` for a message, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert an int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def read_small_file(path: Path, what: str, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """Read a regular file up to a size limit; refuse pipes and devices, because they could block.

    Args:
        path: Path of the file.
        what: Word for the file in messages, such as "costs file".
        max_bytes: Largest allowed size of the file, in bytes.

    Raises:
        InputError: The file is missing, not a regular file, too large, or cannot be read.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(
                    f"{what} {str(path)!r} is not a regular file", details={"path": str(path)}
                )
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{what} {str(path)!r} cannot be read: {reason}", details={"path": str(path)}
        ) from error
    if len(data) > max_bytes:
        raise InputError(
            f"{what} {str(path)!r} is larger than {max_bytes} bytes",
            details={"path": str(path), "highest_bytes": max_bytes},
        )
    return data
