"""What must not be shown: tokens, passwords, the user's home, and control characters.

Errors, tracebacks, logs and JSON pass through `redact`, and paths in clip metadata through
`recorded_path`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

# huggingface.co issues hf_ and 34 letters and digits; older tokens can have 30.
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
#: The folders of a path; with blanks if it is quoted, or all that there is.
_FOLDERS = re.compile(
    r"""(?<=['"])~?/[^'"]*/(?=[^'"/])|\A~?/[^'"]*/(?=[^/]+\Z)|(?<![\w:/.~'"])~?/\S*/(?=[^\s/])"""
)
# C0 without the line break, DEL, C1, and what changes the direction of writing.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@'\"]+@")


def redact(text: str) -> str:
    """`text` without hub tokens and users and passwords of URLs, and with `~` for the home."""
    text = _URL_PASSWORD.sub("***@", redact_tokens(text))
    for home in _homes():
        text = re.sub(rf"(?<![\w~.-]){re.escape(home)}(?=/)", "~", text)
    return text


def redact_tokens(text: str) -> str:
    """`text` without hub tokens; for names that a user can copy into a command."""
    return _HUB_TOKEN.sub("hf_***", text)


def redact_all(value: Any, how: Callable[[str], str] = redact) -> Any:
    """A JSON value with every string in it redacted, except keys."""
    if isinstance(value, str):
        return how(value)
    if isinstance(value, dict):
        return {key: redact_all(each, how) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(each, how) for each in value]
    return value


def without_folders(text: str) -> str:
    """`text` with only the last part of each absolute path, for readers elsewhere."""
    return _FOLDERS.sub("", text)


def printable(text: str) -> str:
    """`text` with Python's escapes in place of control characters, except line breaks.

    A terminal obeys control characters, so a file's name could write anything there.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`printable`, also with escapes for line breaks, by which a name could forge a line."""
    return printable(text).replace("\n", "\\n")


def without_controls(name: str) -> str:
    """`name` for a new file: with `_` in place of control characters."""
    return _CONTROL.sub("_", name).replace("\n", "_")


def recorded_path(path: str | Path, folder: str | Path) -> str:
    """The name of `path` in a file in `folder`: relative to `folder`, to reveal little.

    If `path` is below the user's home and `folder` is not, the name is `~/...`. `located_path` with
    the same folder is the inverse.
    """
    absolute, base = os.path.abspath(path), os.path.abspath(folder)
    for home in _homes():
        if _is_below(absolute, home) and not _is_below(base + "/", home):
            return "~/" + os.path.relpath(absolute, home)
    relative = os.path.relpath(absolute, base)
    return "./" + relative if relative.startswith("~") else relative


def located_path(text: str, folder: str | Path) -> Path:
    """The path for a name `text` that `recorded_path` wrote for `folder`."""
    if text.startswith("~/"):
        return Path(os.path.expanduser("~")) / text[2:]
    return Path(folder) / text


def recorded_name(name: str) -> str:
    """The recorded name of a model: a folder below the home as `~/...`, any other name as typed."""
    for home in _homes():
        if _is_below(name, home):
            return "~/" + os.path.relpath(name, home)
    return redact_tokens(name)


def _homes() -> list[str]:
    """The user's home as named and with links resolved, longest first; empty if unknown."""
    return _names_of(os.path.expanduser("~").rstrip("/"))


@cache
def _names_of(home: str) -> list[str]:
    names = {home, os.path.realpath(home)} if home.startswith("/") else set()
    return sorted(names - {"/"}, key=len, reverse=True)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")
