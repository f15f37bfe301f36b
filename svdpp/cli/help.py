"""The help: common options are described, the others only named.

click's own help folds options at their hyphens, and shows either all of them or none.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from svdpp.cli.options.declare import HIDDEN_NAMES, PANELS, Option

_LEFT = 24
_MAX_WIDTH = 100


def help_option(show: Callable[[click.Context], None], *names: str, help: str) -> Option:
    """An option that shows something instead of running the command."""

    def answer(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            show(context)
            context.exit()

    about: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return Option(names, panel="Options", help=help, callback=answer, **about)


def show_page(
    context: click.Context, examples: Sequence[str], common: Sequence[str], *, whole: bool
) -> None:
    """Prints a command's help to stdout; without `whole` only `common` options are described."""
    _print(_page_lines(context, examples, common, _width(), whole=whole))


def show_overview(context: click.Context, commands: Mapping[str, str], epilog: str) -> None:
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
        click.echo(line)


def panels_of(parameters: Sequence[Any], common: Sequence[str]) -> dict[str, list[Any]]:
    """The options among `parameters` by panel, in the order of the help."""
    options = {one.name: one for one in parameters if isinstance(one, Option)}
    panels: dict[str, list[Any]] = {"Common": [options[name] for name in common]}
    panels |= {panel: [] for panel in PANELS}
    for name, option in options.items():
        if name not in common:
            panels.setdefault(option.panel, []).append(option)
    return {title: members for title, members in panels.items() if members}


def shown_names(option: Any) -> str:
    """An option's names and the placeholder of its value: `-o, --out DIR`."""
    names = [name for name in option.opts if name not in HIDDEN_NAMES]
    names.sort(key=lambda name: name.startswith("--"))
    return f"{', '.join(names)} {option.metavar or ''}".rstrip()


def described(parameter: Any) -> str:
    """A parameter's help with its default."""
    text, default = parameter.shown, parameter.default
    if not text and isinstance(parameter, Option) and not (parameter.is_flag or parameter.count):
        text = "" if default is None else str(default)
    return f"{parameter.help} [default: {text}]" if text else parameter.help


def _page_lines(
    context: click.Context,
    examples: Sequence[str],
    common: Sequence[str],
    width: int,
    *,
    whole: bool,
) -> Iterator[str]:
    arguments: list[Any] = [one for one in context.command.params if not isinstance(one, Option)]
    usage = " ".join(["[OPTIONS]", *(argument.metavar for argument in arguments)])
    yield from _usage(context, usage)
    yield from _prose(context.command.help or "", width)
    rows = [(argument.metavar, described(argument)) for argument in arguments]
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
        yield from ("", click.style("Examples", bold=True), *(f"  {one}" for one in examples))


def _long(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--")))


def _row(option: Any) -> tuple[str, str]:
    names = shown_names(option)
    # Long names line up, with or without a short name before them.
    return (names if not names.startswith("--") else f"    {names}"), described(option)


def _usage(context: click.Context, rest: str) -> Iterator[str]:
    yield click.style("Usage: ", bold=True) + f"{context.command_path} {rest}"


def _prose(text: str, width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)


def _section(title: str, rows: Iterator[tuple[str, str]] | Any, width: int) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    yield ""
    yield click.style(title, bold=True)
    for left, right in rows:
        yield from _entry(left, right, width)


def _entry(left: str, right: str, width: int) -> Iterator[str]:
    """`left` with `right` folded beside it, or below it if `left` is too long for its column."""
    lines = textwrap.wrap(
        right, width - _LEFT - 4, break_on_hyphens=False, break_long_words=False
    ) or [""]
    if len(left) <= _LEFT:
        head = click.style(left, fg="cyan") + " " * (_LEFT - len(left))
        yield f"  {head}  {lines.pop(0)}".rstrip()
    else:
        yield f"  {click.style(left, fg='cyan')}"
    for line in lines:
        yield " " * (_LEFT + 4) + line
