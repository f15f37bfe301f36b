"""Entry point of `python -m svdpp`, `torchrun -m svdpp`, and the `svdpp` script.

At import, nothing else of svdpp is imported, so that `main` can first install a handler of Ctrl-C.
"""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before a command has installed its own handler, Ctrl-C may exit at once without cleanup.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    _print_any_name()

    from svdpp.launch import process_lifetime

    process_lifetime.tune_gc()
    # The variables must be set before libraries are imported that read them.
    process_lifetime.set_environment_defaults()
    from svdpp.cli.app import run_command_line
    from svdpp.cli.failures import exit_immediately
    from svdpp.launch.world import was_launched

    code = run_command_line(sys.argv[1:])
    if was_launched():
        # A normal exit would wait forever for threads that wait for other ranks.
        process_lifetime.exit_process(code)
    if code > 128:
        # The process kills itself by a signal, because Python would take a second or more to unload
        # torch.
        sys.stdout.flush()
        sys.stderr.flush()
        exit_immediately(code - 128)
    sys.exit(code)


def _print_any_name() -> None:
    """Make stdout print file names that are not valid UTF-8 as their bytes, as `ls` does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.encoding, out.errors) == ("utf-8", "strict"):
        out.reconfigure(errors="surrogateescape")


if __name__ == "__main__":
    main()
