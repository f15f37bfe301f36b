"""python -m svdpp, torchrun -m svdpp, and the `svdpp` script.

Imports nothing of the program before `main` has taken care of Ctrl-C.
"""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Runs the command line, and ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a command has its own handler there is nothing to end in order.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    _print_any_name()

    from svdpp.launch import process_lifetime

    process_lifetime.tune_gc()
    process_lifetime.set_environment_defaults()  # before libraries are imported
    from svdpp.cli.app import run_command_line
    from svdpp.cli.failures import exit_immediately
    from svdpp.launch.world import was_launched

    code = run_command_line(sys.argv[1:])
    if was_launched():
        # Threads that wait for other ranks would keep the process, and its launcher, for ever.
        process_lifetime.exit_process(code)
    if code > 128:
        # By a signal: Python would take a second or more to take torch apart.
        sys.stdout.flush()
        sys.stderr.flush()
        exit_immediately(code - 128)
    sys.exit(code)


def _print_any_name() -> None:
    """Has stdout print the names that are not UTF-8 as the bytes they are, as `ls` does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.encoding, out.errors) == ("utf-8", "strict"):
        out.reconfigure(errors="surrogateescape")


if __name__ == "__main__":
    main()
