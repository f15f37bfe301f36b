"""Ends of a command: errors and signals become a sentence or JSON, and an exit code."""

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

# Typer converts values by pydantic, in whose words it reports wrong ones.
_PYDANTIC = {"Value error, ": "", "Input should be": "must be"}
# Options and values for automatic mixed precision, which other programs have.
_AMP = r"no such option: --(?:amp|autocast)\b|'(?:amp|autocast)' is not one of 'fp32'"
# Rank 0 may have failed with the same error before it could listen.
_REPORT_SECONDS = 30.0


def report_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> int:
    """Report a command line that Typer refuses.

    Args:
        error: Error that Typer raised.
        arguments: Command line after the program's name.

    Returns:
        The exit code, 2.
    """
    # Of Typer's usage errors only their base class is public.
    context: Any = getattr(error, "ctx", None)
    sentence = error.format_message().strip().rstrip(".")
    for words, ours in _PYDANTIC.items():
        sentence = sentence.replace(words, ours)
    # Typer does not say where a value is missing.
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
    """Report signals and errors of the block in one sentence.

    Args:
        console: Console of the command.
        debug: Whether to print tracebacks, too.

    Raises:
        typer.Exit: With the error's exit code.
    """
    previous = process_lifetime.handle_signals(_interrupt)
    try:
        yield
    except typer.Exit:
        raise
    except (Interrupted, Exception) as raised:
        is_ours = isinstance(raised, (Interrupted, SvdppError))
        error = raised if is_ours else limit_error(raised) or raised
        # A launcher signals its other ranks when one fails: in the middle of what follows.
        signals: list[int] = []
        process_lifetime.handle_signals(
            (lambda number, _: signals.append(number)) if was_launched() else exit_immediately
        )
        if isinstance(error, Interrupted):
            previous = {}  # also for a second signal until the process ends
        if debug or not _is_reported_elsewhere(error, signals):
            console.error(error, debug=debug)
        raise typer.Exit(exit_code_of(error)) from raised
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_reported_elsewhere(error: BaseException, signals: Sequence[int]) -> bool:
    """Whether another rank reports `error` or the cause of it, or nobody needs to.

    A rank that cannot start sends its error to rank 0.

    Args:
        error: Error that ended this rank.
        signals: Those since the error. If there is one and rank 0 is gone, it has reported an
            error: usually the same one, as all ranks have the same command line.
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
    """End the run in order at the first signal, and at once at the second."""
    process_lifetime.handle_signals(exit_immediately)
    raise Interrupted(number)


def exit_immediately(number: int, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """End the process silently as by a signal; its ranks notice and end, too.

    Args:
        number: Number of the signal.
        frame: Stack frame that a signal handler gets; ignored.
    """
    end_fork_server(only_if_stopped=True)
    process_lifetime.remove_temp_files()
    os._exit(128 + number)
