"""Declaration of options and arguments: names, panels of the help, and aliases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field
from pathlib import Path
from typing import Any

import typer

from svdpp.errors import RequestError

# Titles of the panels in the help, in their order.
SERVICE = "Service"
OUTPUT = "Output"
VIDEO = "Video"
PROMPTS = "Prompts"
MODEL = "Model and precision"
LAYOUT = "Layout"
COSTS = "Costs"
MEMORY = "Memory"
RECOVERY = "Recovery"
DIAGNOSTICS = "Diagnostics"
PANELS = (*(SERVICE, OUTPUT, VIDEO, PROMPTS, MODEL, LAYOUT, COSTS, MEMORY, RECOVERY, DIAGNOSTICS),)

#: Environment variables that set the defaults of options.
VARIABLES = (
    *("SVDPP_MODEL", "SVDPP_DEVICE", "SVDPP_DATA", "SVDPP_QUEUE", "SVDPP_FILES", "SVDPP_LOG_FILE"),
)

#: Aliases of options and choices: names that diffusers, torchrun or earlier versions of svdpp use.
#: The help does not show them.
ALIASES = {
    "world": "gpus",
    "num-inference-steps": "steps",
    "total-steps": "steps",
    "num-frames": "frames",
    "max-sequence-length": "max-prompt-tokens",
    "skip-existing": "resume",
    "dithered": "alternating",
}


def option(
    *names: str, panel: str, metavar: str, help: str, common: bool = False, **more: Any
) -> Any:
    """Return Typer's declaration of an option that takes a value, for `Annotated`.

    Args:
        names: Names as users type them. Without names, the option has the field's name with dashes.
        panel: One of `PANELS`.
        metavar: Placeholder of the value in the help.
        help: One or two sentences without square brackets, which rich reads as markup.
        common: Whether `--help` shows the option; `--help-all` shows all options.
        more: Further arguments of `typer.Option`.
    """
    return typer.Option(
        *names, rich_help_panel=panel, metavar=metavar, help=help, hidden=not common, **more
    )


def flag(*names: str, panel: str, help: str, common: bool = False, **more: Any) -> Any:
    """Return Typer's declaration of an option without a value, for `Annotated`.

    Args:
        names: Names as users type them, at least one. From a field's name alone, Typer would also
            make a negative option such as `--no-resume`.
        panel: One of `PANELS`.
        help: Help text, as for `option`.
        common: Whether `--help` shows it, as for `option`.
        more: Further arguments of `typer.Option`.
    """
    return option(*names, panel=panel, metavar="", help=help, common=common, **more)


def options_field(options: Mapping[str, Any]) -> Any:
    """Return a dataclass field for an option group; this one field stands for several options.

    The value of the field is a mapping of the options that were given.

    Args:
        options: Annotation of each option, by the name of its parameter.
    """
    return field(default_factory=dict, metadata={"options": options})


def collected_options(each: Field[Any]) -> Mapping[str, Any]:
    """Return the options of a field made by `options_field`; empty for any other field.

    Args:
        each: Field of an option group.
    """
    options: Mapping[str, Any] = each.metadata.get("options", {})
    return options


def path_option(*names: str, **about: Any) -> Any:
    """Return Typer's declaration of an option whose value is a path; empty text is rejected.

    The command itself checks whether the file exists, and can be read or written.

    Args:
        names: Names as users type them, as for `option`.
        about: Further arguments of `option`.
    """
    return option(*names, parser=_path, **about)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return Typer's declaration of a positional argument, for `Annotated`.

    Args:
        metavar: Placeholder in the help.
        help: One or two sentences without square brackets.
        more: Further arguments of `typer.Argument`.
    """
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def path_argument(metavar: str, help: str) -> Any:
    """Return Typer's declaration of a positional argument: a path; empty text is rejected.

    Args:
        metavar: Placeholder in the help.
        help: One or two sentences without square brackets.
    """
    return argument(metavar, help, parser=_path)


def in_range(low: int, high: int | None = None) -> Any:
    """Return a callback for an option; the callback rejects a number that is out of range.

    Args:
        low: Smallest number that is allowed.
        high: Largest number that is allowed; None: no limit.

    Raises:
        RequestError: The number is out of range (raised by the returned function).
    """

    def check(parameter: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and not low <= value <= (value if high is None else high):
            limits = f"{low} or more" if high is None else f"{low} to {high}"
            raise RequestError(
                f"{parameter.opts[0]} must be {limits}, got {value}",
                details={"option": parameter.opts[0], "low": low, "high": high, "value": value},
            )
        return value

    return check


def canonical_name(name: str) -> str:
    """Return the current name of an option or a choice: `gpus` for `gpus` and for `world`.

    Args:
        name: Name or alias, without leading dashes, such as `gpus`, `world` or `dithered`.
    """
    return ALIASES.get(name, name)


def with_aliases(options: list[str]) -> list[str]:
    """Return the names of an option, followed by its aliases: `--gpus` and `--world`.

    Args:
        options: Names of one option, such as `--gpus`.
    """
    further = [f"--{old}" for old, new in ALIASES.items() if f"--{new}" in options]
    return [*options, *further]


def _path(text: str | Path) -> Path:
    # Empty texts are rejected here, because Path("") would be the working folder. Typer also
    # calls this function with the default, which may be a path.
    if text == "":
        raise typer.BadParameter("the path is empty")
    return Path(text)
