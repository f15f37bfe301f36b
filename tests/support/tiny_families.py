"""Tiny checkpoints of every family with random weights, saved by diffusers.

Each module of `tests.support.families` has `PARTS` and `CASES`. `PARTS` has functions that create
the components of a family's checkpoint; their argument says whether the pipeline takes an image.
`CASES` has the clips that tests make.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

from svdpp.config.families.registry import FAMILY_SPECS
from tests.support.family_case import Case
from tests.support.tiny_parts import Parts, rebuild

_FOLDER = Path(__file__).with_name("families")
_NAMES = sorted(path.stem for path in _FOLDER.glob("*.py"))
_MODULES = [import_module(f"tests.support.families.{name}") for name in _NAMES]
_PARTS: Mapping[str, Callable[..., Parts]] = {
    family: make for module in _MODULES for family, make in module.PARTS.items()
}
#: Test cases of all families, by name.
CASES: Mapping[str, Case] = {
    name: case for module in _MODULES for name, case in module.CASES.items()
}
#: Name of the first test case of each family.
FIRST = {case.family: name for name, case in reversed(CASES.items())}

#: Words in the names of the test cases that quick tests leave out, because each of these cases
#: resembles another one. The two cases differ only in the scheduler, the guidance or the number of
#: references, or an image is encoded as in another family.
_ALIKE = (
    "euler",
    "order",
    "unguided",
    "echo-image",
    "kandinsky6-image",
    "pyramid-image",
    "distilled-image",
    "pyramid-video",
    "distilled-video",
    "1.5-modular-image",
    "one-reference",
    "interval",
    "mixed",
    "zero-first",
    "22-modular-momentum",
    "22-modular-skipped",
    "vace-modular-momentum",
    "vace-modular-skipped",
    "vace-modular-image",
    "ltx2-modular-image",
    "ltx2-condition-last-image",
    "minimax-h3-image",
    "kandinsky6-distilled",
    "replace-guided",
    "control-references",
    "modular-references",
)
#: Names of the test cases that contain none of these words.
NOT_ALIKE = [name for name in CASES if not any(word in name for word in _ALIKE)]

#: Test cases that cover every kind of family: with guidance in one batch, with two experts, with
#: further input videos, and with sound.
KINDS = ("svd", "wan", "wan-animate", "ltx2")

#: Class names for families that have a processor of text and images in place of a tokenizer.
_PROCESSORS = {"kandinsky5": "Qwen2VLProcessor", "kandinsky6": "Qwen2_5_VLProcessor"}

_FULL = (pytest.mark.slow, pytest.mark.full)
_OPTIONS = {"max_shard_size", "variant"}


def chosen(
    quick: Collection[str], in_ci: Collection[str] = (), every: Iterable[str] = CASES
) -> list[Any]:
    """Return test cases of families as pytest parameters, with marks for the runs that use them.

    `make test` runs the cases `quick`, CI also the cases `in_ci`, and the full test grids all
    cases.
    """

    def marks(name: str) -> tuple[Any, ...]:
        return () if name in quick else _FULL[:1] if name in in_ci else _FULL

    return [pytest.param(name, marks=marks(name)) for name in every]


def save_tiny(family: str, folder: Path, *, image: bool = False, **changes: Any) -> Path:
    """Save a tiny pipeline of a family, with random weights, to `folder`; return the folder.

    `changes` may have options of `save_pretrained`, options of the function in `PARTS`, and
    components that replace those of that function. There are three further options. `configs` has
    changed config values, by component (see `rebuild`). `class_names` has class names to write into
    the index, by component. `saved_dtype` is the dtype of all saved weights.
    """
    options = {name: changes.pop(name) for name in _OPTIONS & changes.keys()}
    if family.endswith("_v2v"):
        family, image = family.removesuffix("_v2v"), False
    configs, class_names = changes.pop("configs", {}), changes.pop("class_names", {})
    saved_dtype = changes.pop("saved_dtype", None)
    make = _PARTS[family]
    own = {name: changes.pop(name) for name in inspect.signature(make).parameters & changes.keys()}
    image = image and not own.get("expand_timesteps")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {**make(image, **own), **changes}
        parts |= {name: rebuild(parts[name], values) for name, values in configs.items()}
        for part in parts.values() if saved_dtype is not None else ():
            if isinstance(part, torch.nn.Module):
                part.to(saved_dtype)
        spec = FAMILY_SPECS[family]
        pipeline: Any = getattr(diffusers, spec.pipeline(image or spec.text_pipeline is None))
        if spec.modular is None:
            pipeline(**parts).save_pretrained(folder, safe_serialization=True, **options)
        else:
            _save_modular(pipeline(), parts, folder, **options)
    _name_published_classes(folder, family, class_names)
    return folder


def _save_modular(pipe: Any, parts: Parts, folder: Path, **options: Any) -> None:
    """Save a tiny modular pipeline. `parts` has its components and values of its config."""
    components = {name: part for name, part in parts.items() if name in pipe.component_names}
    for name in {"guider", "guider_2"} & components.keys():
        # the pipeline saves a guider only if the guider was loaded from files
        components[name].save_pretrained(folder / name)
        place = {"pretrained_model_name_or_path": str(folder), "subfolder": name}
        kind = type(components[name])
        components[name] = ComponentSpec(name=name, type_hint=kind, **place).load()
    pipe.update_components(**{name: part for name, part in components.items() if part is not None})
    pipe.update_components(
        **{name: parts[name] for name in pipe._config_specs.keys() & parts.keys()}
    )
    pipe.save_pretrained(str(folder), overwrite_modular_index=True, **options)


def _name_published_classes(folder: Path, family: str, class_names: Mapping[str, str]) -> None:
    """Write the class names of published checkpoints into a tiny one's `model_index.json`.

    Without torchvision, some image processors of transformers cannot be created, so the checkpoint
    is saved with their PIL variants. Kandinsky's processor cannot be created at all.
    """
    (path,) = folder.glob("*model_index.json")
    index = json.loads(path.read_text())
    for part, entry in index.items():
        if isinstance(entry, list) and str(entry[1]).endswith("ProcessorPil"):
            index[part] = [entry[0], entry[1].removesuffix("Pil")]
    if family in _PROCESSORS:
        index["tokenizer"] = ["transformers", _PROCESSORS[family]]
        image = {"image_processor_type": "Qwen2VLImageProcessor"}
        (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(image))
    for part, name in class_names.items():
        index[part] = [index[part][0], name, *index[part][2:]]
    path.write_text(json.dumps(index))


save_tiny_wan = partial(save_tiny, "wan")
save_tiny_ltx = partial(save_tiny, "ltx")
