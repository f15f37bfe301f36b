"""Declaration of options: names, panel of the help, and the values that a shell completes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field
from pathlib import Path
from typing import Any

import typer

from svdpp.errors import RequestError

# Panels of the help, in its order.
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

#: Variables that set the default of an option.
VARIABLES = (
    *("SVDPP_MODEL", "SVDPP_DEVICE", "SVDPP_DATA", "SVDPP_QUEUE", "SVDPP_FILES", "SVDPP_LOG_FILE"),
)

#: Further spellings of options and choices, which the help does not show: those of diffusers and
#: torchrun, and those of earlier versions.
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
    """Return an option with a value, for `Annotated`.

    Args:
        names: Names as users type them; without any, the field's name with dashes.
        panel: One of `PANELS`.
        metavar: Placeholder of the value in the help.
        help: One or two sentences without square brackets, which rich takes for markup.
        common: Whether `--help` shows it; `--help-all` shows all.
        more: Further arguments of `typer.Option`.
    """
    return typer.Option(
        *names, rich_help_panel=panel, metavar=metavar, help=help, hidden=not common, **more
    )


def flag(*names: str, panel: str, help: str, common: bool = False, **more: Any) -> Any:
    """Return an option without a value, for `Annotated`.

    Args:
        names: Names as users type them, at least one; Typer would add a negative one to a field's
            name.
        panel: One of `PANELS`.
        help: Help text, as for `option`.
        common: Whether `--help` shows it, as for `option`.
        more: Further arguments of `typer.Option`.
    """
    return option(*names, panel=panel, metavar="", help=help, common=common, **more)


def options_field(options: Mapping[str, Any]) -> Any:
    """Return a field of an option group that collects several options, whose defaults are None.

    Its value is a mapping of the given ones.

    Args:
        options: Annotation of each, by the name of its parameter.
    """
    return field(default_factory=dict, metadata={"options": options})


def collected_options(each: Field[Any]) -> Mapping[str, Any]:
    """Return the options that a field of an option group collects; empty for most fields.

    Args:
        each: Field of a dataclass.
    """
    options: Mapping[str, Any] = each.metadata.get("options", {})
    return options


def path_option(*names: str, **about: Any) -> Any:
    """Return an option whose value is a path; an empty one is refused.

    Whether the file exists and can be read or written is the command's own check.

    Args:
        names: Names as users type them, as for `option`.
        about: Further arguments of `option`.
    """
    return option(*names, parser=_path, **about)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return a positional argument, for `Annotated`.

    Args:
        metavar: Placeholder in the help.
        help: One or two sentences without square brackets.
        more: Further arguments of `typer.Argument`.
    """
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def path_argument(metavar: str, help: str) -> Any:
    """Return a positional argument that is a path; an empty one is refused.

    Args:
        metavar: Placeholder in the help.
        help: One or two sentences without square brackets.
    """
    return argument(metavar, help, parser=_path)


def in_range(low: int, high: int | None = None) -> Any:
    """Return a check of a whole number, for `callback` of an option.

    Args:
        low: Smallest number.
        high: Largest number; None: there is no limit.

    Raises:
        RequestError: The check is called with another number.
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
    """Return the present name of an option or choice.

    Args:
        name: Name without dashes, such as `world` or `dithered`.
    """
    return ALIASES.get(name, name)


def with_aliases(options: list[str]) -> list[str]:
    """Return options with their further names: `--gpus` as `--gpus` and `--world`.

    Args:
        options: Names of one option.
    """
    further = [f"--{old}" for old, new in ALIASES.items() if f"--{new}" in options]
    return [*options, *further]


def _path(text: str | Path) -> Path:
    # Typer also converts defaults. Path("") would be the working folder.
    if text == "":
        raise typer.BadParameter("the path is empty")
    return Path(text)
