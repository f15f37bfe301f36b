"""Owns reading the configs of a checkpoint's components; reads no weight, knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svdpp.config import CommonSampling
from svdpp.config.sampling import check_frames, check_sides
from svdpp.errors import ModelError
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.models.class_check import check_no_code_keys
from svdpp.models.safetensors_header import JsonFile, read_json, short_repr

_NEEDS_SCIPY = "needs scipy"
#: Schedulers whose state `models.step_range` declares; by class, the options that must be unset,
#: with the reason.
SCHEDULERS: Mapping[str, Mapping[str, str]] = {
    "FlowMatchEulerDiscreteScheduler": {
        "stochastic_sampling": "draws noise in every step from torch's global generator",
        "use_beta_sigmas": _NEEDS_SCIPY,
    },
    "UniPCMultistepScheduler": {
        "solver_p": "is another scheduler, whose state is not declared",
        "use_beta_sigmas": _NEEDS_SCIPY,
    },
}


#: Classes of T5's tokenizer; transformers 5 also saves fast tokenizers as the last one.
TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer", "TokenizersBackend")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler of a checkpoint: its class and its config file."""

    name: str
    values: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class PromptedCheckpoint(Checkpoint):
    """A checkpoint of a family that takes prompts: a text encoder, a transformer and a VAE."""

    pipeline_class: str
    """In model_index.json."""
    scheduler: SchedulerConfig
    tokenizer_class: str
    text_encoder_class: str
    text_dim: int
    """Width of the prompt embeddings."""
    latent_channels: int
    vae_scale_factor_spatial: int
    """Pixels per latent cell, in height and width."""
    vae_scale_factor_temporal: int
    """Frames per latent frame, after the first one."""

    @property
    def prompt_use(self) -> Use:
        """See `Checkpoint`."""
        return "needed"

    @property
    def size_multiple(self) -> tuple[int, int]:
        """Height and width of a frame are multiples of these."""
        raise NotImplementedError

    def latent_size(self, sampling: CommonSampling) -> tuple[int, int, int]:
        """The latent's frames, height and width."""
        frames = (sampling.frames - 1) // self.vae_scale_factor_temporal + 1
        factor = self.vae_scale_factor_spatial
        return frames, sampling.height // factor, sampling.width // factor

    def check_size(self, sampling: CommonSampling) -> None:
        """RequestError unless the VAE can make such frames; diffusers rounds their number."""
        check_frames(sampling, self.vae_scale_factor_temporal)
        check_sides(sampling, self.size_multiple)


def component_class(index: JsonFile, part: str, classes: tuple[str, ...]) -> str | None:
    """The class of one component; None if the checkpoint does not have it.

    Raises:
        ModelError: the class is none of `classes`.
    """
    entry = index.values.get(part)
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    if name is None:
        return None
    if name not in classes:
        expected = " or ".join(classes)
        raise index.error(f"the {part} is of class {short_repr(name)}, not {expected}")
    return str(name)


def require_class(index: JsonFile, part: str, classes: tuple[str, ...]) -> str:
    """Like `component_class`; ModelError if the component is missing."""
    name = component_class(index, part, classes)
    if name is None:
        raise index.error(f"the component {part} is missing")
    return name


def read_config(folder: Path, part: str, defaults: Mapping[str, Any]) -> JsonFile:
    """The config of one component, with its class's defaults for keys that are not in the file.

    Raises:
        ModelError: the file is missing, or names other code or other weights.
    """
    config = read_json(folder / part / "config.json", f"{part}/config.json")
    check_no_code_keys(config)
    return JsonFile(config.label, {**defaults, **config.values})


def read_scheduler(folder: Path, index: JsonFile, classes: tuple[str, ...]) -> SchedulerConfig:
    """The class and config of the scheduler, which must be one of `classes`.

    Raises:
        ModelError: a file is missing, the scheduler's state is not declared, or its config sets an
            unsupported option.
    """
    entry = index.values.get("scheduler")
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    if name in SCHEDULERS:  # otherwise `check_scheduler` gives the reason
        require_class(index, "scheduler", classes)
    label = "scheduler/scheduler_config.json"
    config = read_json(folder / "scheduler" / "scheduler_config.json", label)
    check_scheduler(name, config)
    return SchedulerConfig(name=str(name), values=config.values)


def check_scheduler(name: object, config: JsonFile) -> None:
    """Refuses a scheduler that cannot be split between ranks.

    Raises:
        ModelError: its state is not declared, or the config sets an unsupported option.
    """
    if not isinstance(name, str) or name not in SCHEDULERS:
        raise config.error(
            f"the scheduler {short_repr(name)} is not supported: what it carries from step to step "
            f"is not declared ({' and '.join(SCHEDULERS)} are)"
        )
    check_unset(config, SCHEDULERS[name])


def check_unset(config: JsonFile, refused: Mapping[str, str]) -> None:
    """ModelError if the config sets one of the options `refused`; their values are the reasons."""
    for key, reason in refused.items():
        if config.values.get(key):
            raise config.error(f"{key} is not supported: it {reason}")


def check_counts(config: JsonFile, limits: Mapping[str, int]) -> None:
    """ModelError if a size that determines memory is not from 1 to its limit."""
    for key, largest in limits.items():
        if config.values.get(key) is not None:
            config.counts(key, largest)


def require_equal(config: JsonFile, key: str, expected: object, reason: str) -> None:
    """ModelError if the value at `key` is not `expected`."""
    value = config.values.get(key)
    if value != expected:
        raise config.error(f"{key} is {short_repr(value)} but must be {expected}, {reason}")


def missing(index: JsonFile, message: str) -> ModelError:
    """The error for components that do not fit each other."""
    return index.error(message, "download the folder again, or use another model")
