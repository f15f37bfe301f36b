"""Owns the options about what a command says: JSON, the log, progress, tracebacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, flag, option


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a command answers; every command has these."""

    as_json: Annotated[
        bool, flag("--json", panel=DIAGNOSTICS, help="Print the result as JSON, errors as well.")
    ] = False
    debug: Annotated[
        bool, flag("--debug", panel=DIAGNOSTICS, help="Show tracebacks with errors.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TalkOptions(AnswerOptions):
    """What a longer command says while it works."""

    quiet: Annotated[
        bool, flag(*("--quiet", "-q"), panel=DIAGNOSTICS, help="No progress, no remarks.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class LogOptions(TalkOptions):
    """What is logged."""

    verbose: Annotated[
        int,
        flag(
            *("--verbose", "-v"),
            panel=DIAGNOSTICS,
            help="Log ranks, transfers and clips to stderr; -vv: every step as well.",
            count=True,
        ),
    ] = 0
    log_file: Annotated[
        Path | None,
        option(
            "--log-file",
            panel=DIAGNOSTICS,
            metavar="FILE",
            help="Write the log, steps included, to this file as JSON lines.",
        ),
    ] = None

    def open(self, console: Console) -> None:
        """Begins to log.

        Raises:
            OutputError: the file cannot be written.
        """
        from svdpp.cli.log import open_log

        open_log(verbosity=self.verbose, log_file=self.log_file, write=console.err.print)
