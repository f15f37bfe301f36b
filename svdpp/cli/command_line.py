"""The command line as it was typed, for hints that repeat it, and as a manifest records it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import click

from svdpp.errors import InputError
from svdpp.redaction import located_path, recorded_path

# Parameters of `svdpp run` that do not affect its clips, or that the manifest's clips hold.
_LEFT_OUT = frozenset(
    {
        *("inputs", "seeds", "seed", "recursive", "keep_going", "repeat", "overwrite", "resume"),
        *("dry_run", "trace", "profile", "as_json", "debug", "quiet", "verbose"),
        *("log_file", "help", "help_all"),
    }
)
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


def recordable_options(context: click.Context, folder: Path) -> dict[str, Any]:
    """The options that were set, for a manifest in `folder`.

    A path becomes an object with the path relative to the folder, so that the manifest can be moved
    together with the files.
    """
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name not in _LEFT_OUT and source is not None and source.name != "DEFAULT":
            is_path = isinstance(value, Path) or (isinstance(value, str) and os.path.exists(value))
            given[name] = {"path": recorded_path(value, folder)} if is_path else value
    return given


def recorded_options(path: Path) -> dict[str, Any]:
    """Photographs, seeds and options of the run with the manifest at `path`, by parameter."""
    from svdpp.driver.run_manifest import read_manifest

    content = read_manifest(path)
    folder = path.parent
    try:
        options = {name: _text(value, folder) for name, value in content["options"].items()}
        clips = [clip for clip in content["clips"] if "input" in clip]
        photos = filter(None, (clip["input"] for clip in clips))  # a clip from text has none
        inputs = dict.fromkeys(str(located_path(photo, folder)) for photo in photos)
        seeds = dict.fromkeys(str(clip["seed"]) for clip in clips)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} does not say how its clips were made") from error
    return {"out": str(folder), **options, "inputs": tuple(inputs), "seeds": ",".join(seeds)}


def _text(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return str(located_path(value["path"], folder))
    if isinstance(value, list):
        return [str(each) for each in value]
    return value if isinstance(value, bool) else str(value)
