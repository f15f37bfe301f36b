"""The command line as the user typed it, for files that record it and hints that repeat it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextvars import ContextVar

_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


def remember(arguments: Sequence[str]) -> None:
    """Stores the arguments that follow the program's name."""
    _arguments.set(tuple(arguments))


def typed() -> str:
    """The whole command, quoted for a shell."""
    return shlex.join(["svdpp", *_arguments.get()])


def as_typed(message: str) -> str:
    """`message`, which names the number of ranks as `--world`, with the name that was typed."""
    typed_gpus = any(word.split("=")[0] == "--gpus" for word in _arguments.get())
    return re.sub(r"--world\b(?!-)", "--gpus", message) if typed_gpus else message


def to_go_on(drawn_seed: int | None) -> str:
    """The command that resumes this run, with the seed that was drawn for `random`, if any."""
    words = [word for word in _arguments.get() if word not in ("--overwrite", "--resume")]
    if drawn_seed is not None:
        words = [
            word.removesuffix("random") + str(drawn_seed)
            if word in ("random", "--seed=random", "--seeds=random")
            else word
            for word in words
        ]
    return shlex.join(["svdpp", *words, "--resume"])
