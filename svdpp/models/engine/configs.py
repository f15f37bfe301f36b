"""Reading the configs of a checkpoint's components; reads no weight, knows no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svdpp.errors import ModelError
from svdpp.models.class_check import check_no_code_keys
from svdpp.models.safetensors_header import JsonFile, read_json, short_repr

#: Options of schedulers that must be unset, with the reason.
_REFUSED = {
    "stochastic_sampling": "draws noise in every step from torch's global generator",
    "use_beta_sigmas": "needs scipy",
    "solver_p": "is another scheduler, whose state no packet carries",
}


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler of a checkpoint: its class and its config file."""

    name: str
    values: Mapping[str, Any] = field(hash=False)

    def shifted(self, shift: float | None) -> SchedulerConfig:
        """With the shift of the noise levels that the user asked for; None: as it is."""
        if shift is None:
            return self
        key = "flow_shift" if "flow_shift" in self.values or "UniPC" in self.name else "shift"
        return SchedulerConfig(name=self.name, values={**self.values, key: shift})


#: What a family's configs say of a checkpoint: fields of `Checkpoint`.
Facts = dict[str, Any]


class Configs:
    """The configs of one checkpoint's components, each read once.

    Args:
        folder: of the checkpoint.
        index: its `model_index.json`.
        schedulers: the classes that it may have.

    Raises:
        ModelError: the scheduler is another one, or its config sets an unsupported option.
    """

    def __init__(self, folder: Path, index: JsonFile, schedulers: tuple[str, ...]) -> None:
        self.folder = folder
        self.index = index
        self.scheduler = _read_scheduler(self, schedulers)
        self._read: dict[str, JsonFile] = {}

    def of(self, part: str, **defaults: Any) -> JsonFile:
        """The config of one component, with its class's defaults for keys that it lacks.

        Raises:
            ModelError: the file is missing, names other code, or has a size out of range.
        """
        if part not in self._read:
            config = read_json(self.folder / part / "config.json", f"{part}/config.json")
            check_no_code_keys(config)
            _check_sizes(config)
            self._read[part] = config
        config = self._read[part]
        return JsonFile(config.label, {**defaults, **config.values})

    def has(self, part: str) -> bool:
        """Whether the checkpoint has this component."""
        return class_of(self.index, part) is not None


def class_of(index: JsonFile, part: str) -> str | None:
    """The class of a component; None if the checkpoint does not have it."""
    entry = index.values.get(part)
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    return None if name is None else str(name)


def check_class(index: JsonFile, part: str, classes: tuple[str, ...], *, optional: bool) -> None:
    """ModelError if a component's class is none of `classes`, or it is missing."""
    name = class_of(index, part)
    if name is None and not optional:
        raise index.error(f"the component {part} is missing")
    if name is not None and name not in classes:
        expected = " or ".join(classes)
        raise index.error(f"the {part} is of class {short_repr(name)}, not {expected}")


# Sizes that determine memory. For comparison, Wan 2.2 A14B has 40 layers, and LTX-2 a text width of
# 3840.
_LAYERS = re.compile(r"num_.*(layers|blocks)|layers_per_block|.*num_res_blocks")
_SIZES = re.compile(r"num_.*heads|.*_channels|.*_dim|hidden_size|.*_patches|d_model|d_ff")
_MAX_LAYERS, _MAX_SIZE = 1024, 2**18


def _check_sizes(config: JsonFile) -> None:
    for key, value in config.values.items():
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if is_size and _LAYERS.fullmatch(key):
            config.count(key, _MAX_LAYERS)
        elif is_size and _SIZES.fullmatch(key):
            config.count(key, _MAX_SIZE)


def _read_scheduler(configs: Configs, classes: tuple[str, ...]) -> SchedulerConfig:
    """The class and config of the scheduler, which must be one of `classes`.

    Raises:
        ModelError: a file is missing, or the config sets an unsupported option.
    """
    name = class_of(configs.index, "scheduler")
    label = "scheduler/scheduler_config.json"
    config = read_json(configs.folder / "scheduler" / "scheduler_config.json", label)
    if name not in classes:
        raise configs.index.error(
            f"the scheduler {short_repr(name)} is not supported: this family's steps are proven "
            f"with {' and '.join(classes)}"
        )
    check_unset(config, _REFUSED)
    return SchedulerConfig(name=name, values=config.values)


def check_unset(config: JsonFile, refused: Mapping[str, str]) -> None:
    """ModelError if the config sets one of the options `refused`; their values are the reasons."""
    for key, reason in refused.items():
        if config.values.get(key):
            raise config.error(f"{key} is not supported: it {reason}")


def require_equal(config: JsonFile, key: str, expected: object, reason: str) -> None:
    """ModelError if the value at `key` is not `expected`."""
    value = config.values.get(key)
    if value != expected:
        raise config.error(f"{key} is {short_repr(value)} but must be {expected}, {reason}")


def missing(index: JsonFile, message: str) -> ModelError:
    """The error for components that do not fit each other."""
    return index.error(message, "download the folder again, or use another model")
