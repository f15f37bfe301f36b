"""`svdpp models`: the families of models, and what one of them takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.cli.options.talk import AnswerOptions
from svdpp.config import SAMPLING_CLASSES, own_params
from svdpp.errors import RequestError


@command(examples=("svdpp models", "svdpp models ltx2"))
def models(
    console: Console,
    answer: AnswerOptions,
    family: Annotated[
        str | None, typer.Argument(metavar="[FAMILY]", help="A family that the list names.")
    ] = None,
) -> None:
    """List the families of models, and the parameters of one.

    A model is of the family whose pipeline its model_index.json names.
    """
    names = list(SAMPLING_CLASSES)
    if family is not None and family not in names:
        raise RequestError(f"there is no family {family!r}", f"one of {', '.join(names)}")
    found = [describe(each) for each in (names if family is None else [family])]
    if answer.as_json:
        console.json({"schema_version": 1, "families": found})
    elif family is None:
        width = max(map(len, names))
        for each in found:
            takes = " or ".join(each["inputs"])
            console.result(f"{each['family']:<{width}}  {each['title']}, from {takes}")
    else:
        _print_one(console, found[0])


def describe(family: str) -> dict[str, Any]:
    """A family: its pipelines, inputs, schedulers, and parameters with their defaults."""
    from svdpp.models.engine.rows import ROWS

    row, sampling = ROWS[family], SAMPLING_CLASSES[family]()
    common = ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale")
    classes = {"text": row.text, "an image": row.image}
    return {
        "family": family,
        "title": row.title,
        "pipelines": [name for name in classes.values() if name is not None],
        "inputs": [what for what, name in classes.items() if name is not None],
        "schedulers": list(row.schedulers),
        "defaults": {name: getattr(sampling, name) for name in common if hasattr(sampling, name)},
        "parameters": {
            name: {
                **{"default": param.default, "default_in_words": param.shown_default},
                **{"lowest": param.lowest, "highest": param.highest, "help": param.help},
            }
            for name, param in own_params(type(sampling)).items()
        },
    }


def _print_one(console: Console, about: dict[str, Any]) -> None:
    for name in ("title", "pipelines", "inputs", "schedulers"):
        value = about[name]
        console.result(f"{name}: {value if isinstance(value, str) else ', '.join(value)}")
    defaults = ", ".join(f"{name} {value}" for name, value in about["defaults"].items())
    console.result(f"defaults: {defaults}")
    for name, each in about["parameters"].items():
        default = each["default_in_words"] or each["default"]
        limits = f"{each['lowest']:g} to {each['highest']:g}, by default {default}"
        console.result(f"--param {name}: {each['help']} ({limits})")
