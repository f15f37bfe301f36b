"""The definition of a command: a function of option groups, flattened for Typer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from svdpp.cli.console import Console
from svdpp.cli.defaults import Default
from svdpp.cli.failures import answered
from svdpp.cli.help import show_page
from svdpp.cli.options.declare import HIDDEN_NAMES, declared, flag
from svdpp.launch.world import World, find_world

# The annotation for the launcher's world.
_LAUNCHED = World | None
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the program.

    Its function takes Typer's arguments, option groups (frozen dataclasses whose fields are
    annotated with an option, or are groups themselves), `Console`, `typer.Context`, and
    `World | None` for the launcher's world, each by its annotation.
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
        hints = get_type_hints(self.function, include_extras=True)
        hints.pop("return", None)
        given = (Console, typer.Context, _LAUNCHED)
        asked = {name: hint for name, hint in hints.items() if hint not in given}
        signature = inspect.signature(self.function).parameters
        options = [
            parameter
            for name, hint in asked.items()
            for parameter in self._flat(name, hint, signature[name].default)
        ]
        kinds = {each.name: get_args(each.annotation)[0] for each in options}

        def call(context: typer.Context, **values: Any) -> None:
            console = Console(
                as_json=values["as_json"],
                quiet=values.get("quiet", False),
                set_elsewhere=_set_elsewhere(context, defaults),
            )
            with answered(console, debug=values["debug"]):
                arguments = {name: self._built(name, hint, values) for name, hint in asked.items()}
                if _LAUNCHED in hints.values():
                    arguments |= _by_hint(hints, _LAUNCHED, find_world())
                arguments |= _by_hint(hints, Console, console)
                self.function(**arguments, **_by_hint(hints, typer.Context, context))

        parameters = [_parameter("context", typer.Context), *options, *self._help_options(kinds)]
        call.__name__ = self.name
        call.__doc__ = self.function.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        known = {name: defaults[name].value for name in kinds if name in defaults}
        settings = {**self.settings, "help_option_names": [], "default_map": known}
        app.command(self.name, context_settings=settings)(call)

    def _flat(self, name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
        """The parameter of an option, or those of a group."""
        if is_dataclass(hint):
            kinds: Any = hint
            group = hint if default is _EMPTY else default
            for each, kind in declared(kinds).items():
                if each not in self.without:
                    yield from self._flat(each, kind, getattr(group, each, _EMPTY))
            return
        if name in self.defaults or name in self.meanings:
            kind, option = get_args(hint)
            option = copy.copy(option)
            option.show_default = self.defaults.get(name, option.show_default)
            option.help = self.meanings.get(name, option.help)
            hint = Annotated[kind, option]
        yield _parameter(name, hint, default)

    def _built(self, name: str, hint: Any, values: dict[str, Any]) -> Any:
        if not is_dataclass(hint):
            return values[name]
        group: Any = hint
        kinds = {each: kind for each, kind in declared(group).items() if each not in self.without}
        return group(**{each: self._built(each, kind, values) for each, kind in kinds.items()})

    def _help_options(self, kinds: dict[str, Any]) -> list[inspect.Parameter]:
        """The options for help; eager, so that they run before other options are parsed."""

        def show(context: typer.Context, wanted: bool, *, whole: bool) -> None:
            if wanted:
                show_page(context, self.examples, self.common, whole=whole)
                raise typer.Exit
            convert_without_typer(context, kinds)

        def short(context: typer.Context, wanted: bool) -> None:
            show(context, wanted, whole=not self.common)

        def long(context: typer.Context, wanted: bool) -> None:
            show(context, wanted, whole=True)

        about: dict[str, Any] = {"panel": "", "is_eager": True, "expose_value": False}
        options = {
            "help": flag("-h", "--help", help="Show this help.", callback=short, **about),
            "help_all": flag("--help-all", help="Show all options.", callback=long, **about),
        }
        return [
            _parameter(name, Annotated[bool, option], False) for name, option in options.items()
        ]


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are fields of `Command`."""
    return lambda function: Command(function=function, **about)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command's parameter `name` was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_options(context: typer.Context) -> dict[str, str]:
    """The options given on the command line as users type them, by parameter."""
    return {
        str(parameter.name): next(
            (name for name in reversed(parameter.opts) if name not in HIDDEN_NAMES),
            str(parameter.name),
        )
        for parameter in context.command.params
        if is_given(context, str(parameter.name))
    }


def _by_hint(hints: Mapping[str, Any], kind: Any, value: Any) -> dict[str, Any]:
    return {name: value for name, hint in hints.items() if hint == kind}


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


def _parameter(name: str, hint: Any, default: Any = _EMPTY) -> inspect.Parameter:
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
        processed = partial(_process, parameter, kinds.get(str(parameter.name), bool))
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
    if origin is UnionType:  # with None
        return _converted(inner[0], value)
    if origin is list:
        return [_converted(inner[0], each) for each in value]
    if origin is tuple:
        return tuple(_converted(*pair) for pair in zip(inner, value, strict=True))
    convert: Callable[[Any], Any] = kind
    try:
        return convert(value)
    except ValueError:
        raise typer.BadParameter(f"must be {_KINDS[kind]}, got {value!r}") from None
