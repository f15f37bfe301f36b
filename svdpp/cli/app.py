"""The command line as a whole: the list of commands, and how a command is run."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from svdpp import __version__
from svdpp.cli.command import Command, Context, help_option
from svdpp.cli.console import Console
from svdpp.cli.options.declare import HIDDEN_NAMES, set_by_variables
from svdpp.errors import RequestError, SvdppError, nearest

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
unreadable or hostile; 8 output cannot be written; 9 a latent is not finite; 10 a bench missed a
target; 128 + n ended by signal n. If several clips fail, the exit code is the highest of theirs.
"""


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` name, and returns the exit code."""
    try:
        return App().main(list(arguments), prog_name="svdpp", standalone_mode=False) or 0
    except SvdppError as error:
        Console(as_json="--json" in arguments).error(error)
        return error.exit_code
    except click.ClickException as error:
        return _wrong_usage(error, arguments)
    except click.Abort:
        return 1
    except SystemExit as error:  # after a completion, or if the reader of stdout has ended
        return 128 + signal.SIGPIPE if error.code else 0


def _wrong_usage(error: click.ClickException, arguments: Sequence[str]) -> int:
    """Reports a command line that click refuses, and returns the exit code."""
    sentence, near = _usage_sentence(error)
    context = getattr(error, "ctx", None)
    named = " ".join(["svdpp", *arguments[:1]])  # click does not say where a value is missing
    path = context.command_path if context is not None else named
    refused = RequestError(sentence, near or f"{path} --help shows its usage")
    variables = {} if context is None else set_by_variables(context)
    Console(as_json="--json" in arguments, variables=variables).error(refused)
    return refused.exit_code


def _usage_sentence(error: click.ClickException) -> tuple[str, str]:
    """What is wrong with the command line, and the nearest option; "" if none is near."""
    if isinstance(error, click.NoSuchOption):
        name, known = error.option_name, {*(error.possibilities or ())} - HIDDEN_NAMES
        return f"no such option: {name}", nearest(name, known)
    if isinstance(error, click.BadParameter) and error.param is not None:
        names = [name for name in error.param.opts if name.startswith("--")]
        shown = "/".join(name for name in names if name not in HIDDEN_NAMES)
        is_missing = isinstance(error, click.MissingParameter)
        what = "is missing" if is_missing else error.message
        return f"{shown or error.param.metavar or error.param.name} {what}", ""
    sentence = error.format_message().strip().rstrip(".")
    return sentence[:1].lower() + sentence[1:], ""


def command_named(name: str) -> Command:
    """The command of that name; its module is imported."""
    found: Command = getattr(import_module(f"svdpp.cli.{_MODULES.get(name, name)}"), name)
    return found


class App(click.Group):
    """The program; a command is imported only if it is named."""

    context_class = Context

    def __init__(self) -> None:
        super().__init__(
            "svdpp",
            help=_HELP,
            epilog=EPILOG,
            invoke_without_command=True,
            add_help_option=False,
            subcommand_metavar="COMMAND ...",
            options_metavar="",
        )
        self.params = [
            help_option("-h", "--help", help="Show this help."),
            help_option("--version", help="Show the version.", text=f"svdpp {__version__}"),
        ]

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command, or shows the help if there is none."""
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
            ctx.exit(2)
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """See `click.Group`."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """See `click.Group`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; its module is imported."""
        if cmd_name in COMMANDS:
            return command_named(cmd_name)
        if cmd_name.startswith("-") or ctx.resilient_parsing:
            return None
        hint = nearest(cmd_name, COMMANDS, "svdpp --help lists the commands")
        raise RequestError(f"no such command: {cmd_name}", hint)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the name of a command without importing any."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]
