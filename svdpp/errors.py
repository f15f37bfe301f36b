"""Exceptions with exit codes; redaction of secrets and paths.

An error consists of one sentence for the user and, if there is a fix, a hint. Errors contain only
strings and JSON values, so that another process can raise them again with the same type. Errors,
tracebacks, logs and JSON pass through `redact`, and paths in clip metadata through `recorded_path`.
This module imports only the standard library.
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
#: The value of an environment variable counts as a secret only if it has this many characters or
#: more. Shorter values are switches such as `1` or `none`, and removing them would garble texts.
_SECRET_LENGTH = 8
# A token of huggingface.co is `hf_` and 34 letters and digits, or 30 in older tokens.
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
#: Pattern of the folders in an absolute path, such as `/home/ann/` in `/home/ann/a.png`. Folders
#: may contain blanks if the path is quoted or is the whole text.
_FOLDERS = re.compile(
    r"""(?<=['"])~?/[^'"]*/(?=[^'"/])|\A~?/[^'"]*/(?=[^/]+\Z)|(?<![\w:/.~'"])~?/\S*/(?=[^\s/])"""
)
# Control characters: C0 without the line break, DEL, C1, Unicode's line and paragraph separators,
# and marks of the writing direction.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# User name and password in a URL. A password that is not percent-encoded may contain `@`, so the
# match ends at the last `@`. In `http://host:8000/a@b`, the number after the colon is a port, not a
# password, so nothing matches.
_URL_PASSWORD = re.compile(
    r"(?<=://)(?:[^/\s@'\":]*:(?!\d{1,5}(?:[/?#\s'\"]|$))[^\s'\"]*|[^/\s@'\"]+)@"
    r"|(?<=[?&]password=)[^\s'\"&]+"
)


class SvdppError(Exception):
    """Base class of all errors that the user sees as a sentence instead of a traceback.

    Args:
        message: One sentence that says what is wrong, with the values that matter.
        hint: Fix, usually the next command to type; empty if there is no fix. A hint is one or more
            proposals, separated only by "; " or ", or ", such as "use `num_inference_steps` 21, or
            use `world_size` 3". Each proposal is a clause with its own verb, because the command
            line leaves out proposals that name an option which the command lacks. If one proposal
            names several options, each command must have all of them or none.
        details: Numbers in the message and other facts for programs, by name; JSON values.

    Messages and hints write the names of configuration fields in backticks, such as `num_frames`.
    The command line and the server replace each by the name that their users know, such as
    `--frames`; see `write_fields`.
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
        """Name of the configuration field that is wrong; None if the error is not about a field.

        The name is taken from `details`, or is the first field that the message names.
        """
        return self.details.get("field") or next(iter(fields_in(self.message)), None)


class RequestError(SvdppError, ValueError):
    """Error for a request that contradicts itself, the model or the machine."""

    exit_code = 2
    meaning = "wrong request"


class VerificationError(SvdppError, RuntimeError):
    """Error for clips that differ from their reference, such as diffusers' result on one device."""

    exit_code = 3
    meaning = "verify found a difference"


class OutOfMemoryError(SvdppError, RuntimeError, MemoryError):
    """Error for too little memory. The message says what failed; the hint names options that help.

    `details` contains `requested_bytes`, `free_bytes`, `device` and `rank`, as far as known.
    """

    exit_code = 4
    meaning = "out of memory"


# Texts that show that an error is about memory. The first is from CUDA and NCCL, the second from
# cuBLAS and cuDNN. The others are from torch's CPU allocator, which raises a plain RuntimeError
# with a different text on each platform.
_NO_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")


def first_line(error: object) -> str:
    """Return the first line of the message of a library's error.

    Args:
        error: Exception, or the text of an exception.

    Returns:
        Line of at most 300 characters; characters that are not printable become `?`. If the line
        ends with a colon, the second line is added. If the message is empty, the name of the
        exception's type is returned.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    return "".join(char if char.isprintable() else "?" for char in text[:300])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, from Python, torch or a CUDA library, means that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


# The patterns below match messages of torch such as "Tried to allocate 2.00 GiB. GPU 0 has a total
# capacity of 79.11 GiB of which 1.03 GiB is free." (c10/cuda/CUDACachingAllocator.cpp), and
# "DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes."
# (c10/core/impl/alloc_cpu.cpp).
_SIZE = r"([0-9.]+) (bytes|[KMGT]iB)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_GPU = re.compile(r"\bGPU (\d+) has a total capacity")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_details(error: BaseException) -> dict[str, Any]:
    """Return the numbers in an out-of-memory error, for the `details` of another error.

    Args:
        error: Error of torch, whose text is parsed, or svdpp's own `OutOfMemoryError`.

    Returns:
        `requested_bytes`, `free_bytes` and `device`, as far as known. Sizes on CUDA are inexact,
        because torch prints them in GiB or MiB with two decimals.
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
    """Error for a model that is missing, gated, incomplete, damaged or not supported."""

    exit_code = 5
    meaning = "model missing, gated, incomplete or not safetensors"


class RankError(SvdppError, RuntimeError):
    """Error for a rank that has died, failed, stalled or never started.

    Args:
        grid: Text drawing of the run, with a line for each rank, time from left to right, and a
            mark at the failed rank; empty if no rank had done any work.
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
        """Former name of a `RankError`'s `grid`, the picture of the ranks' work."""
        return self.grid


class DeviceError(RankError):
    """Error for a GPU or GPU driver that failed while a rank was working."""


class TransportError(RankError):
    """Error for a transfer between two ranks: a wrong packet, or a broken connection."""


class MismatchError(TransportError):
    """Error for a packet (tensors sent between ranks) that is not the one the receiver expects.

    The sender is at fault. `details` contains `clip`, `step`, `from_rank` and `to_rank`. For each
    value that differs, such as `shape` or `dtype`, `details` also contains what was sent and what
    was expected, as in `sent_shape` and `expected_shape`. `missing` lists the names of tensors that
    the packet lacks, and `extra` those of tensors that it should not have.
    """


class BrokenLinkError(TransportError):
    """Error for a broken connection to another rank, usually because the other rank has ended."""


class InputError(SvdppError, ValueError):
    """Error for an input file that is unreadable, hostile, or not of the type its name says."""

    exit_code = 7
    meaning = "input unreadable or hostile"


class OutputError(SvdppError, RuntimeError):
    """Error for a result that cannot be written."""

    exit_code = 8
    meaning = "output cannot be written"


class ClosedError(SvdppError, RuntimeError):
    """Error for a pipeline used outside its `with` block, or closed before clips were finished."""


class NotFiniteError(SvdppError, RuntimeError):
    """Error for a clip whose latent or frames became NaN or infinite. Other clips continue."""

    exit_code = 9
    meaning = "a latent is not finite"


class TargetMissedError(SvdppError, RuntimeError):
    """Error for a benchmark that measured a value outside the bounds of its configuration."""

    exit_code = 10
    meaning = "a benchmark missed a target"


class ServerError(SvdppError, RuntimeError):
    """Error for a server that cannot be reached, rejects the API key, or no longer has a clip."""

    exit_code = 11
    meaning = "the server of a run cannot be used"


class Interrupted(BaseException):
    """Exception for a signal, such as SIGTERM, that ended the run.

    The class does not inherit from `Exception`. Otherwise a library that catches every `Exception`
    could keep the run going.
    """

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self.message = f"ended by {signal.Signals(signal_number).name}"
        self.hint = ""
        super().__init__(self.message)


#: All error types, by name. `error_from_dict` uses them for errors from other processes.
_TYPES: dict[str, type[SvdppError]] = {
    name: value
    for name, value in [*globals().items()]
    if isinstance(value, type) and issubclass(value, SvdppError)
}


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with `error`; 1 for unexpected errors."""
    if isinstance(error, Interrupted):
        return 128 + error.signal_number
    return error.exit_code if isinstance(error, SvdppError) else 1


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return an error as a dict of strings and JSON values, to send to another process."""
    if isinstance(error, SvdppError):
        more = {"details": error.details} if error.details else {}
        return {"type": type(error).__name__, "message": error.message, "hint": error.hint, **more}
    kind = Interrupted.__name__ if isinstance(error, Interrupted) else ""
    return {"type": kind, "message": f"{type(error).__name__}: {error}", "hint": ""}


def reraisable(error: BaseException) -> BaseException:
    """Return a copy of `error` for one of several threads that raise the error.

    Each thread needs its own copy, because each raise adds to the traceback of the raised object.

    Returns:
        Copy whose cause is `error`; `error` itself if its class cannot be copied.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # the constructor of a foreign class may take other arguments
        return error
    copied.__cause__ = error
    return copied


def error_from_dict(record: dict[str, Any]) -> SvdppError:
    """Return the error from a dict that `error_to_dict` has returned.

    Args:
        record: Dict from another process. An unknown type of error becomes an `SvdppError`.
    """
    kind = _TYPES.get(record["type"], SvdppError)
    return kind(record["message"], record["hint"], details=record.get("details"))


def worst_of(errors: Iterable[SvdppError], count: str) -> SvdppError:
    """Return a copy of the error with the highest exit code. The message begins with `count`.

    Args:
        errors: One or more errors.
        count: Text such as `2 of 5 clips failed`.
    """
    worst = max(errors, key=exit_code_of)
    return error_from_dict({**error_to_dict(worst), "message": f"{count}: {worst}"})


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 clip` or `2 clips`.

    Args:
        number: Number of things.
        noun: Noun in the singular; its plural must end in s.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fields_in(text: str) -> list[str]:
    """Return the names of configuration fields in a message or hint, in order.

    Args:
        text: Message or hint with fields in backticks.
    """
    return [part for part in text.split("`")[1:-1] if part.isidentifier()]


def write_fields(text: str, names: Mapping[str, str]) -> str:
    """Return a message or hint in which each field has the name that the user knows.

    Args:
        text: Message or hint with names of fields in backticks.
        names: Names that the user knows, by field, such as `--frames` for `num_frames`. Fields
            that are missing here stay as they are.
    """
    for field in fields_in(text):
        text = text.replace(f"`{field}`", names.get(field, f"`{field}`"))
    return text


# A hint is split only here, so proposals need no grammar; see the class `SvdppError`.
_SEPARATOR = re.compile(r"(; |, or )")


def filter_hint(hint: str, is_kept: Callable[[str], bool]) -> str:
    """Return an error's hint without some of its proposals.

    Args:
        hint: Proposals, separated by "; " or ", or ", such as "use --steps 21, or use --gpus 3".
        is_kept: Function that gets a proposal and returns whether it stays in the hint.

    Returns:
        Hint; empty if no proposal is left.
    """
    parts = _SEPARATOR.split(hint)
    proposals, separators = parts[::2], ["", *parts[1::2]]
    kept = ""
    for separator, proposal in zip(separators, proposals, strict=True):
        if is_kept(proposal):
            kept += separator + proposal if kept else proposal
    return kept


def nearest(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return a hint that proposes the known name most similar to a misspelt one.

    Args:
        name: Name that the user typed.
        choices: Correct names.
        otherwise: Hint to return if no correct name is similar to `name`.
    """
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def describe_fault(fault: Mapping[str, Any]) -> str:
    """Return the text that users see for a validation error of pydantic.

    Args:
        fault: One entry of the list that pydantic's `errors()` returns.
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
    """Return the `details` of an error for a value that pydantic has rejected.

    Args:
        fault: One entry of the list that pydantic's `errors()` returns.

    Returns:
        `field`, the path of the field with dots; `given`, the value as a short text; `problem`,
        pydantic's message; and limits by pydantic's names, such as `ge` and `min_length`.
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


#: Texts that users see for validation errors, by the beginning of pydantic's error type.
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
    """Return `text` without secrets, and with `~` in place of the user's home folder.

    Secrets are the values of environment variables with a name such as `*TOKEN*`, tokens of the
    Hugging Face hub, and user names and passwords in URLs.
    """
    return redaction()(text)


def redaction() -> Callable[[str], str]:
    """Return a function that does the same as `redact`, but faster for many texts.

    The secrets are read from the environment once, not for each text.
    """
    homes = [re.compile(rf"(?<![\w~.-]){re.escape(home)}(?![\w.-])") for home in _homes()]
    named = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
    # Long secrets are replaced first, because a secret can contain another secret.
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
    """Return `text` without hub tokens. Paths stay whole, so a user can copy a command from it."""
    return _HUB_TOKEN.sub("hf_***", text)


def redact_all(value: Any, how: Callable[[str], str] | None = None) -> Any:
    """Return a copy of a JSON value with all its strings redacted, except keys of dicts.

    Args:
        value: JSON value of strings, numbers, lists and dicts.
        how: Function that redacts a string; None: `redact`.
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
    """Return `text` with absolute paths shortened to file names, for readers on other machines."""
    return _FOLDERS.sub("", text)


def printable(text: str) -> str:
    r"""Return `text` with control characters as Python's escapes, such as `\x1b`; line breaks stay.

    A terminal interprets control characters, so a file name with such characters could forge
    output.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return `printable(text)` with line breaks escaped too, so that no line can be forged."""
    return printable(text).replace("\n", "\\n")


def without_controls(name: str) -> str:
    """Return a name for a new file, with `_` in place of control characters."""
    return _CONTROL.sub("_", name).replace("\n", "_")


def recorded_path(path: str | Path, folder: str | Path) -> str:
    """Return `path` relative to `folder`, as text for a file in `folder`.

    Relative paths reveal little about the machine. If `path` is below the user's home and `folder`
    is not, the text is `~/...`. `located_path` converts the text back to a path.

    Args:
        path: Path, absolute or relative to the working folder.
        folder: Folder of the file in which the path is recorded.
    """
    absolute, base = os.path.abspath(path), os.path.abspath(folder)
    for home in _homes():
        if _is_below(absolute, home) and not _is_below(base + "/", home):
            return "~/" + os.path.relpath(absolute, home)
    relative = os.path.relpath(absolute, base)
    return "./" + relative if relative.startswith("~") else relative


def located_path(text: str, folder: str | Path) -> Path:
    """Convert a text from `recorded_path` back to a path.

    Args:
        text: Recorded text.
        folder: Folder of the file in which the text is recorded.
    """
    if text.startswith("~/"):
        return Path(os.path.expanduser("~")) / text[2:]
    return Path(folder) / text


def recorded_name(name: str) -> str:
    """Return a model's name for metadata files, without hub tokens or the path of the home folder.

    The path of a model folder below the user's home begins with `~/`.

    Args:
        name: Name of a hub model, or path of a folder.
    """
    for home in _homes():
        if _is_below(name, home):
            return "~/" + os.path.relpath(name, home)
    return redact_tokens(name)


def _homes() -> list[str]:
    """Return the user's home folder as it is, and with its links resolved; empty if unknown."""
    home = os.path.expanduser("~").rstrip("/")
    names = {home, os.path.realpath(home)} if home.startswith("/") else set()
    return sorted(names - {"/"}, key=len, reverse=True)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")
