"""How an option is declared: a field of an option group, with its panel and help."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

#: Accepted spellings that the help does not show: those of diffusers and earlier versions.
HIDDEN_NAMES = frozenset(
    {"--num-inference-steps", "--num-frames", "--total-steps", "--skip-existing"}
)
# Of a service that is named svdpp, as Kubernetes sets it.
_NOT_OURS = "SVDPP_PORT"


class Option(click.Option):
    """An option with its panel in the help and its default in words."""

    def __init__(self, names: list[str], *, panel: str, shown: str = "", **about: Any) -> None:
        long = [name[2:].replace("-", "_").upper() for name in names if name.startswith("--")]
        variables = [f"SVDPP_{name}" for name in long if panel]
        super().__init__(
            names, envvar=[name for name in variables if name != _NOT_OURS] or None, **about
        )
        self.panel, self.shown = panel, shown
        #: As the help shows them, short ones first.
        self.names = [name for name in self.opts if name not in HIDDEN_NAMES]
        self.names.sort(key=lambda name: name.startswith("--"))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        """See `click.Option`."""
        names = f"{', '.join(self.names)} {self.metavar or ''}".rstrip()
        default = "" if self.is_flag or self.count or self.default is None else str(self.default)
        return names, _described(self.help, self.shown or default)


def set_by_variables(context: click.Context) -> dict[str, str]:
    """The variable that has set an option, by the option's names."""
    return {
        name: variable
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
        for variable in [one for one in option.envvar or () if os.environ.get(one)][:1]
        for name in option.opts
    }


class Argument(click.Argument):
    """An argument with its help."""

    def __init__(self, names: list[str], *, help: str, shown: str = "", **about: Any) -> None:
        super().__init__(names, **about)
        self.help, self.shown = help, shown

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        """See `click.Argument`."""
        return self.metavar or "", _described(self.help, self.shown)


def _described(help: str | None, default: str) -> str:
    return f"{help} [default: {default}]" if default else f"{help}"


class Panel(str):
    """A panel of the help, which declares its options."""

    __slots__ = ()

    def setting(self, metavar: str, help: str, *names: str, **more: Any) -> Any:
        """A field that is an option with a value.

        Args:
            metavar: placeholder of the value in the help; "": the choices of a `Literal`.
            help: one or two sentences, without the default.
            names: as users type them; without them, the field's name with dashes.
            more: `default` of the field, `between` for the limits of a whole number, and arguments
                of `Option`.
        """
        default = more.pop("default", None)
        about = {"panel": self, "metavar": metavar, "help": help, "names": names, **more}
        return field(default=default, metadata=about)

    def switch(self, help: str, *names: str, default: Any = False, **more: Any) -> Any:
        """A field that is an option without a value; arguments as for `setting`."""
        return self.setting("", help, *names, default=default, **more)


VIDEO = Panel("Video")
PROMPTS = Panel("Prompts")
MODEL = Panel("Model and precision")
LAYOUT = Panel("Layout")
COSTS = Panel("Costs")
MEMORY = Panel("Memory")
SERVICE = Panel("Service")
RECOVERY = Panel("Recovery")
DIAGNOSTICS = Panel("Diagnostics")
#: All, in the order in which `--help-all` shows them.
PANELS = (SERVICE, VIDEO, PROMPTS, MODEL, LAYOUT, COSTS, MEMORY, RECOVERY, DIAGNOSTICS)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """A field that is an argument of the command; None if it is not given."""
    return field(default=None, metadata={"metavar": metavar, "help": help, **more})


class _Whole(click.IntRange):
    name = "whole number"


class _Choice(click.Choice):  # type: ignore[type-arg]
    """Also takes a choice by a name that it had before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from svdpp.plan.layout import present_split

        return super().convert(present_split(value), param, ctx)


def parameters(
    group: Any, without: Container[str], shown: Mapping[str, str], meanings: Mapping[str, str]
) -> Iterator[Option | Argument]:
    """The options and arguments of a group for click, with its values as defaults.

    Args:
        group: an instance.
        without: names of the fields that are left out.
        shown: other texts for defaults, by name.
        meanings: other texts of the help, by name.
    """
    hints = get_type_hints(type(group))
    for each in fields(group):
        if each.name in without:
            continue
        about = {**_typed(hints[each.name]), **each.metadata}
        about["help"] = meanings.get(each.name, about["help"])
        if each.name in shown:
            about["shown"] = shown[each.name]
        if "panel" not in about:
            yield _argument(each.name, **about)
        else:
            yield _option(each.name, **about, default=getattr(group, each.name))


def _argument(name: str, *, multiple: bool = False, **about: Any) -> Argument:
    if multiple:
        about["nargs"] = -1
    return Argument([name], **{"required": False, **about})


def _option(name: str, *, names: tuple[str, ...], between: Any = None, **about: Any) -> Option:
    if between is not None:
        about["type"] = _Whole(*between)
    if isinstance(about.get("type"), click.Choice) and not about["metavar"]:
        about["metavar"] = "|".join(about["type"].choices)
    return Option([name, *(names or (f"--{name.replace('_', '-')}",))], **about)


def _typed(hint: Any) -> dict[str, Any]:
    """click's arguments for values of this type."""
    origin, inner = get_origin(hint), get_args(hint)
    if type(None) in inner:
        return _typed(inner[0])
    if origin is Literal:
        return {"type": _Choice(inner)}
    if origin is list:
        return {"type": inner[0], "multiple": True}
    if origin is tuple:
        return {"type": inner[0], "nargs": len(inner)}
    return {"is_flag": True} if hint is bool else {"type": hint}
