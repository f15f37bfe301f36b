"""Command-line options of benchmarks and soaks."""

from __future__ import annotations

import argparse


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows `about` line by line."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=raw)


def options(about: str | None, **defaults: float) -> argparse.Namespace:
    """Return the command line's options; each has the type of its default."""
    parser = parser_of(about)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()
