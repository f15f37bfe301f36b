"""How an option is declared: a field of an option group, with its panel and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

import typer

# Panels of the help, in the order in which `--help-all` shows them.
VIDEO = "Video"
PROMPTS = "Prompts"
MODEL = "Model and precision"
LAYOUT = "Layout"
COSTS = "Costs"
MEMORY = "Memory"
SERVICE = "Service"
RECOVERY = "Recovery"
DIAGNOSTICS = "Diagnostics"
PANELS = (SERVICE, VIDEO, PROMPTS, MODEL, LAYOUT, COSTS, MEMORY, RECOVERY, DIAGNOSTICS)

#: Accepted spellings that the help does not show: those of diffusers and earlier versions.
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
    """An option with a value, for `Annotated`; the attribute `names` holds its names.

    Args:
        names: as users type them; the first long one is its name in the help.
        panel: of the help.
        metavar: placeholder of the value in the help.
        help: one or two sentences, without the default.
        default: text for the default, if the default value does not say it.
        choices: values that a shell completes, or a function of Typer's `context`.
        more: further arguments of `typer.Option`.
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


def setting(panel: str, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """A field that is an option with a value.

    Args:
        panel: of the help.
        metavar: placeholder of the value in the help.
        help: one or two sentences, without the default.
        names: as users type them; without them, the field's name with dashes.
        more: `default` of the field, its text in the help as `shown`, and arguments of `option`.
    """
    about = {"panel": panel, "metavar": metavar, "help": help, "names": names, **more}
    return field(default=about.pop("default", None), metadata={_ABOUT: about})


def switch(panel: str, help: str, *names: str, default: Any = False, **more: Any) -> Any:
    """A field that is an option without a value; arguments as for `setting`."""
    return setting(panel, "", help, *names, default=default, **more)


@cache
def declared(group: Any) -> Mapping[str, Any]:
    """The fields of an option group as Typer has them: annotated with options, or groups."""
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        if about := dict(each.metadata.get(_ABOUT, {})):
            names = about.pop("names") or (f"--{each.name.replace('_', '-')}",)
            shown = about.pop("shown", "")
            hints[each.name] = Annotated[hints[each.name], option(*names, default=shown, **about)]
    return {each.name: hints[each.name] for each in fields(group)}


_ABOUT = "option"
