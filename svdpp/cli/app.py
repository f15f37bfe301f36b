"""The command line as a whole: the list of commands, and how a command is run."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from svdpp import __version__
from svdpp.cli.command import convert_without_typer
from svdpp.cli.command_line import remember
from svdpp.cli.console import Console
from svdpp.cli.defaults import load_defaults
from svdpp.cli.failures import wrong_usage
from svdpp.cli.help import show_overview
from svdpp.cli.options.declare import flag
from svdpp.errors import SvdppError

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
    "report": "Say what limits a finished run or bench, and what would make it faster.",
    "doctor": "Check in half a minute that a run has what it needs.",
    "env": "Show versions, devices, ffmpeg and settings, ready to paste into a report.",
}

#: Paragraphs at the end of the help.
EPILOG = """
Defaults of options can be set in svdpp.toml or in [tool.svdpp] of pyproject.toml in the working
folder, and by variables such as SVDPP_MODEL; svdpp env shows them.

Exit codes: 0 success; 1 unexpected error; 2 wrong request; 3 verify found a difference; 4 out of
memory; 5 model missing, gated, incomplete or not safetensors; 6 a rank died or stalled; 7 input
unreadable or hostile; 8 output cannot be written; 9 a latent is not finite; 10 a bench missed a
target; 128 + n ended by signal n. If several clips fail, the exit code is the highest of theirs.
"""


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` name, and returns the exit code."""
    remember(arguments)
    try:
        app = build_app(_completed() or arguments)
        return app(args=list(arguments), standalone_mode=False) or 0
    except SvdppError as error:
        Console(as_json="--json" in arguments).error(error)
        return error.exit_code
    except typer.TyperException as error:
        return wrong_usage(error, arguments)
    except typer.Abort:
        return 1
    except SystemExit:  # click raises it when the reader of stdout has ended
        return 128 + signal.SIGPIPE


def _completed() -> list[str]:
    """The words of the command line that a shell wants completed; empty if none does."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    return words.split() if "_SVDPP_COMPLETE" in os.environ else []


def build_app(arguments: Collection[str] | None = None) -> typer.Typer:
    """The command line for Typer.

    Args:
        arguments: of the command line; only the commands in it can be run. None: all commands.
    """
    app = typer.Typer(
        name="svdpp",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": []},
    )
    app.callback(invoke_without_command=True)(_main)
    for name, summary in COMMANDS.items():
        if arguments is None or name in arguments:
            module = import_module(f"svdpp.cli.{name}")
            getattr(module, name).register(app, load_defaults())
        else:
            app.command(name, help=summary)(_not_imported)
    return app


def _not_imported() -> None:
    raise AssertionError("a command that the arguments do not name")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"svdpp {__version__}")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    convert_without_typer(context, {})
    if wanted:
        show_overview(context, COMMANDS, EPILOG)
        raise typer.Exit


def _eager(*names: str, **about: Any) -> Any:
    return flag(*names, panel="", is_eager=True, **about)


def _main(
    context: typer.Context,
    help: Annotated[  # noqa: ARG001  its callback answers it, as that of the next
        bool, _eager("-h", "--help", help="Show this help.", callback=_show_help)
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool, _eager("--version", help="Show the version.", callback=_show_version)
    ] = False,
) -> None:
    """Run video diffusion on several devices by splitting the denoising steps.

    Every clip has the same bits as from diffusers on one device, and `svdpp verify` proves it. The
    pipeline finishes more clips per hour; pairs of ranks (--cfg-parallel 2) make each clip sooner.
    """
    if context.invoked_subcommand is None:
        show_overview(context, COMMANDS, EPILOG)
        raise typer.Exit(2)
