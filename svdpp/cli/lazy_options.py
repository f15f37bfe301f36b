"""Typer commands that start faster, because they parse only the options that are given.

Typer 0.29 makes a pydantic model of each option that it parses, even if the option keeps its
default. In a quick command such as `svdpp plan`, this would take longer than all other work.
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
    """Print the help of a command and end the command, if `--help` was given.

    Args:
        context: Context of the command.
        wanted: Whether the help was requested.

    Raises:
        typer.Exit: The help was printed.
    """
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def help_option() -> Any:
    """Return the option `--help` of a command or group, in place of Typer's own.

    Commands parse this one only if the user typed it (see `TyperCommand`), like all options.
    """
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
    """Group of commands whose options are parsed only if they are given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse a command line, like `TyperGroup.parse_args` of Typer, but faster.

        Typer would also process each option of the program that is not given. This method processes
        only the options that the user typed and those that an environment variable sets.

        Args:
            ctx: Context of the program.
            args: Command line after the program's name.

        Returns:
            Rest of the command line, which begins with the command's name.
        """
        all_params = self.params
        self.params = [*_options_to_parse(all_params, args[:1], ctx)]
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params = all_params


class LazyOptionCommand(TyperCommand):
    """Command whose options are parsed only if they are given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse a command line, like `TyperCommand.parse_args` of Typer, but faster.

        Typer would also process each option of the command that is not given. This method processes
        only the options that the user typed and those that an environment variable sets.

        Args:
            ctx: Context of the command.
            args: Command line after the command's name.

        Returns:
            Words of the command line that are neither options of the command nor its arguments.
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
    """Yield all arguments, and the options that the user or an environment variable sets."""
    heads = {word.partition("=")[0] for word in words}
    needs_all = context.resilient_parsing or not heads.isdisjoint(_HELP)
    # Short options can be joined with values and with each other, as in -ofile and -vq, so a word
    # does not tell which short options it contains. If any word begins with a single dash, every
    # option that has a short name counts as given.
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
