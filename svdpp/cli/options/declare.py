"""How an option is declared: a field of an option group, with its panel and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

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

_KINDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


class Option(click.Option):
    """An option with its panel in the help, its default in words, and values to complete."""

    def __init__(
        self, names: Sequence[str], *, panel: str, shown: str = "", choices: Any = (), **about: Any
    ) -> None:
        super().__init__(names, **about)
        self.panel, self.shown, self._choices = panel, shown, choices

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The choices that begin so; they may depend on the context."""
        choices = self._choices(ctx) if callable(self._choices) else self._choices
        return [CompletionItem(each) for each in choices if each.startswith(incomplete)]


class Argument(click.Argument):
    """An argument with its help."""

    def __init__(self, names: Sequence[str], *, help: str, shown: str = "", **about: Any) -> None:
        super().__init__(names, **about)
        self.help, self.shown = help, shown


def setting(panel: str, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """A field that is an option with a value.

    Args:
        panel: of the help.
        metavar: placeholder of the value in the help.
        help: one or two sentences, without the default.
        names: as users type them; without them, the field's name with dashes.
        more: `default` of the field, and arguments of `Option`.
    """
    default = more.pop("default", None)
    about = {"panel": panel, "metavar": metavar, "help": help, "names": names, **more}
    return field(default=default, metadata=about)


def switch(panel: str, help: str, *names: str, default: Any = False, **more: Any) -> Any:
    """A field that is an option without a value; arguments as for `setting`."""
    return setting(panel, "", help, *names, default=default, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """A field that is an argument of the command; None if it is not given."""
    about = {"metavar": metavar, "help": help, **more}
    default: Any = MISSING if more.get("required") else None
    return field(default=default, metadata=about)


@cache
def declared(group: Any) -> Mapping[str, tuple[Any, dict[str, Any]]]:
    """Type of each field of an option group, and what it says of its option; {} for a group."""
    hints, found = get_type_hints(group), {}
    for each in fields(group):
        about = dict(each.metadata)
        if "panel" in about and not about["names"]:
            about["names"] = (f"--{each.name.replace('_', '-')}",)
        found[each.name] = hints[each.name], about
    return found


def parameter(name: str, hint: Any, about: Mapping[str, Any]) -> Option | Argument:
    """The option or argument of the field `name` for click."""
    about = {**_typed(hint), **about}
    if "panel" in about:
        return Option([name, *about.pop("names")], **about)
    if about.pop("multiple", False):
        about["nargs"] = -1
    return Argument([name], **{"required": False, **about})


def _typed(hint: Any) -> dict[str, Any]:
    """click's arguments for values of this type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:  # with None
        return _typed(inner[0])
    if origin is list:
        return {"type": _to(inner[0]), "multiple": True}
    if origin is tuple:
        return {"type": _to(inner[0]), "nargs": len(inner)}
    return {"is_flag": True} if hint is bool else {"type": _to(hint)}


def _to(kind: type) -> Callable[[Any], Any]:
    """The conversion of a text, whose error says what it must be."""

    def convert(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise click.BadParameter(f"must be {_KINDS[kind]}, got {value!r}") from None

    return convert
