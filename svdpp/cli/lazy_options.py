"""Faster Typer commands, which convert only the options on the command line.

Typer 0.29 makes a pydantic model of each option that it parses, also of those that keep their
default. That takes light commands longer than all the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from svdpp.cli.options.declare import flag, with_aliases

_HELP = ("-h", "--help", "--help-all")


def show_help(context: typer.Context, wanted: bool) -> None:
    """Print the help and end the command.

    Args:
        context: Context of the command.
        wanted: Whether the option was given.

    Raises:
        typer.Exit: After the help.
    """
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def help_option() -> Any:
    """Return the option `--help`; Typer's own would be converted in every command."""
    return flag(
        "--help",
        "-h",
        panel="Options",
        help="Show this message and exit.",
        common=True,
        is_eager=True,
        callback=show_help,
    )


class LazyOptionGroup(TyperGroup):
    """A group whose options are converted only if they are given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the options of the program; see `TyperGroup`.

        Args:
            ctx: Context of the program.
            args: Command line after the program's name.

        Returns:
            The words from the command's name on.
        """
        all_params = self.params
        self.params = [*_options_to_parse(all_params, args[:1], ctx)]
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params = all_params


class LazyOptionCommand(TyperCommand):
    """A command whose options are converted only if they are given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the options that the command line has; see `TyperCommand`.

        Args:
            ctx: Context of the command.
            args: Command line after the command's name.

        Returns:
            The words that no parameter took.
        """
        all_params = self.params
        self.params = [*_options_to_parse(all_params, args, ctx)]
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params = all_params


def _options_to_parse(
    all_params: Sequence[Any], words: list[str], context: typer.Context
) -> Iterator[Any]:
    """Yield the parameters to parse: arguments, and options with a value from the user."""
    heads = {word.partition("=")[0] for word in words}
    needs_all = context.resilient_parsing or not heads.isdisjoint(_HELP)
    # Such as -o, -ofile and -vq.
    has_short = any(word[:1] == "-" and word[:2] != "--" for word in words)
    for one in all_params:
        is_short = any(name[:2] != "--" for name in one.opts)
        if (
            needs_all
            or one.param_type_name == "argument"
            or not heads.isdisjoint(with_aliases(one.opts))
            or (has_short and is_short)
            or (one.envvar is not None and os.environ.get(one.envvar))
        ):
            yield one
