"""Entry point of `python -m svdpp`, `torchrun -m svdpp`, and the `svdpp` script.

This module imports the rest of svdpp inside `main`, after `main` has installed a Ctrl-C handler.
"""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a command installs its own handler, Ctrl-C exits at once: nothing needs cleanup yet.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    _print_any_name()

    from svdpp.launch import process_lifetime

    process_lifetime.tune_gc()
    # Libraries read these environment variables when they are imported, so they are set first.
    process_lifetime.set_environment_defaults()
    from svdpp.cli.app import run_command_line
    from svdpp.cli.failures import exit_immediately
    from svdpp.launch.world import was_launched

    code = run_command_line(sys.argv[1:])
    if was_launched():
        # A normal exit would wait forever for threads that wait for other ranks.
        process_lifetime.exit_process(code)
    if code > 128:
        # A signal ended the command. A normal exit of Python would take a second or more to unload
        # torch, so the process skips it.
        sys.stdout.flush()
        sys.stderr.flush()
        exit_immediately(code - 128)
    sys.exit(code)


def _print_any_name() -> None:
    """Let stdout print file names that are not valid UTF-8: their bytes are written unchanged."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.encoding, out.errors) == ("utf-8", "strict"):
        out.reconfigure(errors="surrogateescape")


if __name__ == "__main__":
    main()
