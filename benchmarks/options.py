"""Command-line options of benchmarks and soaks."""

from __future__ import annotations

import argparse


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return an argument parser for a script; its help shows `about` with its line breaks."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=raw)


def options(about: str | None, **defaults: float) -> argparse.Namespace:
    """Parse the command line of a script. `defaults` are the options and their default values.

    Each option has the type of its default value.
    """
    parser = parser_of(about)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()
