"""The definition of a command: a function of option groups, flattened for Typer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from svdpp.cli.console import Console
from svdpp.cli.defaults import Default
from svdpp.cli.failures import answered
from svdpp.cli.help import Page, show_page
from svdpp.cli.options.declare import declared, flag
from svdpp.launch.world import World, find_world

# The annotation for the launcher's world.
_LAUNCHED = World | None
# Parameters of every command that show help and end it.
_HELP = ("help", "help_all")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the program.

    Its function takes Typer's arguments, option groups (frozen dataclasses whose fields are
    annotated with an option), `Console`, `typer.Context`, and `World | None` for the launcher's
    world, each by its annotation.
    """

    function: Callable[..., None]
    examples: Sequence[str] = ()
    """Command lines for the help; all of them run."""
    common: Sequence[str] = ()
    """Parameters in the panel Common, in order; empty: the help shows all options at once."""
    without: Sequence[str] = ()
    """Fields of its groups that the command does not offer; they keep their defaults."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """This command's own text for the default of a parameter, by name."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """This command's own help for a parameter, by name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Typer's context settings."""

    @property
    def name(self) -> str:
        """The name that users type."""
        return self.function.__name__

    def register(self, app: typer.Typer, defaults: Mapping[str, Default]) -> None:
        """Adds the command to `app`."""
        parameters, groups = self._flat()

        def call(**values: Any) -> None:
            context = values.pop("context")
            for name in _HELP:
                values.pop(name, None)
            console = Console(
                as_json=values["as_json"],
                quiet=values.get("quiet", False),
                set_elsewhere=_set_elsewhere(context, defaults),
            )
            with answered(console, debug=values["debug"]):
                for name, group in groups.items():
                    names = [each.name for each in self._offered(group)]
                    values[name] = group(**{each: values.pop(each) for each in names})
                self.function(**values, **self._given(console, context))

        call.__name__ = self.name
        call.__doc__ = self.function.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        known = {name: defaults[name].value for name in call.__annotations__ if name in defaults}
        settings = {**self.settings, "help_option_names": [], "default_map": known}
        app.command(self.name, context_settings=settings)(call)

    def _flat(self) -> tuple[list[inspect.Parameter], dict[str, Any]]:
        """All parameters side by side, and the class of each option group by parameter."""
        hints = get_type_hints(self.function, include_extras=True)
        flat = [_parameter("context", typer.Context)]
        groups: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            hint, default = hints[name], parameter.default
            if hint in (Console, typer.Context, _LAUNCHED):
                continue
            if not is_dataclass(hint):
                flat.append(_parameter(name, self._worded(name, hint), default))
                continue
            groups[name] = hint
            kinds_of = declared(hint)
            for each in self._offered(hint):
                value = each.default if default is parameter.empty else getattr(default, each.name)
                value = parameter.empty if value is MISSING else value
                worded = self._worded(each.name, kinds_of[each.name])
                flat.append(_parameter(each.name, worded, value))
        kinds = {each.name: get_args(each.annotation)[0] for each in flat[1:]}
        return [*flat, *self._help_options(kinds)], groups

    def _offered(self, group: Any) -> list[Field[Any]]:
        return [each for each in fields(group) if each.name not in self.without]

    def _worded(self, name: str, hint: Any) -> Any:
        """The annotation with this command's own help and default."""
        if name not in {**self.defaults, **self.meanings}:
            return hint
        kind, option = get_args(hint)
        option = copy.copy(option)
        option.show_default = self.defaults.get(name, option.show_default)
        option.help = self.meanings.get(name, option.help)
        return Annotated[kind, option]

    def _given(self, console: Console, context: typer.Context) -> dict[str, Any]:
        """The arguments of the function that are not options."""
        hints = get_type_hints(self.function)
        kinds: dict[Any, Any] = {Console: console, typer.Context: context}
        if _LAUNCHED in hints.values():
            kinds[_LAUNCHED] = find_world()
        return {name: kinds[hint] for name, hint in hints.items() if hint in kinds}

    def _help_options(self, kinds: dict[str, Any]) -> list[inspect.Parameter]:
        """The options for help; eager, so that they run before other options are parsed."""

        def show(context: typer.Context, *, whole: bool) -> None:
            page = Page(examples=self.examples, common=self.common)
            show_page(context, page, whole=whole)
            raise typer.Exit

        def short(context: typer.Context, wanted: bool) -> None:
            if wanted:
                show(context, whole=not self.common)
            convert_without_typer(context, kinds)

        def long(context: typer.Context, wanted: bool) -> None:
            if wanted:
                show(context, whole=True)

        about: dict[str, Any] = {"panel": "", "is_eager": True, "expose_value": False}
        options = [
            flag("-h", "--help", help="Show this help.", callback=short, **about),
            flag("--help-all", help="Show all options.", callback=long, **about),
        ]
        return [
            _parameter(name, Annotated[bool, option], False)
            for name, option in zip(_HELP, options, strict=True)
        ]


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are fields of `Command`."""
    return lambda function: Command(function=function, **about)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command's parameter `name` was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _set_elsewhere(context: typer.Context, defaults: Mapping[str, Default]) -> dict[str, str]:
    """Source of each option that a file or variable sets, by all names of the option."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "DEFAULT_MAP":
            default = defaults.get(str(parameter.name))
            repeated = context.params.get("repeat")  # a manifest overrides all other defaults
            where = str(repeated) if repeated else default.source if default else ""
            found.update(dict.fromkeys(parameter.opts, where))
    return found


def _parameter(name: str, hint: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=hint, default=default)


# Typer's own conversion imports pydantic and builds a model for each option. That takes longer than
# the rest of a light command, and its errors speak of pydantic.

_KINDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def convert_without_typer(context: typer.Context, kinds: Mapping[str, Any]) -> None:
    """Replaces the conversion of the command's parameters; call it before they are converted.

    A parameter without an entry in `kinds` is a flag.
    """
    for parameter in context.command.params:
        processed = partial(_process, parameter, _plain(kinds.get(str(parameter.name), bool)))
        parameter.process_value = processed  # type: ignore[method-assign]


def _process(parameter: Any, kind: Any, context: typer.Context, value: Any) -> Any:
    """A parameter's value; replaces Typer's `process_value`."""
    if value not in (None, ()):
        value = _converted(kind, value)
    elif parameter.required:
        raise typer.BadParameter("is missing", ctx=context, param=parameter)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _converted(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return [_converted(inner[0], each) for each in value]
    if origin is tuple:
        return tuple(_converted(*pair) for pair in zip(inner, value, strict=True))
    convert: Callable[[Any], Any] = kind
    try:
        return convert(value)
    except ValueError:
        raise typer.BadParameter(f"must be {_KINDS[kind]}, got {value!r}") from None


def _plain(kind: Any) -> Any:
    """`kind` without `| None`."""
    if isinstance(kind, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind
