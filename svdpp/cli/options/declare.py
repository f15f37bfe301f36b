"""Owns how an option is declared: its kind of value, its panel in the help, its completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer

# Panels of the help, in the order in which `--help-all` shows them.
VIDEO = "Video"
MODEL = "Model and precision"
LAYOUT = "Layout"
COSTS = "Costs"
MEMORY = "Memory"
DRAFT = "Draft"
RECOVERY = "Recovery"
DIAGNOSTICS = "Diagnostics"
PANELS = (VIDEO, MODEL, LAYOUT, COSTS, MEMORY, DRAFT, RECOVERY, DIAGNOSTICS)

#: Spellings that are accepted and not shown: diffusers' own, and those of earlier versions.
HIDDEN_NAMES = frozenset(
    {"--num-inference-steps", "--num-frames", "--total-steps", "--skip-existing"}
)


def option(
    *names: str,
    panel: str,
    metavar: str,
    help: str,
    default: str = "",
    choices: Sequence[str] | Callable[..., list[str]] = (),
    **more: Any,
) -> Any:
    """An option with a value, for `Annotated`; its `names` stay with it.

    Args:
        names: as they are typed; the first long one is its name in the help.
        panel: of the help.
        metavar: stands for the value in the help.
        help: one or two sentences, without the default.
        default: says what holds where the option is not given, if its default value does not.
        choices: what a shell offers in place of file names, or a function of Typer's `context`.
        more: as `typer.Option` takes it.
    """
    complete: Callable[..., list[str]] | None = None
    if callable(choices):
        complete = choices
    elif choices:
        complete = lambda: list(choices)  # noqa: E731
    made = typer.Option(
        *names,
        metavar=metavar,
        help=help,
        rich_help_panel=panel,
        show_default=default or True,
        autocompletion=complete,
        **more,
    )
    made.names = names
    return made


def flag(*names: str, panel: str, help: str, **more: Any) -> Any:
    """An option without a value."""
    return option(*names, panel=panel, metavar="", help=help, **more)
