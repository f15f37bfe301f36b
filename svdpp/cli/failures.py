"""The answer to errors and signals: a sentence or JSON, and the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import click

from svdpp.cli.console import Console
from svdpp.cli.options.declare import HIDDEN_NAMES, set_by_variables
from svdpp.errors import (
    Interrupted,
    RankError,
    RequestError,
    SvdppError,
    error_from_dict,
    error_to_dict,
    exit_code_of,
    nearest,
)
from svdpp.launch import process_lifetime
from svdpp.launch.world import find_world, is_member

# Rank 0 may have failed with the same error before it could listen.
_REPORT_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


def wrong_usage(error: click.ClickException, arguments: Sequence[str]) -> int:
    """Reports a command line that click refuses, and returns the exit code."""
    sentence, near = _usage_sentence(error)
    context = getattr(error, "ctx", None)
    named = " ".join(["svdpp", *arguments[:1]])  # click does not say where a value is missing
    path = context.command_path if context is not None else named
    refused = RequestError(sentence, near or f"{path} --help shows its usage")
    variables = {} if context is None else set_by_variables(context)
    Console(as_json="--json" in arguments, variables=variables).error(refused)
    return exit_code_of(refused)


def worst_of(errors: Iterable[SvdppError], count: str) -> SvdppError:
    """The error with the highest exit code; its message begins with `count`, of how many."""
    worst = max(errors, key=exit_code_of)
    return error_from_dict({**error_to_dict(worst), "message": f"{count}: {worst}"})


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
    from svdpp.worker.joined_rank import report_failure

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
