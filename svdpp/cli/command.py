"""Commands made from option groups: frozen dataclasses whose fields are options of Typer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from svdpp.cli.console import Console
from svdpp.cli.failures import report_errors
from svdpp.cli.lazy_options import LazyOptionCommand, help_option, show_help
from svdpp.cli.option_names import option_names
from svdpp.cli.options.declare import (
    DIAGNOSTICS,
    PANELS,
    canonical_name,
    collected_options,
    flag,
    with_aliases,
)
from svdpp.errors import RequestError
from svdpp.launch.world import World, find_world, was_launched

# A command's parameter with this annotation is not an option: it gets the rank and the number of
# ranks from the launcher (torchrun or srun), or None without a launcher.
_LAUNCHED = World | None
# Options whose value may be the empty text. For all others, `_reject_empty` raises an error.
_MAY_BE_EMPTY = ("prompt", "negative_prompt")


def _show_full_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        show_all_options(context.command)
        show_help(context, wanted)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that every command has, which configure its `Console`."""

    as_json: Annotated[
        bool, flag("--json", panel=DIAGNOSTICS, help="Print results and errors as JSON.")
    ] = False
    debug: Annotated[
        bool, flag("--debug", panel=DIAGNOSTICS, help="Show tracebacks with errors.")
    ] = False
    quiet: Annotated[
        bool,
        flag("--quiet", "-q", panel=DIAGNOSTICS, help="Print no progress and no remarks."),
    ] = False
    help_all: Annotated[
        bool,
        flag(
            "--help-all",
            panel="Options",
            help="Show all options and exit.",
            common=True,
            is_eager=True,
            callback=_show_full_help,
        ),
    ] = False
    help: Annotated[bool, help_option()] = False


def command_settings(*examples: str, **settings: Any) -> dict[str, Any]:
    """Return the arguments of `typer.Typer.command` for a command with examples in its help.

    Args:
        examples: Example command lines, which are printed at the end of the help.
        settings: Further settings of the command's context.
    """
    return {
        "cls": LazyOptionCommand,
        "epilog": "\n".join(["Examples:", *(f"  {example}" for example in examples)]),
        "add_help_option": False,
        "context_settings": {
            "token_normalize_func": canonical_name,
            **settings,
        },
    }


def with_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a function that takes option groups into a command that takes their fields as options.

    A field without an annotation of Typer is not an option and keeps its default. To drop an
    option, or to change its default or help, a command uses a subclass of the group, and declares
    the field again in the subclass. A field made by `options_field` stands for several options, and
    its value is a mapping of those options that the user has given.

    Args:
        function: Function to wrap. The annotation of each parameter decides what is passed: an
            option group (a frozen dataclass), the `Console`, the `typer.Context`, or the
            launcher's `World | None`. The docstring of the function, up to the first section
            such as `Raises:`, is the help.

    Returns:
        Function for `typer.Typer.command`. If the command raises an error, the function prints the
        error and exits with the error's exit code.
    """
    hints = {**get_type_hints(function), "common": CommonOptions}
    groups = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and hint is not World
    }
    options = sorted(
        (option for group in groups.values() for option in _option_parameters(group)),
        key=_panel_index,
    )

    def call(context: typer.Context, **values: Any) -> None:
        common = _build_group(CommonOptions, values)
        console = Console(
            as_json=common.as_json,
            quiet=common.quiet,
            names=_names_of_fields(context),
            options=_available_options(context),
        )
        with report_errors(console, debug=common.debug):
            _reject_empty(context, values)
            injected: dict[Any, Any] = {Console: console, typer.Context: context}
            if _LAUNCHED in hints.values():
                injected[_LAUNCHED] = find_world()
            injected |= {group: _build_group(group, values) for group in groups.values()}
            arguments = {name: injected[hint] for name, hint in hints.items() if hint in injected}
            del arguments["common"]
            call.__wrapped__(**arguments)  # type: ignore[attr-defined]

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    call.__name__, call.__doc__ = function.__name__, _unwrap(function.__doc__ or "")
    call.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in (context, *options)}
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def _names_of_fields(context: typer.Context) -> dict[str, str]:
    """Map each field that errors may name to its option, such as `num_frames` to `--frames`.

    If the user typed an alias of the option, the alias is returned.
    """
    typed = {name: as_typed for names, as_typed in _given_options(context) for name in names}
    options = {str(one.name): one.opts[0] for one in context.command.params} | option_names()
    return {field: typed.get(option, option) for field, option in options.items()}


def typed_options(context: typer.Context) -> dict[str, str]:
    """Return the options that the user typed, each under the name or alias that was typed.

    Args:
        context: Context of the command.

    Returns:
        Typed names, by the name of the function's parameter, such as `{"gpus": "--world"}`.
    """
    by_name = {name: typed for names, typed in _given_options(context) for name in names}
    return {
        str(one.name): by_name[one.opts[0]]
        for one in context.command.params
        if one.opts[0] in by_name
    }


def show_all_options(command: Any) -> None:
    """Make a command's help and shell completion show all options, not only the common ones.

    Args:
        command: Command of Typer.
    """
    for parameter in command.params:
        parameter.hidden = False


def _option_parameters(group: Any) -> list[inspect.Parameter]:
    """Return the options and arguments of an option group as a function's keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for each in fields(group):
        if hasattr(hints[each.name], "__metadata__"):
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            hint = hints[each.name]
            parameters.append(
                inspect.Parameter(each.name, keyword_only, default=default, annotation=hint)
            )
        for name, annotation in collected_options(each).items():
            parameters.append(
                inspect.Parameter(name, keyword_only, default=None, annotation=annotation)
            )
    return parameters


def _panel_index(parameter: inspect.Parameter) -> int:
    """Return the index of a parameter's panel in the help; -1 for arguments, which come first."""
    panel = get_args(parameter.annotation)[1].rich_help_panel
    return PANELS.index(panel) if panel in PANELS else -1


def _build_group(group: Any, values: Mapping[str, Any]) -> Any:
    """Create an option group from values of options. Fields without a value keep their defaults."""
    given = {each.name: values[each.name] for each in fields(group) if each.name in values}
    for each in fields(group):
        if options := collected_options(each):
            given[each.name] = {name: values[name] for name in options if values[name] is not None}
    return group(**given)


def _given_options(context: typer.Context) -> list[tuple[list[str], str]]:
    """Return all names, and the name that the user typed, of each option in the command line."""
    words = [word.partition("=")[0] for word in context.obj or ()]
    found = []
    for one in context.command.params:
        names = with_aliases(one.opts)
        source = context.get_parameter_source(str(one.name))
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and one.param_type_name == "option":
            found.append((names, next((name for name in names if name in words), names[0])))
    return found


def _available_options(context: typer.Context) -> set[str]:
    """Return the names of the options that an error's hint may propose to the user.

    These are all options of the command. Under a launcher such as torchrun, `--gpus` is left out,
    because the launcher decides the number of ranks.
    """
    names = {name for one in context.command.params for name in with_aliases(one.opts)}
    return names - {"--gpus", "--world"} if was_launched() else names


def _reject_empty(context: typer.Context, values: Mapping[str, Any]) -> None:
    """Raise a `RequestError` if an option is empty, often because a shell variable is not set."""
    for one in context.command.params:
        if values.get(str(one.name)) == "" and one.name not in _MAY_BE_EMPTY:
            raise RequestError(
                f"{one.opts[0]} is empty",
                "leave the option out, or set the shell variable",
                details={"option": one.opts[0]},
            )


def _unwrap(text: str) -> str:
    """Return a command's help: its docstring before the first section, each paragraph on a line."""
    prose = re.split(r"\n\n(?:Args|Raises):\n", inspect.cleandoc(text))[0]
    paragraphs = prose.split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
