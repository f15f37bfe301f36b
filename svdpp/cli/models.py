"""`svdpp models`: lists families of models, and shows what a family or checkpoint takes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options import complete
from svdpp.cli.options.declare import argument
from svdpp.config import (
    DEMO_MODELS,
    SAMPLING_CLASSES,
    ModelConfig,
    SamplingConfig,
    extra_params,
    sampling_of_model,
)
from svdpp.errors import ModelError, RequestError

if TYPE_CHECKING:
    from svdpp.config.families.spec import FamilySpec

_COMMON = ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale")


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Option of `svdpp models`: the family or checkpoint to show."""

    name: Annotated[
        str | None,
        argument(
            "FAMILY|MODEL",
            "A family or demo model that svdpp models lists, or a diffusers folder or hub id.",
            autocompletion=complete.families_and_demos,
        ),
    ] = None


@app.command(**command_settings("svdpp models", "svdpp models ltx2", "svdpp models demo-text"))
@with_option_groups
def models(console: Console, options: ModelsOptions) -> None:
    """List the families of models, and what one family or checkpoint takes.

    The list shows an example from the hub for each family, and what the tests have verified; demo
    models come with svdpp.

    The pipeline in a checkpoint's model_index.json decides its family. Only the configs of a
    checkpoint are read; svdpp plan --memory estimates the memory of a run.
    """
    name = options.name
    if name is None:
        found = [describe(family) for family in SAMPLING_CLASSES]
        for one in found:
            starts_from = " or ".join(one["inputs"])
            console.result(_fold(f"{one['family']}: {one['title']}; from {starts_from}"))
            console.result(_fold(f"    {one['options']}"))
            console.result(f"    verified: {_verified_text(one['verified'])}")
        for name, demo in DEMO_MODELS.items():
            console.result(_fold(f"{name}: {demo.title}"))
            console.result(f"    --model {name}")
        console.result(_fold(_VERIFIED_BY))
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
    console.json({"schema_version": 1, "families": found, "demos": [*DEMO_MODELS]})


_VERIFIED_BY = (
    "verified: by the tests, which compare clips of small checkpoints (random weights) with those "
    "of diffusers, on the CPU in fp32 and bf16. Published weights and GPUs have not been tried."
)


def _verification_in_tests(spec: FamilySpec) -> dict[str, Any]:
    """Return how closely a family's clips match those of diffusers in the tests.

    The entry `cuts` is about clips whose steps are split between ranks, and `pairs` is about clips
    for which two ranks compute the conditional and the unconditional half of each step (CFG). In
    some families, this divides a batch between the two ranks. Then clips are close to those of
    diffusers, but not bitwise equal. The test is `tests/models/test_registry.py`.
    """
    pairs = "bitwise" if spec.pairs_are_exact else "close"
    return {
        "cuts": "bitwise",
        "pairs": "refused" if spec.branches is None else pairs,
        "dtypes": ["fp32", "bf16"],
        "device": "cpu",
        "weights": "small, random",
    }


def _verified_text(verified: Mapping[str, Any]) -> str:
    text = {
        "bitwise": ", --cfg-parallel 2 too",
        "close": ", --cfg-parallel 2 nearly",
        "refused": "; --cfg-parallel 2 is refused",
    }
    return f"every split has the bits of diffusers{text[verified['pairs']]}"


def _fold(text: str) -> str:
    """Break a line of the list of `svdpp models` into lines of at most 80 characters."""
    return textwrap.fill(text, 80, subsequent_indent="    ", break_on_hyphens=False)


def describe(family: str) -> dict[str, Any]:
    """Return a model family's pipelines, inputs, schedulers, and parameters with their defaults.

    Args:
        family: One of `SAMPLING_CLASSES`.

    Returns:
        Plain values, one entry of the list in `svdpp models --json`.
    """
    from svdpp.config.families.registry import FAMILY_OF_PIPELINE, FAMILY_SPECS

    spec, sampling = FAMILY_SPECS[family], SAMPLING_CLASSES[family]()
    # `--family` is needed only if the checkpoint's configs name another family's pipeline.
    is_borrowed = any(FAMILY_OF_PIPELINE[alias] != family for alias in spec.aliases)
    as_family = f" --family {family}" if is_borrowed else ""
    remark = f", {spec.example_remark}" if spec.example_remark else ""
    classes = {"text": spec.text_pipeline, _visual(sampling): spec.image_pipeline}
    return {
        "family": family,
        "title": spec.title,
        "pipelines": list(dict.fromkeys(filter(None, classes.values()))),
        "inputs": [what for what, name in classes.items() if name is not None],
        "last_image": "refused" if spec.last_image_arguments is None else "optional",
        "max_references": spec.max_references,
        "schedulers": list(spec.schedulers),
        "lora": spec.loras,
        "gguf": spec.gguf,
        "example": spec.example,
        "options": f"--model {spec.example}{as_family}{remark}",
        "license": spec.license,
        "verified": _verification_in_tests(spec),
        **_describe_parameters(sampling),
    }


def _describe_parameters(sampling: SamplingConfig) -> dict[str, Any]:
    """Return a family's sampling parameters: their defaults, and ranges of extra parameters."""
    return {
        "defaults": {name: getattr(sampling, name) for name in _COMMON if hasattr(sampling, name)},
        "parameters": {
            name: {
                "default": getattr(sampling, name),
                "default_in_words": param.shown_default,
                **{"lowest": param.lowest, "highest": param.highest, "help": param.help},
            }
            for name, param in extra_params(type(sampling)).items()
        },
    }


def _visual(sampling: SamplingConfig) -> str:
    """Return the names of the images or videos that a family's clips start from, as one text."""
    return ", ".join(["a video" if sampling.from_video else "an image", *sampling.videos])


def _describe_checkpoint(name: str) -> dict[str, Any]:
    """Describe a checkpoint like its family, but with the checkpoint's inputs and defaults."""
    from svdpp.models.checkpoint import find_checkpoint

    try:
        checkpoint = find_checkpoint(ModelConfig(name=name), weights=False)
    except ModelError as error:
        if "/" in name:
            raise
        known = ", ".join((*SAMPLING_CLASSES, *DEMO_MODELS))
        raise RequestError(
            f"there is no family or model {name!r}", f"use one of {known}", details={"name": name}
        ) from error
    sampling = sampling_of_model(
        name, checkpoint.family, {}, from_image=checkpoint.image_use == "needed"
    ).with_model_defaults(model_frames=checkpoint.model_frames)
    about = {**describe(checkpoint.family), **_describe_parameters(sampling)}
    # These entries of the family describe its example checkpoint. They may not hold for the
    # checkpoint that the user named; its license, for example, may differ.
    for of_example in ("example", "options", "license"):
        del about[of_example]
    visual = _visual(SAMPLING_CLASSES[checkpoint.family]())
    takes = {"needed": [visual], "optional": ["text", visual], "refused": ["text"]}
    for unused in checkpoint.unused_parameters:
        about["parameters"].pop(unused, None)
    return {
        **about,
        "model": name,
        "inputs": takes[checkpoint.image_use],
        "last_image": checkpoint.last_image_use,
        "components": list(checkpoint.weighted_components),
        "experts": checkpoint.num_experts,
        "schedulers": list(filter(None, [checkpoint.scheduler_class])),
        **_describe_demo(name),
    }


def _describe_demo(name: str) -> dict[str, Any]:
    """Return license, vocabulary and example prompt of a demo model; empty for other models."""
    if name not in DEMO_MODELS:
        return {}
    demo = DEMO_MODELS[name]
    about: dict[str, Any] = {"license": demo.license}
    if demo.words:
        about["words"] = {what: list(words) for what, words in demo.words.items()}
        about["prompt"] = demo.prompt
    return about
