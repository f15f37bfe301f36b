"""The command line: how options are declared, and how commands run, answer errors, and end."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from types import FrameType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from svdpp import __version__
from svdpp.cli.console import Console
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

#: The first sentence of each command's help. A command's module is imported only to run it.
COMMANDS: Mapping[str, str] = {
    "run": "Animate images: each becomes a clip.",
    "plan": "Show which rank does which steps, when, and how long it takes.",
    "simulate": "Rehearse a run with real processes, without weights or GPUs.",
    "verify": "Prove that the pipeline's clips equal those of diffusers, bit for bit.",
    "profile": "Measure the costs that plans are based on.",
    "bench": "Measure a pipeline against data parallel and against diffusers on one device.",
    "serve": "Serve clips over HTTP, with a queue that survives crashes and a web page.",
    "models": "List the families of models, and what one family or checkpoint takes.",
    "report": "Say what limits a finished run, and what would make it faster.",
    "doctor": "Check in half a minute that a run has what it needs.",
    "env": "Show versions, devices, ffmpeg and settings, ready to paste into a report.",
}

# Where a command is not in the module of its name.
_MODULES = {"env": "doctor"}

_HELP = """Run video diffusion on several devices by splitting the denoising steps.

Every clip has the same bits as from diffusers on one device, and `svdpp verify` proves it. The
pipeline finishes more clips per hour; pairs of ranks (--cfg-parallel 2) make each clip sooner.
"""

#: Paragraphs at the end of the help.
EPILOG = """
Variables such as SVDPP_MODEL set defaults of options; svdpp env shows them. For completion in bash
(zsh, fish): eval "$(_SVDPP_COMPLETE=bash_source svdpp)".

Exit codes: 0 success; 1 unexpected error; 2 wrong request; 3 verify found a difference; 4 out of
memory; 5 model missing, gated, incomplete or not safetensors; 6 a rank died or stalled; 7 input
unreadable or hostile; 8 output cannot be written; 9 a latent is not finite; 10 a benchmark missed a
target; 128 + n ended by signal n. If several clips fail, the exit code is the highest of theirs.
"""

# The annotation for the launcher's world.
_LAUNCHED = World | None
# Key of the context's `meta`: the words of the command line.
_WORDS = "svdpp.words"
# Rank 0 may have failed with the same error before it could listen.
_REPORT_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class Panel(str):
    """A panel of the help, which declares its options."""

    __slots__ = ()

    def setting(self, metavar: str, help: str, *names: str, **more: Any) -> Any:
        """A field that is an option with a value; without `names` its own name with dashes.

        `metavar` is "" for the choices of a `Literal`; `more` are the field's `default`, `shown`
        for its text in the help, `between` for limits of a whole number, and arguments of click.
        """
        default = more.pop("default", None)
        about = {"panel": self, "metavar": metavar, "help": help, "names": names, **more}
        return field(default=default, metadata=about)

    def switch(self, help: str, *names: str, default: Any = False, **more: Any) -> Any:
        """A field that is an option without a value; arguments as for `setting`."""
        return self.setting("", help, *names, default=default, **more)


VIDEO = Panel("Video")
PROMPTS = Panel("Prompts")
MODEL = Panel("Model and precision")
LAYOUT = Panel("Layout")
COSTS = Panel("Costs")
MEMORY = Panel("Memory")
SERVICE = Panel("Service")
RECOVERY = Panel("Recovery")
DIAGNOSTICS = Panel("Diagnostics")
_PANELS = (SERVICE, VIDEO, PROMPTS, MODEL, LAYOUT, COSTS, MEMORY, RECOVERY, DIAGNOSTICS)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """A field that is an argument of the command; None if it is not given."""
    return field(default=None, metadata={"metavar": metavar, "help": help, **more})


class Option(click.Option):
    """An option with its panel in the help, and a variable for each of its long names."""

    def __init__(self, name: str, *, panel: Panel, **about: Any) -> None:
        names = about.pop("names") or (f"--{name.replace('_', '-')}",)
        variables = [f"SVDPP_{each[2:].replace('-', '_').upper()}" for each in names if each[2:]]
        about["envvar"] = variables
        shown = about.pop("shown", "") or not about.get("count")
        super().__init__([name, *names], show_default=shown, **about)
        self.panel = panel


class _Choice(click.Choice):  # type: ignore[type-arg]
    """Also takes a choice by a name that it had before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from svdpp.plan.layout import present_split

        return super().convert(present_split(value), param, ctx)


def _parameters(group: Any, command: Command) -> Iterator[click.Parameter]:
    """The options and arguments of a group for click, with its values as defaults."""
    hints = get_type_hints(type(group))
    for each in fields(group):
        if each.name in command.without:
            continue
        about = {**_typed(hints[each.name]), **each.metadata}
        about["help"] = command.meanings.get(each.name, about["help"])
        if "panel" not in about:
            multiple = about.pop("multiple", False)
            yield click.Argument(
                [each.name], **{"nargs": -1 if multiple else 1, "required": False, **about}
            )
            continue
        if (between := about.pop("between", None)) is not None:
            about["type"] = click.IntRange(*between)
        about["shown"] = command.defaults.get(each.name, about.get("shown", ""))
        about["metavar"] = about["metavar"] or None
        yield Option(each.name, **about, default=getattr(group, each.name))


def _typed(hint: Any) -> dict[str, Any]:
    """click's arguments for values of this type."""
    origin, inner = get_origin(hint), get_args(hint)
    if type(None) in inner:
        return _typed(inner[0])
    if origin is Literal:
        return {"type": _Choice(inner)}
    if origin is list:
        return {"type": inner[0], "multiple": True}
    if origin is tuple:
        return {"type": inner[0], "nargs": len(inner)}
    return {"is_flag": True} if hint is bool else {"type": hint}


@dataclass(frozen=True, kw_only=True)
class TalkOptions:
    """Options that every command has; its `Console` follows them."""

    as_json: bool = DIAGNOSTICS.switch("Print results and errors as JSON.", "--json")
    debug: bool = DIAGNOSTICS.switch("Show tracebacks with errors.")
    quiet: bool = DIAGNOSTICS.switch("Print no progress and no remarks.", "--quiet", "-q")


class Command(click.Command):
    """One command of the program.

    Its function takes option groups (frozen dataclasses whose fields are options or arguments),
    `Console`, `click.Context`, and `World | None` for the launcher's world, each by its annotation.

    Args:
        without: fields of its groups that the command does not offer; they keep their defaults.
        defaults: this command's own text for the default of a parameter, by name.
        meanings: this command's own help for a parameter, by name.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *,
        examples: Sequence[str] = (),
        without: Sequence[str] = (),
        defaults: Mapping[str, str] | None = None,
        meanings: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.examples, self.without = function, examples, without
        self.defaults, self.meanings = defaults or {}, meanings or {}
        self._hints = get_type_hints(function)
        self._hints.pop("return", None)
        super().__init__(
            function.__name__,
            help=function.__doc__,
            epilog="\n".join(["\b", "Examples:", *(f"  {each}" for each in examples)]),
            context_settings={**_HELP_NAMES, **(settings or {})},
        )
        # An instance of each group, with the command's defaults.
        self._groups: dict[str, Any] = {}
        for name, given in inspect.signature(function).parameters.items():
            if is_dataclass(self._hints[name]):
                new: Any = self._hints[name]
                self._groups[name] = new() if given.default is given.empty else given.default
        for group in (*self._groups.values(), TalkOptions()):
            self.params += _parameters(group, self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        ctx.meta[_WORDS] = [word.partition("=")[0] for word in args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        """Calls the function, and ends the program if it fails."""
        values, typed = ctx.params, given_options(ctx)
        names = {opt: typed.get(str(one.name), opt) for one in self.params for opt in one.opts}
        console = Console(as_json=values["as_json"], quiet=values["quiet"], typed=names)
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

    def panels(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        """Its arguments and options in the order of the help."""
        found: dict[str, list[click.Parameter]] = {"Arguments": []}
        found |= {panel: [] for panel in _PANELS}
        for one in self.get_params(ctx):
            is_argument = isinstance(one, click.Argument)
            found["Arguments" if is_argument else getattr(one, "panel", DIAGNOSTICS)].append(one)
        return {title: members for title, members in found.items() if members}

    def format_arguments(self, *_: object) -> None:
        """Writes nothing: `format_options` does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes arguments and options, panel by panel."""
        for title, members in self.panels(ctx).items():
            with formatter.section(title):
                records = (one.get_help_record(ctx) for one in members)
                formatter.write_dl([record for record in records if record], col_max=28)


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are those of `Command`."""
    return lambda function: Command(function, **about)


def given_options(context: click.Context) -> dict[str, str]:
    """The options on the command line as typed, such as `--gpus` for `--world`, by parameter."""
    words = context.meta[_WORDS]
    return {
        str(one.name): next((opt for opt in one.opts if opt in words), one.opts[0])
        for one in context.command.params
        if isinstance(one, Option)
        and context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    }


def command_named(name: str) -> Command:
    """The command of that name; its module is imported."""
    found: Command = getattr(import_module(f"svdpp.cli.{_MODULES.get(name, name)}"), name)
    return found


class App(click.Group):
    """The program; a command is imported only if it is named."""

    def __init__(self) -> None:
        super().__init__(
            "svdpp",
            help=_HELP,
            epilog=EPILOG,
            subcommand_metavar="COMMAND ...",
            options_metavar="",
            context_settings=_HELP_NAMES,
        )
        click.version_option(__version__, message="svdpp %(version)s")(self)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """See `click.Group`."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """See `click.Group`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command; its module is imported."""
        return command_named(cmd_name) if cmd_name in COMMANDS else None


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` name, and returns the exit code."""
    try:
        return App().main(list(arguments), prog_name="svdpp", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        sentence = error.format_message().strip().rstrip(".")
        # click does not say where a value is missing.
        path = " ".join(["svdpp", *arguments[:1]]) if context is None else context.command_path
        hint = f"{path} --help shows its usage"
        refused = RequestError(sentence[:1].lower() + sentence[1:], hint)
        Console(as_json="--json" in arguments).error(refused)
        return refused.exit_code
    except SystemExit as error:  # after a completion, or if the reader of stdout has ended
        return 128 + signal.SIGPIPE if error.code else 0


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
        if debug or not _is_told_elsewhere(error):
            console.error(error, debug=debug)
        raise click.exceptions.Exit(exit_code_of(error)) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether rank 0 reports `error`, which a rank that could not start sends there, or nobody."""
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
