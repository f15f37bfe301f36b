"""The definition of a command: a function of option groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import click

from svdpp.cli.console import Console
from svdpp.cli.defaults import Default
from svdpp.cli.failures import answered
from svdpp.cli.help import help_option, show_page
from svdpp.cli.options.declare import HIDDEN_NAMES, declared, parameter
from svdpp.launch.world import World, find_world

# The annotation for the launcher's world.
_LAUNCHED = World | None
_EMPTY = inspect.Parameter.empty


class Command(click.Command):
    """One command of the program.

    Its function takes option groups (frozen dataclasses whose fields are options, arguments or
    groups), `Console`, `click.Context`, and `World | None` for the launcher's world, each by its
    annotation.

    Args:
        examples: command lines for the help; all of them run.
        common: parameters in the panel Common, in order; empty: the help shows all options at once.
        without: fields of its groups that the command does not offer; they keep their defaults.
        defaults: this command's own text for the default of a parameter, by name.
        meanings: this command's own help for a parameter, by name.
        settings: click's settings of the context.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *,
        examples: Sequence[str] = (),
        common: Sequence[str] = (),
        without: Sequence[str] = (),
        defaults: Mapping[str, str] | None = None,
        meanings: Mapping[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.examples, self.common = function, examples, common
        self._without = frozenset(without)
        self._defaults, self._meanings = defaults or {}, meanings or {}
        self._hints = get_type_hints(function)
        self._hints.pop("return", None)
        super().__init__(
            function.__name__,
            help=function.__doc__,
            context_settings=settings,
            add_help_option=False,
        )
        for name, given in inspect.signature(function).parameters.items():
            if is_dataclass(self._hints[name]):
                self.params += self._flat(self._hints[name], given.default)
        self.params.append(help_option(self._short_help, "-h", "--help", help="Show this help."))
        self.params.append(help_option(self._long_help, "--help-all", help="Show all options."))

    def invoke(self, ctx: click.Context) -> None:
        """Calls the function, and ends the program if it fails."""
        values = ctx.params
        console = Console(
            as_json=values["as_json"],
            quiet=values.get("quiet", False),
            set_elsewhere=_set_elsewhere(ctx),
        )
        with answered(console, debug=values["debug"]):
            known: dict[Any, Any] = {Console: console, click.Context: ctx}
            if _LAUNCHED in self._hints.values():
                known[_LAUNCHED] = find_world()
            self.function(
                **{
                    name: known[hint] if hint in known else self._built(hint, values)
                    for name, hint in self._hints.items()
                }
            )

    def _flat(self, group: Any, default: Any) -> Iterator[click.Parameter]:
        """The parameters of a group, whose instance `default` has the defaults, if there is one."""
        for name, (hint, about) in declared(group).items():
            value = getattr(group if default is _EMPTY else default, name, _EMPTY)
            if name in self._without:
                continue
            if not about:
                yield from self._flat(hint, value)
                continue
            about = {**about, "help": self._meanings.get(name, about["help"])}
            if name in self._defaults:
                about["shown"] = self._defaults[name]
            if "panel" in about:
                about["default"] = value
            yield parameter(name, hint, about)

    def _built(self, group: Any, values: Mapping[str, Any]) -> Any:
        return group(
            **{
                name: self._built(hint, values) if not about else values[name]
                for name, (hint, about) in declared(group).items()
                if name not in self._without
            }
        )

    def _short_help(self, context: click.Context) -> None:
        show_page(context, self.examples, self.common, whole=not self.common)

    def _long_help(self, context: click.Context) -> None:
        show_page(context, self.examples, self.common, whole=True)


def command(**about: Any) -> Callable[[Callable[..., None]], Command]:
    """Makes a `Command` of a function; the arguments are those of `Command`."""
    return lambda function: Command(function, **about)


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command's parameter `name` was given on the command line."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def given_options(context: click.Context) -> dict[str, str]:
    """The options given on the command line as users type them, by parameter."""
    return {
        str(parameter.name): next(
            (name for name in reversed(parameter.opts) if name not in HIDDEN_NAMES),
            str(parameter.name),
        )
        for parameter in context.command.params
        if is_given(context, str(parameter.name))
    }


def _set_elsewhere(context: click.Context) -> dict[str, str]:
    """Source of each option that a file or variable sets, by all names of the option."""
    found, defaults = {}, context.obj or {}
    for option in context.command.params:
        name = str(option.name)
        if context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP:
            default: Default | None = defaults.get(name)
            repeated = context.params.get("repeat")  # a manifest overrides all other defaults
            where = str(repeated) if repeated else default.source if default else ""
            found.update(dict.fromkeys(option.opts, where))
    return found
