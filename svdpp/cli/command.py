"""The definition of a command: a function of option groups; and its help.

click's own help folds options at their hyphens, and shows either all of them or none.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import click

from svdpp.cli.console import Console
from svdpp.cli.defaults import Default
from svdpp.cli.failures import answered
from svdpp.cli.options.declare import HIDDEN_NAMES, PANELS, Option, declared, parameter
from svdpp.cli.options.outputs import TalkOptions
from svdpp.launch.world import World, find_world

# The annotation for the launcher's world.
_LAUNCHED = World | None
_EMPTY = inspect.Parameter.empty
_LEFT = 24
_MAX_WIDTH = 100


class Command(click.Command):
    """One command of the program.

    Its function takes option groups (frozen dataclasses whose fields are options, arguments or
    groups), `Console`, `click.Context`, and `World | None` for the launcher's world, each by its
    annotation.

    Args:
        examples: command lines for the help; all of them run.
        common: parameters in the panel Common, in order; empty: the help shows all options at once.
        without: fields of its groups that the command does not offer; they keep their defaults.
        defaults: this command's own text for the default of a parameter, by name.
        meanings: this command's own help for a parameter, by name.
        settings: click's settings of the context.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *,
        examples: Sequence[str] = (),
        common: Sequence[str] = (),
        without: Sequence[str] = (),
        defaults: Mapping[str, str] | None = None,
        meanings: Mapping[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.examples, self.common = function, examples, common
        self._without = frozenset(without)
        self._defaults, self._meanings = defaults or {}, meanings or {}
        self._hints = get_type_hints(function)
        self._hints.pop("return", None)
        super().__init__(
            function.__name__,
            help=function.__doc__,
            context_settings=settings,
            add_help_option=False,
        )
        for name, given in inspect.signature(function).parameters.items():
            if is_dataclass(self._hints[name]):
                self.params += self._flat(self._hints[name], given.default)
        self.params += self._flat(TalkOptions, _EMPTY)
        self.params.append(help_option(self._short_help, "-h", "--help", help="Show this help."))
        self.params.append(help_option(self._long_help, "--help-all", help="Show all options."))

    def invoke(self, ctx: click.Context) -> None:
        """Calls the function, and ends the program if it fails."""
        values = ctx.params
        console = Console(
            as_json=values["as_json"],
            quiet=values["quiet"],
            set_elsewhere=_set_elsewhere(ctx),
        )
        with answered(console, debug=values["debug"]):
            known: dict[Any, Any] = {Console: console, click.Context: ctx}
            if _LAUNCHED in self._hints.values():
                known[_LAUNCHED] = find_world()
            self.function(
                **{
                    name: known[hint] if hint in known else self._built(hint, values)
                    for name, hint in self._hints.items()
                }
            )

    def _flat(self, group: Any, default: Any) -> Iterator[click.Parameter]:
        """The parameters of a group, whose instance `default` has the defaults, if there is one."""
        for name, (hint, about) in declared(group).items():
            value = getattr(group if default is _EMPTY else default, name, _EMPTY)
            if name in self._without:
                continue
            if not about:
                yield from self._flat(hint, value)
                continue
            about = {**about, "help": self._meanings.get(name, about["help"])}
            if name in self._defaults:
                about["shown"] = self._defaults[name]
            if "panel" in about:
                about["default"] = value
            yield parameter(name, hint, about)

    def _built(self, group: Any, values: Mapping[str, Any]) -> Any:
        return group(
            **{
                name: self._built(hint, values) if not about else values[name]
                for name, (hint, about) in declared(group).items()
                if name not in self._without
            }
        )

    def _short_help(self, context: click.Context) -> None:
        show_page(context, self.examples, self.common, whole=not self.common)

    def _long_help(self, context: click.Context) -> None:
        show_page(context, self.examples, self.common, whole=True)


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are those of `Command`."""
    return lambda function: Command(function, **about)


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command's parameter `name` was given on the command line."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def given_options(context: click.Context) -> dict[str, str]:
    """The options given on the command line as users type them, by parameter."""
    return {
        str(parameter.name): next(
            (name for name in reversed(parameter.opts) if name not in HIDDEN_NAMES),
            str(parameter.name),
        )
        for parameter in context.command.params
        if is_given(context, str(parameter.name))
    }


def _set_elsewhere(context: click.Context) -> dict[str, str]:
    """Source of each option that a file or variable sets, by all names of the option."""
    found, defaults = {}, context.obj or {}
    for option in context.command.params:
        name = str(option.name)
        if context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP:
            default: Default | None = defaults.get(name)
            repeated = context.params.get("repeat")  # a manifest overrides all other defaults
            where = str(repeated) if repeated else default.source if default else ""
            found.update(dict.fromkeys(option.opts, where))
    return found


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
