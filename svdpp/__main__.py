"""python -m svdpp, torchrun -m svdpp, and the `svdpp` script."""

from __future__ import annotations

import sys

from svdpp.cli.app import app, end_at_once


def main() -> None:
    """Runs the command line."""
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            # By a signal: Python would take a second or more to take torch apart.
            sys.stdout.flush()
            sys.stderr.flush()
            end_at_once(end.code - 128)
        raise


if __name__ == "__main__":
    main()
