"""python -m svdpp, torchrun -m svdpp, and the `svdpp` script."""

from __future__ import annotations

from svdpp.cli.app import app


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
