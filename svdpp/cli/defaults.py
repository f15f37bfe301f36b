"""The defaults that a user sets: svdpp.toml, [tool.svdpp], and SVDPP_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from svdpp.errors import InputError, RequestError

_PREFIX = "SVDPP_"
# Set by svdpp itself, and by Kubernetes for a service that is named svdpp.
_NOT_OURS = re.compile(r"FORK_SERVER_STARTER|SERVICE_(HOST|PORT)\w*|PORT(_\w+)?")


# Name of the parameter, its type, and the option's names.
_Known = tuple[str, Any, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Default:
    """The value of an option that is not given on the command line."""

    names: tuple[str, ...]
    """Of the option as users type it, the one that is set first."""
    parameter: str
    """Name of the parameter."""
    value: Any
    source: str
    """The file or variable that sets it."""


def load_defaults(
    folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, Default]:
    """The defaults that the user sets, by parameter; variables override the file."""
    folder = folder or Path()
    # Usually neither exists, and the option groups need not be imported.
    variables = sorted(name for name in environment if name.startswith(_PREFIX))
    files = list(_file_settings(folder))
    if not (variables or files):
        return {}
    files += [
        (name.removeprefix(_PREFIX).lower(), environment[name], name)
        for name in variables
        if environment[name] and not _NOT_OURS.fullmatch(name.removeprefix(_PREFIX))
    ]
    known = _known_options()
    found = (_default(known, key, value, source) for key, value, source in files)
    return {default.parameter: default for default in found}


def _file_settings(folder: Path) -> Iterator[tuple[str, Any, str]]:
    own, shared = folder / "svdpp.toml", folder / "pyproject.toml"
    if own.is_file():
        path, settings = own, _read(own)
    elif shared.is_file() and b"tool.svdpp" in shared.read_bytes():
        path, settings = shared, _read(shared).get("tool", {}).get("svdpp", {})
    else:
        return
    for key, value in settings.items():
        yield key, value, path.name


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path.name!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path.name!r} is not TOML: {error}") from error


def _default(known: Mapping[str, _Known], key: str, value: Any, source: str) -> Default:
    """The default as a command line has it: a text, true or false, or several texts."""
    name = key.replace("_", "-")
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "svdpp run --help-all lists the options"
        raise RequestError(
            f"{source} sets {key!r}, which is not an option"
            if source != _PREFIX + key.upper()
            else f"{source} does not name an option",
            hint,
        )
    parameter, kind, names = known[name]
    if isinstance(value, list):
        value = tuple(map(str, value))
    elif kind is not bool:
        value = str(value)
    names = tuple(dict.fromkeys((f"--{name}", *names)))
    return Default(names=names, parameter=parameter, value=value, source=source)


def _known_options() -> dict[str, _Known]:
    """Each shared option by its long names."""
    from svdpp.cli.options.declare import declared
    from svdpp.cli.options.inputs import InputOptions
    from svdpp.cli.options.layout import LayoutOptions, RankOptions
    from svdpp.cli.options.model import ModelOptions
    from svdpp.cli.options.outputs import LogOptions, OutputOptions, TalkOptions, TraceOptions
    from svdpp.cli.options.sampling import SamplingOptions
    from svdpp.cli.options.serve import ServeOptions
    from svdpp.cli.plan import ForecastOptions, SecondsOptions

    groups: tuple[Any, ...] = (
        *(SecondsOptions, ForecastOptions, InputOptions, LayoutOptions),
        *(ModelOptions, OutputOptions, TraceOptions, RankOptions, SamplingOptions, TalkOptions),
        *(LogOptions, ServeOptions),
    )
    return {
        name[2:]: (field, hint, about["names"])
        for group in groups
        for field, (hint, about) in declared(group).items()
        for name in about.get("names", ())
        if name.startswith("--")
    }
