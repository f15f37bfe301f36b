"""Failures of a command: errors and signals become a sentence or JSON, and an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from svdpp.cli.console import Console
from svdpp.cli.options.declare import with_aliases
from svdpp.errors import (
    Interrupted,
    RankError,
    RequestError,
    SvdppError,
    error_to_dict,
    exit_code_of,
    nearest,
)
from svdpp.launch import process_lifetime
from svdpp.launch.start_deadline import end_fork_server, limit_error
from svdpp.launch.world import find_world, is_secondary_rank, was_launched

# Replacements in the messages of pydantic, which Typer uses to convert values of options.
_PYDANTIC = {"Value error, ": "", "Input should be": "must be"}
# Pattern of errors about options and values for automatic mixed precision, which svdpp lacks.
_AMP = r"no such option: --(?:amp|autocast)\b|'(?:amp|autocast)' is not one of 'fp32'"
# Timeout in seconds for sending an error to rank 0, which may have failed before it listened.
_REPORT_SECONDS = 30.0


def report_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> int:
    """Print an error about a command line that Typer rejects, and return its exit code.

    Args:
        error: Error that Typer raised.
        arguments: Command line after the program's name.

    Returns:
        Exit code, 2.
    """
    # Only usage errors have a `ctx`, and their class is private in Typer. So `ctx` is read with
    # getattr.
    context: Any = getattr(error, "ctx", None)
    sentence = error.format_message().strip().rstrip(".")
    for words, ours in _PYDANTIC.items():
        sentence = sentence.replace(words, ours)
    # Without a context, the name of the command is taken from the command line.
    path = " ".join(["svdpp", *arguments[:1]]) if context is None else context.command_path
    hint = f"{path} --help shows its usage"
    if (word := getattr(error, "option_name", None)) and sentence.startswith("No such option"):
        sentence = f"no such option: {word}"
        known = [name for one in context.command.params for name in with_aliases(one.opts)]
        hint = nearest(word, known, hint)
    refused = RequestError(sentence[:1].lower() + sentence[1:], hint)
    if re.search(_AMP, sentence):
        from svdpp.config.pipeline import amp_error

        refused = amp_error()
    Console(as_json="--json" in arguments).error(refused)
    return refused.exit_code


@contextlib.contextmanager
def report_errors(console: Console, *, debug: bool) -> Iterator[None]:
    """Print an error or a signal that ends the `with` block, and exit with its code.

    Args:
        console: Console of the command.
        debug: Whether to print tracebacks too.

    Raises:
        typer.Exit: Raised with the exit code of the error in the block, or of the signal.
    """
    previous = process_lifetime.handle_signals(_interrupt)
    try:
        yield
    except typer.Exit:
        raise
    except (Interrupted, Exception) as raised:
        is_ours = isinstance(raised, (Interrupted, SvdppError))
        error = raised if is_ours else limit_error(raised) or raised
        # When one rank fails, a launcher sends signals to the other ranks. A signal must not
        # interrupt this rank's report.
        signals: list[int] = []
        process_lifetime.handle_signals(
            (lambda number, _: signals.append(number)) if was_launched() else exit_immediately
        )
        if isinstance(error, Interrupted):
            # The `finally` block must not restore the old handlers: the new ones stay until the
            # process ends, so that they handle a second signal.
            previous = {}
        if debug or not _is_reported_elsewhere(error, signals):
            console.error(error, debug=debug)
        raise typer.Exit(exit_code_of(error)) from raised
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_reported_elsewhere(error: BaseException, signals: Sequence[int]) -> bool:
    """Whether another rank reports `error`, or the error that caused it.

    If this rank cannot start, its error is sent to rank 0, which reports it.

    Args:
        error: Error that ended this rank.
        signals: Numbers of the signals that arrived since the error. If there are any, the error
            counts as reported: a launcher sends a signal when another rank has failed. That rank
            has reported its error, and this rank's error is usually the same, because all ranks
            have the same command line.
    """
    try:
        launched = find_world()
    except RequestError:
        return False
    if not is_secondary_rank(launched):
        return False
    if not isinstance(error, SvdppError) or isinstance(error, RankError):
        return not isinstance(error, Exception) or launched.local_rank != 0
    from svdpp.worker.secondary_rank import report_start_failure

    reported = report_start_failure(launched, error_to_dict(error), timeout=_REPORT_SECONDS)
    return reported or bool(signals)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Raise `Interrupted` at the first signal, and let a second signal end the process at once."""
    process_lifetime.handle_signals(exit_immediately)
    raise Interrupted(number)


def exit_immediately(number: int, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """End this process at once and silently, with the exit code of a signal.

    The process's ranks notice that it has ended, and end too.

    Args:
        number: Number of the signal.
        frame: Stack frame that a signal handler gets; ignored.
    """
    end_fork_server(only_if_stopped=True)
    process_lifetime.remove_temp_files()
    os._exit(128 + number)
