"""The help: common options are described, the others only named.

Typer's own help is too wide for 80 columns: borders and types take half of them.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer

from svdpp.cli.options.declare import HIDDEN_NAMES, PANELS

_LEFT = 24
_MAX_WIDTH = 100


def show_page(
    context: typer.Context, examples: Sequence[str], common: Sequence[str], *, whole: bool
) -> None:
    """Prints a command's help to stdout; without `whole` only `common` options are described."""
    _print(_page_lines(context, examples, common, _width(), whole=whole))


def show_overview(context: typer.Context, commands: Mapping[str, str], epilog: str) -> None:
    """Prints the help of the program itself to stdout."""
    width = _width()
    lines = [*_usage(context, "COMMAND ..."), *_prose(context.command.help or "", width)]
    lines += _section("Commands", commands.items(), width)
    lines += _section("Options", map(_row, context.command.params), width)
    _print([*lines, *_prose(epilog, width)])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def panels_of(parameters: Sequence[Any], common: Sequence[str]) -> dict[str, list[Any]]:
    """The options among `parameters` by panel, in the order of the help."""
    options = {one.name: one for one in parameters if one.param_type_name == "option"}
    panels: dict[str, list[Any]] = {"Common": [options[name] for name in common]}
    panels |= {panel: [] for panel in PANELS}
    for name, option in options.items():
        if name not in common:
            panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    return {title: members for title, members in panels.items() if members}


def shown_names(option: Any) -> str:
    """An option's names and the placeholder of its value: `-o, --out DIR`."""
    names = [name for name in option.opts if name not in HIDDEN_NAMES]
    names.sort(key=lambda name: name.startswith("--"))
    return f"{', '.join(names)} {option.metavar or ''}".rstrip()


def described(parameter: Any) -> str:
    """A parameter's help with its default."""
    default, shown = parameter.default, parameter.show_default
    if isinstance(shown, str):
        text = shown
    elif default is None or isinstance(default, bool) or getattr(parameter, "count", False):
        text = ""
    else:
        text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{parameter.help} [default: {text}]" if text else parameter.help or ""


def _page_lines(
    context: typer.Context,
    examples: Sequence[str],
    common: Sequence[str],
    width: int,
    *,
    whole: bool,
) -> Iterator[str]:
    arguments = [one for one in context.command.params if one.param_type_name == "argument"]
    usage = " ".join(["[OPTIONS]", *(argument.metavar or "" for argument in arguments)])
    yield from _usage(context, usage)
    yield from _prose(context.command.help or "", width)
    rows = [(argument.metavar or "", described(argument)) for argument in arguments]
    yield from _section("Arguments", rows, width)
    panels = panels_of(context.command.params, common)
    help_options = panels.pop("Options", [])
    shown = panels if whole else {"Common": panels.pop("Common")}
    shown.get("Common", list(shown.values())[-1]).extend(help_options)
    for title, members in shown.items():
        yield from _section(title, map(_row, members), width)
    if not whole:
        named = [
            (title, " ".join(_long(each) for each in members)) for title, members in panels.items()
        ]
        yield from _section("More, described by --help-all", named, width)
    if examples:
        yield from ("", typer.style("Examples", bold=True), *(f"  {one}" for one in examples))


def _long(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--")))


def _row(option: Any) -> tuple[str, str]:
    names = shown_names(option)
    # Long names line up, with or without a short name before them.
    return (names if not names.startswith("--") else f"    {names}"), described(option)


def _usage(context: typer.Context, rest: str) -> Iterator[str]:
    yield typer.style("Usage: ", bold=True) + f"{context.command_path} {rest}"


def _prose(text: str, width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)


def _section(title: str, rows: Iterator[tuple[str, str]] | Any, width: int) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    yield ""
    yield typer.style(title, bold=True)
    for left, right in rows:
        yield from _entry(left, right, width)


def _entry(left: str, right: str, width: int) -> Iterator[str]:
    """`left` with `right` folded beside it, or below it if `left` is too long for its column."""
    lines = textwrap.wrap(
        right, width - _LEFT - 4, break_on_hyphens=False, break_long_words=False
    ) or [""]
    if len(left) <= _LEFT:
        head = typer.style(left, fg="cyan") + " " * (_LEFT - len(left))
        yield f"  {head}  {lines.pop(0)}".rstrip()
    else:
        yield f"  {typer.style(left, fg='cyan')}"
    for line in lines:
        yield " " * (_LEFT + 4) + line
