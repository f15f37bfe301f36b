"""A command: a function of option groups, its help, and its answer to errors and signals."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from types import FrameType
from typing import Any, NoReturn, get_type_hints

import click

from svdpp.cli.console import Console
from svdpp.cli.options.declare import (
    DIAGNOSTICS,
    PANELS,
    Option,
    parameters,
    set_by_variables,
)
from svdpp.errors import (
    Interrupted,
    RankError,
    RequestError,
    SvdppError,
    error_to_dict,
    exit_code_of,
)
from svdpp.launch import process_lifetime
from svdpp.launch.world import World, find_world, is_member

# The annotation for the launcher's world.
_LAUNCHED = World | None
_LEFT = 28
# Key of the context's `meta`: whether the help shows all options.
_ALL = "svdpp.all"
# Another key: the names of options as they were typed, and the values between them.
_TYPED = "svdpp.typed"
# Rank 0 may have failed with the same error before it could listen.
_REPORT_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class TalkOptions:
    """Options that every command has; its `Console` follows them."""

    as_json: bool = DIAGNOSTICS.switch("Print results and errors as JSON.", "--json")
    debug: bool = DIAGNOSTICS.switch("Show tracebacks with errors.")
    quiet: bool = DIAGNOSTICS.switch("Print no progress and no remarks.", "--quiet", "-q")


class _Formatter(click.HelpFormatter):
    """click's, which folds text at the hyphens of options; these hyphens do not break."""

    def write_text(self, text: str) -> None:
        super().write_text(_unbroken(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], *_: Any, **_more: Any) -> None:
        super().write_dl([(left, _unbroken(right)) for left, right in rows], _LEFT)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def _unbroken(text: str) -> str:
    return text.replace("-", _HYPHEN)


class Context(click.Context):
    """The context of a command; its help is at most 100 columns wide."""

    formatter_class = _Formatter

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"max_content_width": 100, **more})


class Command(click.Command):
    """One command of the program.

    Its function takes option groups (frozen dataclasses whose fields are options or arguments),
    `Console`, `click.Context`, and `World | None` for the launcher's world, each by its
    annotation.

    Args:
        examples: command lines for the help; all of them run.
        common: parameters in the panel Common, in order; empty: the help shows all options at once.
        without: fields of its groups that the command does not offer; they keep their defaults.
        defaults: this command's own text for the default of a parameter, by name.
        meanings: this command's own help for a parameter, by name.
        settings: click's settings of the context.
    """

    context_class = Context

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
        self._hints = get_type_hints(function)
        self._hints.pop("return", None)
        super().__init__(
            function.__name__,
            help=function.__doc__,
            context_settings=settings,
            add_help_option=False,
        )
        # An instance of each group, with the command's defaults.
        self._groups: dict[str, Any] = {}
        for name, given in inspect.signature(function).parameters.items():
            if is_dataclass(self._hints[name]):
                new: Any = self._hints[name]
                self._groups[name] = new() if given.default is given.empty else given.default
        for group in (*self._groups.values(), TalkOptions()):
            self.params += parameters(group, without, defaults or {}, meanings or {})
        self.params.append(help_option("-h", "--help", help="Show this help."))
        self.params.append(help_option("--help-all", help="Show all options."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        ctx.meta[_TYPED] = [word.partition("=")[0] for word in args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        """Calls the function, and ends the program if it fails."""
        values = ctx.params
        console = Console(
            as_json=values["as_json"],
            quiet=values["quiet"],
            variables=set_by_variables(ctx),
            typed={one.names[-1]: _typed_name(ctx, one) for one in _given(ctx).values()},
        )
        with answered(console, debug=values["debug"]):
            known: dict[Any, Any] = {Console: console, click.Context: ctx}
            if _LAUNCHED in self._hints.values():
                known[_LAUNCHED] = find_world()
            self.function(
                **{name: known[hint] for name, hint in self._hints.items() if hint in known},
                **{
                    name: replace(group, **{n: values[n] for n in vars(group) if n in values})
                    for name, group in self._groups.items()
                },
            )

    def format_arguments(self, *_: object) -> None:
        """Writes nothing: `format_options` does, with every version of click."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the arguments, the common options or all of them, and the examples."""
        arguments = [one for one in self.params if not isinstance(one, Option)]
        panels: dict[str, Sequence[Any]] = {"Arguments": arguments, **panels_of(self)}
        others = {} if ctx.meta.get(_ALL) or not self.common else dict(list(panels.items())[2:])
        for title, members in panels.items():
            if members and title not in others:
                _section(formatter, title, [one.get_help_record(ctx) for one in members])
        more = [
            (name, " ".join(_long_name(one) for one in found)) for name, found in others.items()
        ]
        _section(formatter, "More, described by --help-all", more)
        if self.examples:
            formatter.write("\nExamples:\n" + "".join(f"  {one}\n" for one in self.examples))


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are those of `Command`."""
    return lambda function: Command(function, **about)


def given_options(context: click.Context) -> dict[str, str]:
    """The options given on the command line as they were typed, by parameter."""
    return {name: _typed_name(context, option) for name, option in _given(context).items()}


def _given(context: click.Context) -> dict[str, Option]:
    return {
        str(option.name): option
        for option in context.command.params
        if isinstance(option, Option)
        and context.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE
    }


def _typed_name(context: click.Context, option: Option) -> str:
    """The long name under which the option was given, such as `--gpus` for `--world`."""
    typed = (name for name in option.opts if name in context.meta[_TYPED])
    return next((name for name in typed if name.startswith("--")), option.names[-1])


def help_option(*names: str, help: str, text: str = "") -> Option:
    """An option that prints `text`, or the command's help, instead of running the command."""

    def answer(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            context.meta[_ALL] = "--help-all" in option.opts
            click.echo(text or context.get_help())
            context.exit()

    about: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return Option([*names], panel="", help=help, callback=answer, **about)


def panels_of(command: Command) -> dict[str, list[Option]]:
    """The options of a command by panel, in the order of the help; the first has --help."""
    options = {str(one.name): one for one in command.params if isinstance(one, Option)}
    panels = {"Common": [options.pop(name) for name in command.common]}
    panels |= {panel: [] for panel in PANELS}
    last = [options.pop(name) for name in ("help", "help_all")]
    for option in options.values():
        panels[option.panel].append(option)
    panels = {title: members for title, members in panels.items() if members}
    panels["Common" if command.common else [*panels][-1]] += last
    return panels


def _long_name(option: Option) -> str:
    return next(name for name in option.names if name.startswith("--"))


def _section(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


@contextlib.contextmanager
def answered(console: Console, *, debug: bool) -> Iterator[None]:
    """Reports signals and errors of the block in one sentence, and exits with their code."""
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    except click.exceptions.Exit:
        raise
    except (Interrupted, Exception) as error:
        if isinstance(error, Interrupted):
            previous = {}  # keep `end_at_once` for a second signal until the process ends
        _say(console, error, debug=debug)
        raise click.exceptions.Exit(exit_code_of(error)) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(console: Console, error: BaseException, *, debug: bool) -> None:
    """Reports the error once in a run: rank 0 does it if there are several processes."""
    if debug or not _is_told_elsewhere(error):
        console.error(error, debug=debug)


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether another process reports `error` to the user, or it needs no report.

    If this is a rank other than 0 that could not start, sends the error to rank 0.
    """
    try:
        launched = find_world()
    except RequestError:
        return False
    if not is_member(launched):
        return False
    if not isinstance(error, SvdppError) or isinstance(error, RankError):
        return not isinstance(error, Exception) or launched.local_rank != 0
    from svdpp.worker.rank import report_failure

    return report_failure(launched, error_to_dict(error), timeout=_REPORT_SECONDS)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Ends the run in order at the first signal, and at once at the second."""
    for other in _SIGNALS:
        signal.signal(other, end_at_once)
    raise Interrupted(number)


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """Ends the process silently as by signal `number`; its ranks notice and end, too."""
    process_lifetime.remove_temp_files()
    os._exit(128 + number)
