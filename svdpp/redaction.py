"""Owns what must not be shown of a machine: its user's home, tokens, secrets in the environment.

Whatever leaves the program for people to pass on (errors, tracebacks, logs, JSON) goes through
`redact`; the paths that a clip's JSON names go through `recorded_path` and back. Standard library
only, so that every room may use it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|AUTH|CREDENTIAL", re.IGNORECASE)
#: Shorter values are switches such as 1 or none; to take them out would shred every text.
_MIN_SECRET_LENGTH = 8
# As huggingface.co issues them: hf_ and 34 letters and digits (30 had been seen in the past).
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@'\"]+@")


def redact(text: str) -> str:
    """`text` without secrets, and with `~` for the user's home.

    Out go the values of environment variables whose name says that they are secret, the hub's
    tokens, and names and passwords in URLs.
    """
    for secret in _secrets():
        text = text.replace(secret, "***")
    text = _URL_PASSWORD.sub("***@", redact_tokens(text))
    for home in _homes():
        # As whole names only: /home/al is not the home in /home/alice nor in /mnt/home/al.
        text = re.sub(rf"(?<![\w~-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def redact_all(value: Any) -> Any:
    """A JSON value with every text in it redacted, keys apart."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(each) for each in value]
    return value


def redact_tokens(text: str) -> str:
    """`text` without the hub's tokens, and otherwise as it is: for names that are typed again."""
    return _HUB_TOKEN.sub("hf_***", text)


def recorded_path(path: str | Path, folder: str | Path) -> str:
    """How a file in `folder` names `path`: relative to itself, which tells least about a machine.

    Where that would climb down through the user's home, it is `~/...` instead. `located_path` of
    the same folder is the way back.
    """
    absolute, base = os.path.abspath(path), os.path.abspath(folder)
    for home in _homes():
        if _is_below(absolute, home) and not _is_below(base + "/", home):
            return "~/" + os.path.relpath(absolute, home)
    relative = os.path.relpath(absolute, base)
    return "./" + relative if relative.startswith("~") else relative


def located_path(text: str, folder: str | Path) -> Path:
    """The path that a file in `folder` names `text`, as `recorded_path` wrote it."""
    if text.startswith("~/"):
        return Path(os.path.expanduser("~")) / text[2:]
    return Path(folder) / text


def recorded_name(name: str) -> str:
    """A model's name for a record: a folder below the home as `~/...`, all else as typed."""
    for home in _homes():
        if _is_below(name, home):
            return "~/" + os.path.relpath(name, home)
    return redact_tokens(name)


def _homes() -> list[str]:
    """The home as it is called and as it is, longest first; none where it is no folder's name."""
    home = os.path.expanduser("~").rstrip("/")
    names = {home, os.path.realpath(home)} if home.startswith("/") else set()
    return sorted(names - {"/"}, key=len, reverse=True)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def _secrets() -> list[str]:
    """Secret values of the environment, longest first, for one may hold another."""
    values = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH
    }
    return sorted(values, key=len, reverse=True)
