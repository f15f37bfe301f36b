"""The configs of a checkpoint, which are untrusted: size and values are bounded, code is refused.

Knows no torch.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.errors import ModelError, first_line, is_out_of_memory

if TYPE_CHECKING:
    from svdpp.models.engine.rows import Row

#: What a family's configs say of a checkpoint: fields of `Checkpoint`.
Facts = dict[str, Any]


@dataclass(frozen=True)
class JsonFile:
    """A JSON object, and the label of its file for messages."""

    label: str
    values: Mapping[str, Any]

    def error(self, message: str, hint: str = "") -> ModelError:
        """A `ModelError` whose message begins with the file's label."""
        return ModelError(f"{self.label}: {message}", hint)

    def count(self, key: str, largest: int) -> int:
        """The integer at `key`; ModelError if it is not from 1 to `largest`."""
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(f"{key} is {short_repr(value)}, not an integer from 1 to {largest}")
        return value

    def require(self, key: str, expected: object, reason: str) -> None:
        """ModelError if the value at `key` is not `expected`."""
        if (value := self.values.get(key)) != expected:
            raise self.error(f"{key} is {short_repr(value)} but must be {expected}, {reason}")

    def refuse(self, key: str, reason: str) -> None:
        """ModelError if `key` is set, or one of a list."""
        value = self.values.get(key)
        if any(value) if isinstance(value, list) else value:
            raise self.error(f"{key} is not supported: it {reason}")


def read_json(folder: Path, name: str) -> JsonFile:
    """Reads the JSON object in a file of a checkpoint."""
    if not (folder / name).is_file():  # also a pipe, which would never end
        raise ModelError(f"{name} is missing")
    try:
        with (folder / name).open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES)  # the rest of a longer one is missed as JSON
        check_not_pointer(text, name)
        values = json.loads(text)
    except OSError as error:
        raise ModelError(f"{name} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} does not hold valid JSON") from error
    if not isinstance(values, dict):
        raise ModelError(f"{name} does not hold a JSON object")
    return JsonFile(name, values)


def check_not_pointer(data: bytes, label: str) -> None:
    """Detects what a clone without git-lfs has in place of a file."""
    if data.startswith(b"version https://git-lfs"):
        raise ModelError(f"{label} is a git-lfs pointer, not the file itself", "git lfs pull")


def short_repr(value: object) -> str:
    """The repr of an untrusted value, shortened to one line."""
    return _REPR.repr(value)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler of a checkpoint: its class and its config file."""

    name: str
    values: Mapping[str, Any] = field(hash=False)


class Configs:
    """The configs of one checkpoint's components, checked for a family's row."""

    def __init__(self, folder: Path, index: JsonFile, row: Row) -> None:
        self.index = index
        self._folder, self._read = folder, dict[str, JsonFile]()
        _refuse_code(folder)
        #: The class of each component.
        self.classes = _classes_of(index, row.parts, row.denoiser)
        for part in sorted(row.required - self.classes.keys()):
            raise index.error(f"the component {part} is missing")
        self.scheduler = self._scheduler(row.schedulers)
        for part in filter(has_weights, self.classes):
            self.of(part)

    def _scheduler(self, known: tuple[str, ...]) -> SchedulerConfig:
        name, config = _entry(self.index, "scheduler")[1], read_json(self._folder, _SCHEDULER)
        if name not in known:
            proven = f"this family's steps are proven with {' and '.join(known)}"
            raise self.index.error(f"the scheduler {short_repr(name)} is not supported: {proven}")
        for key, reason in _REFUSED_OF_SCHEDULERS.items():
            config.refuse(key, reason)
        _check_values(config)
        return SchedulerConfig(name=name, values=config.values)

    def of(self, part: str, **defaults: Any) -> JsonFile:
        """The config of one component, with its class's defaults for keys that it lacks."""
        if part not in self._read:
            self._read[part] = read_json(self._folder, f"{part}/config.json")
            _check_values(self._read[part])
        config = self._read[part]
        return JsonFile(config.label, {**defaults, **config.values})


def has_weights(part: str) -> bool:
    """Whether a component has weights; tokenizers, processors and guiders have none."""
    return not part.startswith("tokenizer") and not part.endswith(_WITHOUT_WEIGHTS)


def _classes_of(index: JsonFile, parts: frozenset[str], denoiser: str) -> dict[str, str]:
    classes = {}
    for part in sorted(parts):
        library, name = _entry(index, part)
        if name is None:
            continue
        if library not in _LIBRARIES:  # diffusers would import it
            raise index.error(f"{part!r} is from the module {short_repr(library)}, but {_NO_CODE}")
        if not re.fullmatch(_CLASSES.get(part.removesuffix("_2"), denoiser), str(name)):
            raise index.error(f"the {part} is of class {short_repr(name)}, which is not supported")
        classes[part] = name
    return classes


def _entry(index: JsonFile, part: str) -> tuple[Any, Any]:
    """Library and class of a component; the class is None if the checkpoint does not have it."""
    entry = index.values.get(part)
    if isinstance(entry, list) and len(entry) == 2:
        return entry[0], entry[1]
    return _LIBRARIES[0], entry


def _check_values(config: JsonFile) -> None:
    """Refuses keys that load code, and sizes that no memory holds."""
    for key, value in config.values.items():
        if _CODE_KEYS.search(key):
            raise config.error(f"the key {short_repr(key)} is not supported: {_NO_CODE}")
        sizes = value if isinstance(value, list) else [value]
        for names, limit in _LIMITS:
            if names.fullmatch(key) and any(type(size) is int and size > limit for size in sizes):
                raise config.error(f"{key} is {short_repr(value)}: above {limit}")


def _refuse_code(folder: Path) -> None:
    """ModelError if a folder has Python files, or adapters, which name other repositories."""
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            name = short_repr(path.relative_to(folder).as_posix())
            raise ModelError(
                f"the folder contains {name}, but {_NO_CODE}",
                "remove the file if the weights do not need it",
            )


@contextmanager
def library_errors(component: str, checkpoint: Any = None) -> Iterator[None]:
    """Converts errors of the libraries to ModelError: their input comes from the checkpoint."""
    label = f"{checkpoint.label}: " if checkpoint else ""
    try:
        yield
    except ModelError as error:
        raise ModelError(label + error.message, error.hint) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{label}{component} cannot be loaded: {first_line(error)}") from error


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 2
_WITHOUT_WEIGHTS = ("processor", "extractor", "guider")
_MAX_CONFIG_BYTES = 16 * 2**20
_SCHEDULER = "scheduler/scheduler_config.json"
_REFUSED_OF_SCHEDULERS = {
    "stochastic_sampling": "draws noise in every step from torch's global generator",
    "use_beta_sigmas": "needs scipy",
    "solver_p": "is another scheduler, whose state no packet carries",
}
#: The last one is a folder of pipelines of diffusers, with classes of its own.
_LIBRARIES = ("diffusers", "transformers", "ltx2")
_PROCESSORS = r"CLIP(Image)?Processor(Pil)?|CLIPFeatureExtractor|SiglipImageProcessor(Pil)?"
_CLASSES = {
    "tokenizer": r"(T5|ByT5|CLIP|Llama|Gemma|Qwen2)Tokenizer(Fast)?|TokenizersBackend|"
    r"Qwen2(_5_)?VLProcessor",
    "text_encoder": r"(U?MT5|T5)EncoderModel|CLIPTextModel|LlamaModel|Qwen2_5_VLTextModel|"
    r"(Llava|Gemma3|Qwen2_5_VL)ForConditionalGeneration",
    "image_encoder": r"CLIPVisionModel(WithProjection)?|SiglipVisionModel",
    "image_processor": _PROCESSORS,
    "feature_extractor": _PROCESSORS,
    "vae": r"AutoencoderKL\w*",
    "audio_vae": r"AutoencoderKLLTX2Audio",
    "connectors": r"LTX2TextConnectors",
    "vocoder": r"LTX2Vocoder(WithBWE)?",
    "guider": r"ClassifierFreeGuidance",  # others keep a momentum, which no packet carries
}
_NO_CODE = "svdpp runs no code from a checkpoint"
#: Config keys that make the libraries load other code or weights: attn_implementation can name a
#: kernel on the hub, transformers_weights another file.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|quantization_config|_implementation|use_kernels|kernel_(config|mapping)|transformers_weights"
)
# Sizes that determine memory. For comparison, Wan 2.2 A14B has 40 layers, and LTX-2 a text width of
# 3840.
_LIMITS = (
    (re.compile(r"num_.*(layers|blocks)|layers_per_block|.*num_res_blocks"), 1024),
    (re.compile(r"num_train_timesteps"), 100_000),
    (re.compile(r"num_.*heads|.*_channels|.*_dim|hidden_size|.*_patches|d_model|d_ff"), 2**18),
)
