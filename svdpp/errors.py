"""Exceptions with exit codes; redaction of secrets and paths.

An error is one sentence for the person at the terminal and, if there is one, a hint with the fix.
It holds plain strings and JSON values only, so that another process can raise it again as the same
type. Errors, tracebacks, logs and JSON pass through `redact`, and paths in clip metadata through
`recorded_path`. Imports no other package.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|AUTH|CREDENTIAL", re.IGNORECASE)
#: Shorter values are switches such as `1` or `none`; removing them would garble the text.
_SECRET_LENGTH = 8
# huggingface.co issues hf_ and 34 letters and digits; older tokens can have 30.
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
#: The folders of a path; with blanks if it is quoted, or all that there is.
_FOLDERS = re.compile(
    r"""(?<=['"])~?/[^'"]*/(?=[^'"/])|\A~?/[^'"]*/(?=[^/]+\Z)|(?<![\w:/.~'"])~?/\S*/(?=[^\s/])"""
)
# C0 without the line break, DEL, C1, and what changes the direction of writing.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# A password that is not percent-encoded may have any character: the last @ ends it, unless what
# follows the colon is a port.
_URL_PASSWORD = re.compile(
    r"(?<=://)(?:[^/\s@'\":]*:(?!\d{1,5}(?:[/?#\s'\"]|$))[^\s'\"]*|[^/\s@'\"]+)@"
    r"|(?<=[?&]password=)[^\s'\"&]+"
)


class SvdppError(Exception):
    """Base of all errors that the user sees as a sentence instead of a traceback.

    Args:
        message: One sentence that says what is wrong, with the values that matter.
        hint: Fix, usually the next command to type; empty if there is none.
        details: Numbers of the message and what else a program needs, by name; JSON values.

    Message and hint name the fields of a configuration in backticks, such as `num_frames`; front
    ends write them as their users know them: see `write_fields`.
    """

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "unexpected error"
    results: Sequence[Any] = ()
    """Results of the clips that `svdpp.generate` had finished when it raised this error."""

    def __init__(
        self, message: str, hint: str = "", *, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def __str__(self) -> str:
        return self.message

    @property
    def field(self) -> str | None:
        """Field of a configuration that is wrong: that of `details`, or the first that is named.

        None: the error is not about a field.
        """
        return self.details.get("field") or next(iter(fields_in(self.message)), None)


class RequestError(SvdppError, ValueError):
    """The request contradicts itself or the machine: options, step counts, worlds, sizes."""

    exit_code = 2
    meaning = "wrong request"


class VerificationError(SvdppError, RuntimeError):
    """Two results that had to be equal are not."""

    exit_code = 3
    meaning = "verify found a difference"


class OutOfMemoryError(SvdppError, RuntimeError, MemoryError):
    """Too little memory: the message says for what, the hint which option lowers it.

    `details` has what is known of `requested_bytes`, `free_bytes`, `device` and `rank`.
    """

    exit_code = 4
    meaning = "out of memory"


# CUDA's and NCCL's words; those of cuBLAS and cuDNN; those of the CPU allocator, which raises a
# plain RuntimeError, and of mmap.
_NO_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")


def first_line(error: object) -> str:
    """Return what a library's error says, on one line.

    Args:
        error: Exception, or its text.

    Returns:
        At most 300 characters; the type's name if it says nothing. A line that ends with a colon
        is followed by the next one.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    return "".join(char if char.isprintable() else "?" for char in text[:300])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or a library of CUDA says with `error` that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


# "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.03 GiB is free."
# (c10/cuda/CUDACachingAllocator.cpp), and "DefaultCPUAllocator: can't allocate memory: you tried to
# allocate 123 bytes." (c10/core/impl/alloc_cpu.cpp).
_SIZE = r"([0-9.]+) (bytes|[KMGT]iB)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_GPU = re.compile(r"\bGPU (\d+) has a total capacity")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_details(error: BaseException) -> dict[str, Any]:
    """Return what an error for a lack of memory says in numbers, for `details`.

    Args:
        error: Error of torch's allocators, whose text is read, or an OutOfMemoryError.

    Returns:
        What is known of `requested_bytes`, `free_bytes` and `device`; torch rounds the sizes of
        CUDA to two decimals.
    """
    if isinstance(error, OutOfMemoryError):
        return dict(error.details)
    text, found = str(error), dict[str, Any]()
    for name, pattern in (("requested_bytes", _REQUESTED), ("free_bytes", _FREE)):
        if match := pattern.search(text):
            found[name] = round(float(match[1]) * _UNITS[match[2]])
    if match := _GPU.search(text):
        found["device"] = f"cuda:{match[1]}"
    return found


class ModelError(SvdppError, ValueError):
    """A model is missing, gated, incomplete, not safetensors, or of a class not supported."""

    exit_code = 5
    meaning = "model missing, gated, incomplete or not safetensors"


class RankError(SvdppError, RuntimeError):
    """A rank died, raised, stalled or never started.

    Args:
        grid: Text with a line for each rank, time from left to right, and a mark at the rank that
            failed. It is an empty text if no rank had done anything.
        trace: Traceback or last output of the failed rank, for `--debug` and the log.
    """

    exit_code = 6
    meaning = "a rank died or stalled"

    def __init__(
        self, message: str, hint: str = "", *, grid: str = "", trace: str = "", **more: Any
    ) -> None:
        super().__init__(message, hint, **more)
        self.grid = grid
        self.trace = trace

    @property
    def picture(self) -> str:
        """Earlier name of `grid`."""
        return self.grid


class DeviceError(RankError):
    """A GPU, or its driver, failed in the middle of a rank's work: the rank's own fault."""


class TransportError(RankError):
    """A packet between two ranks was not the expected one, or the connection broke."""


class MismatchError(TransportError):
    """A packet is not the one that its receiver expects: the fault of the rank that sent it.

    `details` has `clip`, `step`, `from_rank`, `to_rank`, and `sent_...` and `expected_...` of what
    differs: `clip`, `next_step`, `shape`, `dtype`, `bytes`, `tensors`, with the names `missing` and
    `extra`.
    """


class BrokenLinkError(TransportError):
    """The connection to another rank broke; usually that rank has ended, and is the cause."""


class InputError(SvdppError, ValueError):
    """An input file is unreadable, hostile, or not what its name says."""

    exit_code = 7
    meaning = "input unreadable or hostile"


class OutputError(SvdppError, RuntimeError):
    """A result cannot be written."""

    exit_code = 8
    meaning = "output cannot be written"


class ClosedError(SvdppError, RuntimeError):
    """A pipeline was used from Python outside its block, or closed with clips unfinished."""


class NotFiniteError(SvdppError, RuntimeError):
    """A clip's latent or frames became NaN or infinite: that clip is lost, the others are not."""

    exit_code = 9
    meaning = "a latent is not finite"


class TargetMissedError(SvdppError, RuntimeError):
    """A benchmark measured a value outside the bounds that its configuration sets."""

    exit_code = 10
    meaning = "a benchmark missed a target"


class ServerError(SvdppError, RuntimeError):
    """A server, `run --server`, does not answer, refuses the key, or has lost a clip."""

    exit_code = 11
    meaning = "the server of a run cannot be used"


class Interrupted(BaseException):
    """A signal ended the run; no Exception, because libraries would swallow one."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self.message = f"ended by {signal.Signals(signal_number).name}"
        self.hint = ""
        super().__init__(self.message)


#: Every type that may cross a process boundary, by name (`error_to_dict`, `error_from_dict`).
_TYPES: dict[str, type[SvdppError]] = {
    name: value
    for name, value in [*globals().items()]
    if isinstance(value, type) and issubclass(value, SvdppError)
}


def exit_code_of(error: BaseException) -> int:
    """Return the process exit code for `error`: 1 for everything that is not an `SvdppError`."""
    if isinstance(error, Interrupted):
        return 128 + error.signal_number
    return error.exit_code if isinstance(error, SvdppError) else 1


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return `error` as plain strings and JSON values, to send to another process."""
    if isinstance(error, SvdppError):
        more = {"details": error.details} if error.details else {}
        return {"type": type(error).__name__, "message": error.message, "hint": error.hint, **more}
    kind = Interrupted.__name__ if isinstance(error, Interrupted) else ""
    return {"type": kind, "message": f"{type(error).__name__}: {error}", "hint": ""}


def reraisable(error: BaseException) -> BaseException:
    """Return a copy of `error` for one more thread to raise.

    Each raise adds to an object's traceback.

    Returns:
        A copy whose cause is `error`; `error` itself if its class cannot be copied.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # an exception class whose constructor takes other arguments
        return error
    copied.__cause__ = error
    return copied


def error_from_dict(record: dict[str, Any]) -> SvdppError:
    """Return the error that `error_to_dict` wrote.

    Args:
        record: Record from another process; an unknown type becomes an `SvdppError`.
    """
    kind = _TYPES.get(record["type"], SvdppError)
    return kind(record["message"], record["hint"], details=record.get("details"))


def worst_of(errors: Iterable[SvdppError], count: str) -> SvdppError:
    """Return the error with the highest exit code.

    Args:
        errors: One or more.
        count: Beginning of the sentence, such as `2 of 5 lost`.
    """
    worst = max(errors, key=exit_code_of)
    return error_from_dict({**error_to_dict(worst), "message": f"{count}: {worst}"})


def fields_in(text: str) -> list[str]:
    """Return the fields of a configuration that a message or hint names, in its order.

    Args:
        text: Message or hint with fields in backticks.
    """
    return [part for part in text.split("`")[1:-1] if part.isidentifier()]


def write_fields(text: str, names: Mapping[str, str]) -> str:
    """Return a message or hint with fields as the users of a front end know them.

    Args:
        text: Message or hint with fields in backticks.
        names: Name of each field, such as `--frames`; other fields stay as they are.
    """
    for field in fields_in(text):
        text = text.replace(f"`{field}`", names.get(field, f"`{field}`"))
    return text


def nearest(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return a hint on a misspelt name.

    Args:
        name: Name as it was typed.
        choices: Correct names.
        otherwise: Hint if none of them is like it.
    """
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def describe_fault(fault: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, in the words of users.

    Args:
        fault: One entry of pydantic's `errors()`.
    """
    kind, about, value = fault["type"], fault.get("ctx", {}), repr(fault.get("input"))
    got = f", got {value if len(value) <= 60 else value[:57] + '...'}"
    for beginning, wanted in _WANTED.items():
        if kind.startswith(beginning):
            return wanted.format(**about) + got
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is unknown"
    if kind == "value_error":
        return f"is refused: {fault['msg'].removeprefix('Value error, ')}"
    return re.sub(r"^\w+ should", "must", fault["msg"]) + got


def fault_details(fault: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `details` of a value that pydantic refuses.

    Args:
        fault: One entry of pydantic's `errors()`.

    Returns:
        `field` with dots, `given` as a short text, the limits by pydantic's names (`ge`, `lt`,
        `min_length` and so on), and pydantic's `problem`.
    """
    limits = {
        name: value
        for name, value in fault.get("ctx", {}).items()
        if isinstance(value, int | float | str)
    }
    shown = repr(fault.get("input"))
    return {
        "field": ".".join(map(str, fault["loc"])),
        "given": shown if len(shown) <= 60 else shown[:57] + "...",
        "problem": fault["msg"],
        **limits,
    }


#: By the beginning of the kind of fault, where pydantic's own words are a programmer's.
_WANTED = {
    "int_": "must be a whole number",
    "bool_": "must be true or false",
    "string_pattern": "must match {pattern}",
    "model_": "must be a section",
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be {le} or less",
    "too_short": "needs {min_length} or more values",
}


def redact(text: str) -> str:
    """Return `text` without secrets, and with `~` for the user's home.

    Secrets are the values of environment variables with a name such as `*TOKEN*`, hub tokens, and
    user names and passwords in URLs.
    """
    return redaction()(text)


def redaction() -> Callable[[str], str]:
    """Return the function by which `redact` cleans a text, for the environment as it is now."""
    homes = [re.compile(rf"(?<![\w~.-]){re.escape(home)}(?![\w.-])") for home in _homes()]
    named = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
    # Longest first, because one can contain another.
    secrets = sorted({each for each in named if len(each) >= _SECRET_LENGTH}, key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        text = _URL_PASSWORD.sub(_hidden, redact_tokens(text))
        for home in homes:
            text = home.sub("~", text)
        return text

    return clean


def _hidden(found: re.Match[str]) -> str:
    return "***@" if found[0].endswith("@") else "***"


def redact_tokens(text: str) -> str:
    """Return `text` without hub tokens; for names that a user can copy into a command."""
    return _HUB_TOKEN.sub("hf_***", text)


def redact_all(value: Any, how: Callable[[str], str] | None = None) -> Any:
    """Return a JSON value with every string in it redacted, except keys.

    Args:
        value: Value made of strings, numbers, lists and dicts.
        how: Function that redacts one string; None: `redact`.
    """
    clean = how or redaction()
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: redact_all(each, clean) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(each, clean) for each in value]
    return value


def without_folders(text: str) -> str:
    """Return `text` with only the last part of each absolute path, for readers elsewhere."""
    return _FOLDERS.sub("", text)


def printable(text: str) -> str:
    """Return `text` with Python's escapes in place of control characters, except line breaks.

    A terminal obeys control characters, so a file's name could write anything there.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return the text of `printable` with escapes for line breaks, which could forge a line."""
    return printable(text).replace("\n", "\\n")


def without_controls(name: str) -> str:
    """Return `name` for a new file: with `_` in place of control characters."""
    return _CONTROL.sub("_", name).replace("\n", "_")


def recorded_path(path: str | Path, folder: str | Path) -> str:
    """Return the name of `path` in a file in `folder`: relative to `folder`, to reveal little.

    If `path` is below the user's home and `folder` is not, the name is `~/...`. `located_path` with
    the same folder is the inverse.

    Args:
        path: Path, absolute or relative to the working folder.
        folder: Folder of the file that records the name.
    """
    absolute, base = os.path.abspath(path), os.path.abspath(folder)
    for home in _homes():
        if _is_below(absolute, home) and not _is_below(base + "/", home):
            return "~/" + os.path.relpath(absolute, home)
    relative = os.path.relpath(absolute, base)
    return "./" + relative if relative.startswith("~") else relative


def located_path(text: str, folder: str | Path) -> Path:
    """Return the path for a name that `recorded_path` wrote.

    Args:
        text: Name.
        folder: Folder of the file that records it.
    """
    if text.startswith("~/"):
        return Path(os.path.expanduser("~")) / text[2:]
    return Path(folder) / text


def recorded_name(name: str) -> str:
    """Return the recorded name of a model: a folder below the home as `~/...`, others as typed."""
    for home in _homes():
        if _is_below(name, home):
            return "~/" + os.path.relpath(name, home)
    return redact_tokens(name)


def _homes() -> list[str]:
    """The user's home as named and with links resolved, longest first; empty if unknown."""
    home = os.path.expanduser("~").rstrip("/")
    names = {home, os.path.realpath(home)} if home.startswith("/") else set()
    return sorted(names - {"/"}, key=len, reverse=True)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")
