"""Entry point of the program `svdpp`: runs the command that the user names.

To start fast, the program imports a command's module only when that command runs.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from svdpp import __version__
from svdpp.cli.command import show_all_options
from svdpp.cli.console import Console
from svdpp.cli.failures import report_usage_error
from svdpp.cli.lazy_options import LazyOptionGroup, help_option
from svdpp.cli.options.declare import flag
from svdpp.errors import Interrupted, SvdppError, exit_code_of

#: First sentence of each command's help.
COMMANDS: Mapping[str, str] = {
    "run": "Animate images: each becomes a clip.",
    "plan": "Show which rank does which steps, when, and how long it takes.",
    "simulate": "Rehearse a run with real processes, without weights or GPUs.",
    "verify": "Prove that the pipeline's clips equal those of diffusers, bit for bit.",
    "profile": "Measure the costs that plans are based on.",
    "bench": "Measure a pipeline against data parallel and against diffusers on one device.",
    "serve": "Serve clips over HTTP, with a web page and a queue that survives crashes.",
    "models": "List the families of models, and what one family or checkpoint takes.",
    "report": "Say what limits a finished run, and what would make it faster.",
    "doctor": "Check in half a minute that a run has what it needs.",
    "env": "Show versions, devices, ffmpeg and settings, ready to paste into a report.",
}

_HELP = """\
Run video diffusion on several devices by splitting the denoising steps.

Every clip has the same bits as from diffusers on one device, and svdpp verify proves it. The \
pipeline finishes more clips per hour; pairs of ranks (--cfg-parallel 2) make each clip sooner.
"""

#: Paragraphs at the end of the program's help.
EPILOG = """\
The variables SVDPP_MODEL, SVDPP_DEVICE, SVDPP_DATA, SVDPP_QUEUE, SVDPP_FILES and SVDPP_LOG_FILE \
set the defaults of the options that they are named after; SVDPP_API_KEY has the key for --server.

Exit codes: 0 success; 1 unexpected error; 2 wrong request; 3 verify found a difference; 4 out of \
memory; 5 model missing, gated, incomplete or not safetensors; 6 a rank died or stalled; 7 input \
unreadable or hostile; 8 output cannot be written; 9 a latent is not finite; 10 a benchmark missed \
a target; 11 the server of a run cannot be used; 128 + n ended by signal n. If several clips fail, \
the exit code is the highest of theirs.
"""

# Number of options that fit on a screen. If a command has more options, its help shows only the
# common options.
_ONE_SCREEN = 16


class LazyGroup(LazyOptionGroup):
    """Group of commands. The module of a command is imported only if the user names the command."""

    def resolve_command(  # type: ignore[override]  # the base class has a private context
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, Any, list[str]]:
        """Find the command that the command line names, and import its module.

        Args:
            ctx: Context of the program.
            args: Command line, beginning with the command's name.

        Returns:
            Name, command, and the rest of the command line. Name and command are None while a shell
            completes an unknown name.
        """
        name, stub, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, stub, rest
        command = load_command(name)
        # A shell completion (`resilient_parsing`) also proposes options that the help hides.
        if ctx.resilient_parsing:
            show_all_options(command)
        return name, command, rest


app = typer.Typer(name="svdpp", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"svdpp {__version__}")
        raise typer.Exit


@app.callback(
    help=_HELP,
    epilog=EPILOG,
    subcommand_metavar="COMMAND ...",
    options_metavar="",
    add_help_option=False,
)
def svdpp(
    version: Annotated[
        bool,
        flag(
            "--version",
            panel="Options",
            common=True,
            help="Show the version and exit.",
            is_eager=True,
            callback=_show_version,
        ),
    ] = False,
    help: Annotated[bool, help_option()] = False,
) -> None:
    """Handle the options of `svdpp` itself, such as `--version`; a command follows them."""


def _stub() -> None:
    raise AssertionError("LazyGroup runs the command itself")


for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(_stub)


def load_command(name: str) -> TyperCommand:
    """Import the module of one of svdpp's commands, and return the Typer command.

    Args:
        name: One of `COMMANDS`.

    Returns:
        Command of Typer. If it has at most `_ONE_SCREEN` options, `--help` shows all of them.
        Otherwise `--help` shows only the common options, and `--help-all` shows the others too.
    """
    command = typer.main.get_command(import_module(f"svdpp.cli.{name}").app)
    assert isinstance(command, TyperCommand), "a module has one command"
    if len(command.params) <= _ONE_SCREEN:
        show_all_options(command)
    return command


def run_command_line(arguments: Sequence[str]) -> int:
    """Run the command that a command line names, and return the exit code for the process.

    Args:
        arguments: Command line after the program's name.

    Returns:
        Exit code of the process: 0, the exit code of an error, or 128 + n after signal n.
    """
    words = list(arguments)
    try:
        return app(words, prog_name="svdpp", standalone_mode=False, obj=tuple(words)) or 0
    except typer.TyperException as error:
        # For `svdpp` without arguments, Typer has already printed the help, so no error is printed.
        if not arguments:
            return 2
        return report_usage_error(error, arguments)
    # an SvdppError is raised by a callback that checks an option's value
    except SvdppError as error:
        Console(as_json="--json" in arguments).error(error)
        return error.exit_code
    except typer.Abort:
        return 1
    # While a command runs, `report_errors` catches `Interrupted` and prints it. A signal before or
    # after that raises `Interrupted` here, and the program ends silently.
    except Interrupted as error:
        return exit_code_of(error)
    # SystemExit is raised after a shell completion, or if the program that reads stdout has ended
    except SystemExit as error:
        return 128 + signal.SIGPIPE if error.code else 0
