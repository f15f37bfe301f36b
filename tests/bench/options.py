"""The options of scripts: benches and soaks."""

from __future__ import annotations

import argparse


def options(about: str | None, **defaults: float) -> argparse.Namespace:
    """The command line's options; their types are those of `defaults`."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()
