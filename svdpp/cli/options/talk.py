"""The options for output on the terminal: JSON, log, progress, tracebacks."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, flag, option
from svdpp.launch.world import World


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options that every command has."""

    as_json: Annotated[
        bool, flag("--json", panel=DIAGNOSTICS, help="Print results and errors as JSON.")
    ] = False
    debug: Annotated[
        bool, flag("--debug", panel=DIAGNOSTICS, help="Show tracebacks with errors.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TalkOptions(AnswerOptions):
    """Options of commands that take a while."""

    quiet: Annotated[
        bool, flag(*("--quiet", "-q"), panel=DIAGNOSTICS, help="Print no progress and no remarks.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class LogOptions(TalkOptions):
    """Options of the log."""

    verbose: Annotated[
        int,
        flag(
            *("--verbose", "-v"),
            panel=DIAGNOSTICS,
            help="Log ranks, transfers and clips to stderr; -vv adds every step.",
            count=True,
        ),
    ] = 0
    log_file: Annotated[
        Path | None,
        option(
            "--log-file",
            panel=DIAGNOSTICS,
            metavar="FILE",
            help="Append the log to this file as JSON lines, with -v every step; at 50 MB it "
            "becomes FILE.1, and four old files are kept.",
        ),
    ] = None

    def open(self, console: Console, launched: World | None) -> None:
        """Opens the log; of the ranks of a host only the first makes remarks."""
        from svdpp.cli.log import open_log

        quiet = self.quiet or (launched is not None and launched.local_rank != 0)
        if quiet:
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of the hub's library
        open_log(
            verbosity=self.verbose,
            log_file=self.log_file,
            write=console.err.print,
            quiet=quiet,
        )
