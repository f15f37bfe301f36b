"""python -m svdpp, torchrun -m svdpp, and the `svdpp` script."""

from __future__ import annotations

import io
import sys

from svdpp.cli.app import app, end_at_once
from svdpp.launch import environment
from svdpp.launch.process_lifetime import exit_process
from svdpp.launch.world import was_launched


def main() -> None:
    """Runs the command line."""
    _take_any_name()
    environment.set_defaults()  # before libraries are imported
    try:
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if was_launched():
            # Threads that wait for other ranks would keep the process and its launcher alive.
            exit_process(code)
        if code > 128:
            # By a signal: Python would take a second or more to take torch apart.
            sys.stdout.flush()
            sys.stderr.flush()
            end_at_once(code - 128)
        raise


def _take_any_name() -> None:
    """Has stdout print the names that are not UTF-8 as the bytes they are, as `ls` does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.encoding, out.errors) == ("utf-8", "strict"):
        out.reconfigure(errors="surrogateescape")


if __name__ == "__main__":
    main()
