"""Owns the command line as a whole: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from svdpp import __version__
from svdpp.cli import bench as bench_command
from svdpp.cli.console import Console
from svdpp.cli.doctor import doctor
from svdpp.cli.env import env
from svdpp.cli.launched import is_told_elsewhere
from svdpp.cli.plan import plan
from svdpp.cli.profile import profile
from svdpp.cli.run import run
from svdpp.cli.simulate import simulate
from svdpp.cli.verify import verify
from svdpp.errors import Interrupted, exit_code_of
from svdpp.launch import temp_folders

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EPILOG = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong request; 3 verify found a difference; "
    "4 out of memory; 5 model missing, gated, incomplete or not safetensors; "
    "6 a rank died or stalled; 7 unreadable or hostile input; 8 an output cannot be written; "
    "9 a latent is not finite; 128 + n ended by signal n. If several clips fail, each by its own "
    "error, the highest of their codes."
)

app = typer.Typer(
    name="svdpp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its signals and errors answered: one sentence, and the error's exit code."""

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
        try:
            command(**options)
        except typer.Exit:
            raise
        except Interrupted as error:
            previous = {}  # a second signal must meet `end_at_once` until the very end
            _say(error, debug=options.get("debug", False))
            raise typer.Exit(exit_code_of(error)) from error
        except Exception as error:
            _say(error, debug=options.get("debug", False))
            raise typer.Exit(exit_code_of(error)) from error
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    return wrapper


def _say(error: BaseException, *, debug: bool) -> None:
    """Once in a run, by rank 0 where there are several processes."""
    if debug or not is_told_elsewhere(error):
        Console().error(error, debug=debug)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """The first signal ends the run in order; a second one at once."""
    for other in _SIGNALS:
        signal.signal(other, end_at_once)
    raise Interrupted(number)


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """Ends the process as by signal `number`, without a word; ranks end with it by themselves."""
    temp_folders.remove_all()
    temp_folders.remove_multiprocessing_folder()
    os._exit(128 + number)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"svdpp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Stable Video Diffusion on several devices by splitting the denoising steps.

    The clips are bit for bit those of diffusers on one device, and `verify` proves it. A pipeline
    of steps finishes more clips an hour; it makes no single clip faster.
    """


for _command in (plan, simulate, run, verify, profile, doctor, env):
    app.command()(guarded(_command))
app.command(context_settings=bench_command.CONTEXT)(guarded(bench_command.bench))
