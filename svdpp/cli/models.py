"""`svdpp models`: the families of models, and what one of them, or one checkpoint, takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options import complete
from svdpp.cli.options.declare import argument
from svdpp.config import SAMPLING_CLASSES, ModelConfig, SamplingConfig, extra_params
from svdpp.errors import ModelError, RequestError

_COMMON = ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale")


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Family or checkpoint that is shown."""

    name: Annotated[
        str | None,
        argument(
            "FAMILY|MODEL",
            "A family that the list names, or a diffusers folder or hub id.",
            autocompletion=complete.families,
        ),
    ] = None


@app.command(
    **command_settings("svdpp models", "svdpp models ltx2", "svdpp models path/to/checkpoint")
)
@with_option_groups
def models(console: Console, options: ModelsOptions) -> None:
    """List the families of models, and what one family or checkpoint takes.

    A model is of the family whose pipeline its model_index.json names. Of a checkpoint only the
    configs are read; svdpp plan --memory estimates its memory.
    """
    name = options.name
    if name is None:
        found = [describe(family) for family in SAMPLING_CLASSES]
        columns = ("family", "title", "from")
        rows = [{**one, "from": " or ".join(one["inputs"])} for one in found]
        console.table([{key: row[key] for key in columns} for row in rows])
    else:
        found = [describe(name) if name in SAMPLING_CLASSES else _describe_checkpoint(name)]
        words = {
            f"--param {key}": {
                "default": one["default_in_words"] or str(one["default"]),
                "range": f"{one['lowest']:g} to {one['highest']:g}",
                "help": one["help"],
            }
            for key, one in found[0]["parameters"].items()
        }
        console.show({**found[0], "parameters": words})
    console.json({"schema_version": 1, "families": found})


def describe(family: str) -> dict[str, Any]:
    """Return a family's pipelines, inputs, schedulers, and parameters with their defaults.

    Args:
        family: One of `SAMPLING_CLASSES`.

    Returns:
        Plain values, one entry of the list in `svdpp models --json`.
    """
    from svdpp.config.families.registry import FAMILY_SPECS

    spec, sampling = FAMILY_SPECS[family], SAMPLING_CLASSES[family]()
    classes = {"text": spec.text_pipeline, _visual(sampling): spec.image_pipeline}
    return {
        "family": family,
        "title": spec.title,
        "pipelines": list(dict.fromkeys(filter(None, classes.values()))),
        "inputs": [what for what, name in classes.items() if name is not None],
        "schedulers": list(spec.schedulers),
        "lora": spec.loras,
        "example": spec.example,
        "license": spec.license,
        "defaults": {name: getattr(sampling, name) for name in _COMMON if hasattr(sampling, name)},
        "parameters": {
            name: {
                **{"default": param.default, "default_in_words": param.shown_default},
                **{"lowest": param.lowest, "highest": param.highest, "help": param.help},
            }
            for name, param in extra_params(type(sampling)).items()
        },
    }


def _visual(sampling: SamplingConfig) -> str:
    """Return the images or videos that a clip needs besides a prompt."""
    return ", ".join(["a video" if sampling.from_video else "an image", *sampling.videos])


def _describe_checkpoint(name: str) -> dict[str, Any]:
    """The family of a checkpoint, as this one has it."""
    from svdpp.models.checkpoint import find_checkpoint

    try:
        checkpoint = find_checkpoint(ModelConfig(name=name), weights=False)
    except ModelError as error:
        if "/" in name:
            raise
        known = ", ".join(SAMPLING_CLASSES)
        raise RequestError(
            f"there is no family or model {name!r}", f"one of {known}", details={"name": name}
        ) from error
    about = describe(checkpoint.family)
    del about["example"], about["license"]  # the checkpoint may have another license
    visual = _visual(SAMPLING_CLASSES[checkpoint.family]())
    takes = {"needed": [visual], "optional": ["text", visual], "refused": ["text"]}
    for unused in checkpoint.unused_parameters:
        about["parameters"].pop(unused, None)
    return {
        **about,
        "model": name,
        "inputs": takes[checkpoint.image_use],
        "components": list(checkpoint.weighted_components),
        "experts": checkpoint.num_experts,
        "schedulers": [checkpoint.scheduler_class],
    }
