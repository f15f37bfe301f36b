"""Reading and checks of a checkpoint's JSON configs: the index, and the configs of the components.

The index is `modular_model_index.json` or `model_index.json`, and names the components' classes.
The configs are untrusted. A checkpoint is refused if it needs code, if it names a class that svdpp
does not know, or if a size in a config is above its limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.config import ModelConfig
from svdpp.config.families.registry import FAMILY_OF_PIPELINE, FAMILY_SPECS
from svdpp.config.families.spec import FamilySpec
from svdpp.errors import ModelError, RequestError
from svdpp.models.files import (
    MODEL_HINT,
    UNSUPPORTED_HINT,
    ComponentFolder,
    JsonFile,
    has_weights,
    read_json,
    short_repr,
)
from svdpp.models.repositories import find_component_folders
from svdpp.models.torchao_files import QUANTISATION_KEY, check_quantisation

# File names of the index, in the order of preference.
_INDEX_FILES = ("modular_model_index.json", "model_index.json")
#: Further arguments of the call `CLASS.from_config(pipe.scheduler.config, ...)`, by CLASS. If a
#: checkpoint's scheduler is not supported, the error's hint shows this call, with which the user
#: converts the scheduler to a supported CLASS.
_FURTHER_ARGUMENTS = {
    "UniPCMultistepScheduler": ', prediction_type="flow_prediction", use_flow_sigmas=True, '
    "flow_shift=pipe.scheduler.config.shift",
}
#: Limit for N, the number of times that a VAE halves a frame's side. Without a limit, an
#: untrusted config could make 2 ** N a huge number.
_MOST_HALVINGS = 16
# Libraries that a component's class may come from.
_LIBRARIES = ("diffusers", "transformers")
_PROCESSORS = r"CLIP(Image)?Processor(Pil)?|CLIPFeatureExtractor|SiglipImageProcessor(Pil)?"
#: Patterns of the class names that are allowed for a component, by component name. Only components
#: that several model families have are listed.
_CLASSES = {
    "tokenizer": r"(T5|ByT5|CLIP|Llama|Gemma|Qwen2)Tokenizer(Fast)?|TokenizersBackend|"
    r"Qwen2(_5_)?VLProcessor",
    "text_encoder": r"(U?MT5|T5)EncoderModel|CLIPTextModel|LlamaModel|Qwen2_5_VLTextModel|"
    r"(Llava|Gemma3|Qwen2_5_VL)ForConditionalGeneration",
    "image_encoder": r"CLIPVisionModel(WithProjection)?|SiglipVisionModel",
    "image_processor": _PROCESSORS,
    "feature_extractor": _PROCESSORS,
    "vae": r"AutoencoderKL\w*",
}
_NO_CODE = "svdpp runs no code from a checkpoint"
#: Config keys that make diffusers or transformers load other code or weights.
#: `attn_implementation` can name a kernel on the hub, and `transformers_weights` another weight
#: file. The harmless flag `_attn_implementation_autoset` does not match.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|_implementation$|use_kernels|"
    r"kernel_(config|mapping)|transformers_weights"
)
# Largest allowed values of config keys that determine memory use. They are well above the values of
# real models: for example, Wan 2.2 A14B has 40 layers, LTX-2 text embeddings of size 3840, Gemma 3
# a vocabulary of 262,208, and Qwen 2.5 VL 128,000 positions.
_LIMITS = (
    (re.compile(r"num_.*(layers|blocks)|layers_per_block|.*num_res_blocks|depth"), 1024),
    (re.compile(r"image_size|patch_size"), 2**13),
    (re.compile(r"num_train_timesteps"), 100_000),
    (re.compile(r"num_.*heads|.*_channels|.*_dim|hidden_size|.*_patches|d_model|d_ff|d_kv"), 2**18),
    (re.compile(r"vocab_size|intermediate_size"), 2**20),
    (re.compile(r"max_position_embeddings"), 2**22),
)


def read_index(folder: Path, requested_family: str | None) -> tuple[JsonFile, str]:
    """Read a checkpoint's index, and choose the family that runs the pipeline.

    As in diffusers, `modular_model_index.json` is preferred to `model_index.json`.

    Args:
        folder: Folder of the checkpoint.
        requested_family: Name of the family that the user asks for. None: the default family of the
            pipeline.

    Returns:
        Index, and name of the family.

    Raises:
        ModelError: The index is missing or damaged, or no family runs its pipeline.
        RequestError: The requested family does not run the pipeline.
    """
    present = [name for name in _INDEX_FILES if (folder / name).is_file()]
    if not present:
        raise ModelError(f"{_INDEX_FILES[-1]} is missing", MODEL_HINT)
    every = [read_json(folder, name) for name in present]
    known = [each for each in every if str(each.values.get("_class_name")) in FAMILY_OF_PIPELINE]
    wanted = [
        each for each in known if requested_family in _families_of(each.values["_class_name"])
    ]
    index = (wanted or known or every)[0]
    name = index.values.get("_class_name")
    if not isinstance(name, str) or name not in FAMILY_OF_PIPELINE:
        raise index.error(
            f"the pipeline is {short_repr(name)}, which svdpp does not run",
            "svdpp models lists the pipelines that svdpp runs",
        )
    families = _families_of(name)
    if requested_family is None:
        return index, families[0]
    if requested_family in families:
        return index, requested_family
    raise RequestError(
        f"{index.label} names the pipeline {name}, which `family` {short_repr(requested_family)} "
        "does not run",
        f"use `family` {' or '.join(families)}",
    )


class Configs:
    """Configs of a checkpoint's components. The constructor checks them against a family's spec."""

    def __init__(
        self, index: JsonFile, spec: FamilySpec, folder: Path, model: ModelConfig, *, is_local: bool
    ) -> None:
        self.index = index
        _refuse_code(folder)
        for place, key, value in _entries_of(index.values):
            _refuse_code_key(index, place, key, value)
        _check_blocks(index, spec)
        #: Class name of each component, by component name.
        self.classes = _classes_of(index, spec)
        for part in sorted(spec.required_components - self.classes.keys()):
            raise index.error(f"the component {part} is missing", details={"component": part})
        #: Class name of the scheduler; None: the family has no scheduler.
        self.scheduler_class: str | None = None
        if spec.schedulers:
            self.scheduler_class = self._find_scheduler(spec.schedulers)
        #: Values of the scheduler's config; empty if the family has no scheduler.
        self.scheduler_config: Mapping[str, Any] = {}
        parts = [*self.classes, *(["scheduler"] if spec.schedulers else [])]
        #: Components whose files are not simply in `folder/NAME`; see
        #: `Checkpoint.component_folders`.
        self.folders = find_component_folders(index, parts, folder, model, is_local=is_local)
        folders = {part: ComponentFolder(part, folder, part) for part in parts}
        folders |= {each.part: each for each in self.folders}
        for component in self.folders:
            _refuse_code_of(component)
        self._configs: dict[str, JsonFile] = {}
        #: Names of the denoisers that are quantised, as in `Checkpoint.int8_denoisers`.
        self.int8_denoisers: tuple[str, ...] = ()
        if spec.schedulers:
            config = _read_checked(folders["scheduler"], "scheduler_config.json")
            reason = "is a second scheduler, whose state svdpp cannot send to another rank"
            config.refuse("solver_p", reason)
            if not spec.steps_use_generator:
                reason = "draws noise in every step from torch's global generator"
                config.refuse("stochastic_sampling", reason)
            self.scheduler_config = config.values
            self._configs["scheduler"] = config
        for part in self.classes:
            if has_weights(part):
                is_denoiser = part in spec.denoisers
                config = _read_checked(folders[part], "config.json", is_denoiser=is_denoiser)
                self._configs[part] = config
                if config.values.get(QUANTISATION_KEY) is not None:
                    self.int8_denoisers += (part,)
                continue
            if part in spec.own_guiders:
                self._configs[part] = _read_checked(folders[part], "guider_config.json")
                continue
            for path in sorted(folders[part].path.glob("*_config.json")):
                _read_checked(folders[part], path.name)

    def _find_scheduler(self, tested: Sequence[str]) -> str:
        """Return the class name of a checkpoint's scheduler; refuse classes that no test covers.

        Args:
            tested: Classes of schedulers that svdpp's tests cover for the family.

        Raises:
            ModelError: The scheduler's class is not in `tested`.
        """
        name = _entry(self.index, "scheduler")[1]
        if name in tested:
            return str(name)
        others = _families_of(self.index.values["_class_name"])
        fitting = [each for each in others if name in FAMILY_SPECS[each].schedulers]
        first = tested[0]
        raise self.index.error(
            f"the scheduler {short_repr(name)} is not supported: svdpp's tests cover this family "
            f"only with {' and '.join(tested)}",
            f"use `family` {fitting[0]}"
            if fitting
            else f"in diffusers, set pipe.scheduler = {first}.from_config(pipe.scheduler.config"
            f"{_FURTHER_ARGUMENTS.get(first, '')}), then call pipe.save_pretrained(FOLDER)",
            details={"scheduler": name, "supported": list(tested)},
        )

    def of(self, part: str, **defaults: Any) -> JsonFile:
        """Return the JSON config of one component of a checkpoint.

        Args:
            part: Name of the component.
            defaults: Default values of the component's class, for keys that the config lacks.
        """
        config = self._configs[part]
        return replace(config, values={**defaults, **config.values})

    def whole_latents(self, size_multiple: tuple[int, int], frames_unit: int) -> tuple[int, int]:
        """Return the numbers of pixels of which a clip's height and width must be multiples.

        Each number is the least common multiple of the family's number and the compression factor
        of the checkpoint's VAE. The method also checks that the VAE's compression in time fits the
        numbers of frames that the family allows. If a size or a number of frames did not fit the
        VAE, diffusers would round it down, and the clip would be smaller or shorter than requested.

        Args:
            size_multiple: Numbers of pixels of which the height and the width of all clips of the
                family must be multiples, whatever the VAE.
            frames_unit: Step between the numbers of frames that the family allows, such as 4 for
                clips of 4 * n + 1 frames. 1: the family checks the number of frames itself.

        Raises:
            ModelError: `frames_unit` is not a multiple of the number of frames that the VAE
                compresses to one.
        """
        vae = self.of("vae")
        side, frames = _compression(vae.values)
        if frames_unit > 1 and frames_unit % frames:
            raise vae.error(
                f"the VAE compresses {frames} frames to one, but this family needs a VAE for which "
                f"this number is a divisor of {frames_unit}",
                UNSUPPORTED_HINT,
                details={"frames": frames, "frames_unit": frames_unit},
            )
        height, width = size_multiple
        return math.lcm(height, side), math.lcm(width, side)


def _compression(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Return a VAE's compression factors in space (height and width) and in time (frames).

    A factor is 1 if the config does not have it. For example, the config of an image VAE has no
    factor in time.
    """
    scaling, blocks = vae.get("spatio_temporal_scaling"), vae.get("block_out_channels")
    side = frames = 1
    if isinstance(scaling, list):  # VAEs of LTX
        factor = 2 ** min(sum(map(bool, scaling)), _MOST_HALVINGS)
        side, frames = (factor * _size(vae.get(f"patch_size{end}")) for end in ("", "_t"))
    elif isinstance(blocks, list) and "spatial_downsample_factors" not in vae:
        side = 2 ** min(max(len(blocks) - 1, 0), _MOST_HALVINGS)
    for end in ("scale_factor_{}", "{}_compression_ratio"):
        side = _size(vae.get(end.format("spatial")), side)
        frames = _size(vae.get(end.format("temporal")), frames)
    return side, frames


def _size(value: object, default: int = 1) -> int:
    """Return a value of a VAE's config if it is a positive integer, else `default`."""
    return value if type(value) is int and value > 0 else default


def _read_checked(component: ComponentFolder, name: str, *, is_denoiser: bool = False) -> JsonFile:
    """Read a component's config; refuse keys that load code, and huge sizes (10^9 layers)."""
    config = component.read_json(name)
    for place, key, value in _entries_of(config.values):
        if key == QUANTISATION_KEY and value is not None:
            check_quantisation(config, place, value, is_denoiser=is_denoiser)
        _refuse_code_key(config, place, key, value)
        values = value if isinstance(value, list) else [value]
        largest = max((size for size in values if type(size) is int), default=0)
        for names, limit in _LIMITS:
            if names.fullmatch(key) and largest > limit:
                raise config.error(
                    f"{place} is {short_repr(value)}, but at most {limit} is allowed",
                    details={"key": place, "value": value, "limit": limit},
                )
    return config


def _refuse_code_key(config: JsonFile, place: str, key: str, value: object) -> None:
    """Check that an entry of a config or an index does not make the libraries load code."""
    if _CODE_KEYS.search(key) and value is not None:
        raise config.error(
            f"the key {short_repr(place)} is not supported: {_NO_CODE}",
            UNSUPPORTED_HINT,
            details={"key": place},
        )


def _entries_of(values: object, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of each entry of a component's config and its nested configs.

    A path joins the keys with dots, such as `text_config.num_hidden_layers`.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield place + key, key, value
            yield from _entries_of(value, f"{place}{key}.")
    elif isinstance(values, list):
        for each in values:
            yield from _entries_of(each, place)


def _families_of(pipeline: str) -> list[str]:
    """Return the families that run a pipeline's checkpoints; the default family is first."""
    main = FAMILY_OF_PIPELINE[pipeline]
    others = [name for name, spec in FAMILY_SPECS.items() if pipeline in spec.aliases]
    return [main, *(name for name in others if name != main)]


def _classes_of(index: JsonFile, spec: FamilySpec) -> dict[str, str]:
    """Check the class of each component in a checkpoint's index; return the class names."""
    classes, patterns = {}, {**_CLASSES, **spec.component_classes}
    for part in sorted(spec.components):
        library, name = _entry(index, part)
        if name is None:
            continue
        # diffusers would import any module that the index names, so only known modules pass.
        if library not in (*_LIBRARIES, spec.pipeline_package):
            raise index.error(
                f"{part!r} is from the module {short_repr(library)}, but {_NO_CODE}",
                UNSUPPORTED_HINT,
                details={"component": part},
            )
        if not re.fullmatch(patterns.get(part.removesuffix("_2"), spec.denoiser), str(name)):
            raise index.error(
                f"the {part} is of class {short_repr(name)}, which is not supported",
                UNSUPPORTED_HINT,
                details={"component": part},
            )
        classes[part] = name
    return classes


def _entry(index: JsonFile, part: str) -> tuple[Any, Any]:
    """Return a component's library and class name from a checkpoint's index.

    The class name is None if the checkpoint does not have the component.
    """
    entry = index.values.get(part)
    if isinstance(entry, list) and len(entry) == 2:
        return entry[0], entry[1]
    if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], Mapping)):
        return _LIBRARIES[0], entry
    library, name, where = entry
    places = ("subfolder", "pretrained_model_name_or_path", "repo")
    if name is None and not any(map(where.get, places)):
        # diffusers writes such an entry, without a path, if the saved pipeline did not have the
        # component.
        return _LIBRARIES[0], None
    hint = where.get("type_hint")
    if name is None and isinstance(hint, list) and len(hint) == 2:
        library, name = hint
    return library, name


def _check_blocks(index: JsonFile, spec: FamilySpec) -> None:
    """Check that svdpp supports the blocks and guiders that a modular pipeline's index names.

    The blocks, if the index names any, must be in `ModularSpec.blocks`. The index may configure
    only the guiders in `own_guiders` of the spec. For every other guider, it must have no entry:
    diffusers then creates the guider with default values, the only ones that svdpp supports.

    Raises:
        ModelError: The index names other blocks, or has an entry for another guider.
    """
    if spec.modular is None:
        return
    for guider in sorted(spec.modular.guiders.keys() - spec.own_guiders):
        if index.values.get(guider) is not None:
            raise index.error(
                f"it has an entry for {guider}: svdpp runs this family only with the {guider} that "
                "diffusers creates by default",
                "remove the entry from the file",
                details={"component": guider},
            )
    name = index.values.get("_blocks_class_name")
    if name is None or name in spec.modular.blocks:
        return
    raise index.error(
        f"the blocks {short_repr(name)} are not supported: svdpp's tests cover this family only "
        f"with {' and '.join(spec.modular.blocks)}",
        UNSUPPORTED_HINT,
        details={"blocks": short_repr(name), "supported": list(spec.modular.blocks)},
    )


def _refuse_code(folder: Path) -> None:
    """Raise a `ModelError` if the folder of a checkpoint has files that contain or load code."""
    # An adapter_config.json can name a repository from which the libraries would load weights.
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            _refuse_file(path.relative_to(folder).as_posix())


def _refuse_code_of(component: ComponentFolder) -> None:
    """Raise a `ModelError` if the folder of a component has files that contain or load code."""
    for pattern in ("*.py", "adapter_config.json"):
        for path in sorted(component.path.glob(pattern)):
            _refuse_file(component.label(path.name))


def _refuse_file(name: str) -> None:
    raise ModelError(
        f"the folder contains {short_repr(name)}, but {_NO_CODE}",
        "remove the file if the weights do not need it",
    )
