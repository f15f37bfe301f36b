"""The conversion of a command line's texts into values of the annotated types.

Typer's own conversion imports pydantic and builds a model for each option. That takes longer than
the rest of a light command, and its errors speak of pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import typer

_KINDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def convert_without_typer(context: typer.Context, kinds: Mapping[str, Any]) -> None:
    """Replaces the conversion of the command's parameters; call it before they are converted.

    A parameter without an entry in `kinds` is a flag.
    """
    for parameter in context.command.params:
        processed = partial(_process, parameter, _plain(kinds.get(str(parameter.name), bool)))
        parameter.process_value = processed  # type: ignore[method-assign]


def _process(parameter: Any, kind: Any, context: typer.Context, value: Any) -> Any:
    """A parameter's value; replaces Typer's `process_value`."""
    if value not in (None, ()):
        value = _converted(kind, value)
    elif parameter.required:
        raise typer.BadParameter("is missing", ctx=context, param=parameter)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _converted(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return [_converted(inner[0], each) for each in value]
    if origin is tuple:
        return tuple(_converted(*pair) for pair in zip(inner, value, strict=True))
    convert: Callable[[Any], Any] = kind
    try:
        return convert(value)
    except ValueError:
        raise typer.BadParameter(f"must be {_KINDS[kind]}, got {value!r}") from None


def _plain(kind: Any) -> Any:
    """`kind` without `| None`."""
    if isinstance(kind, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind
