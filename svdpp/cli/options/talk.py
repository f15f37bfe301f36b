"""The options for output on the terminal: JSON, log, progress, tracebacks."""

import os
from dataclasses import dataclass
from pathlib import Path

from svdpp.cli.console import Console
from svdpp.cli.options.declare import DIAGNOSTICS, setting, switch
from svdpp.launch.world import World


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options that every command has."""

    as_json: bool = switch(DIAGNOSTICS, "Print results and errors as JSON.", "--json")
    debug: bool = switch(DIAGNOSTICS, "Show tracebacks with errors.")


@dataclass(frozen=True, kw_only=True)
class TalkOptions(AnswerOptions):
    """Options of commands that take a while."""

    quiet: bool = switch(DIAGNOSTICS, "Print no progress and no remarks.", "--quiet", "-q")


@dataclass(frozen=True, kw_only=True)
class LogOptions(TalkOptions):
    """Options of the log."""

    verbose: int = switch(
        DIAGNOSTICS,
        "Log ranks, transfers and clips to stderr; -vv adds every step.",
        "--verbose",
        "-v",
        default=0,
        count=True,
    )
    log_file: Path | None = setting(
        DIAGNOSTICS,
        "FILE",
        "Append the log to this file as JSON lines, with -v every step; at 50 MB it "
        "becomes FILE.1, and four old files are kept.",
    )

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
