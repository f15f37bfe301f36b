"""Owns finding a checkpoint, and the checks that all families share; knows no torch.

A checkpoint is untrusted. The values of its configs are checked against limits, and every error is
a `ModelError` that names the file. `models.<family>.checkpoint` checks the configs of a family.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL, ModelConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import ModelError, RequestError
from svdpp.models import hub
from svdpp.models.fingerprint import fingerprint
from svdpp.models.safetensors_header import JsonFile, read_json, short_repr, weight_headers
from svdpp.redaction import redact_tokens

#: What a model does with an input of a clip.
Use = Literal["needed", "optional", "refused"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checked folder in diffusers' format; each family adds the sizes that later checks need."""

    family: ClassVar[str]
    can_draft: ClassVar[bool] = False
    """Whether the sampler is Euler's method, which drafts need."""

    name: str
    """As the user typed it."""
    folder: Path
    revision: str | None
    """Commit hash of a hub model; None for a folder."""
    fingerprint: str | None = None
    """Of the weights in a user's folder, which may change; None for hub models and the demo."""
    variant: str | None

    @property
    def label(self) -> str:
        """The model's name in messages."""
        return f"model {hub.show_name(self.name)}"

    @property
    def weighted(self) -> tuple[str, ...]:
        """The components that have weights."""
        raise NotImplementedError

    @property
    def image_use(self) -> Use:
        """What a clip has to do with photographs."""
        raise NotImplementedError

    @property
    def prompt_use(self) -> Use:
        """What a clip has to do with prompts."""
        raise NotImplementedError

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Sampling parameters of the family that have no effect on this model."""
        return ()

    def check_inputs(
        self,
        sampling: SamplingConfig,
        *,
        image: bool,
        prompt: str | None,
        negative_prompt: str | None,
    ) -> None:
        """Checks that a clip has what the model needs, and nothing that it ignores.

        Args:
            sampling: of the clip, resolved.
            image: whether the clip has a photograph.
            prompt: None if the clip has none.
            negative_prompt: None if the clip has none.

        Raises:
            RequestError: the clip lacks an input, or has one that the model does not take.
        """
        inputs = (
            ("a photograph", image, self.image_use, "name a photograph"),
            ("a prompt", prompt is not None, self.prompt_use, 'give --prompt "..."'),
        )
        for what, is_given, use, hint in inputs:
            if use == "needed" and not is_given:
                raise RequestError(f"{self.label} needs {what}", hint)
            if use == "refused" and is_given:
                raise RequestError(f"{self.label} takes no {what.split()[-1]}", "leave it out")
        if self.prompt_use == "needed" and not (prompt or "").strip():
            raise RequestError("--prompt is empty", 'say what happens, as in --prompt "a wave"')
        if negative_prompt is not None and not (prompt and sampling.guided):
            raise RequestError(
                "--negative-prompt has no effect without a prompt and guidance",
                "leave it out, or use a --guidance-scale above 1",
            )
        if isinstance(sampling, PromptedSampling) and image != sampling.from_image:
            raise RequestError(
                f"the clip has {'a' if image else 'no'} photograph, but its sampling parameters "
                f"have from_image={sampling.from_image}",
                "set from_image accordingly",
            )

    def resolve(self, sampling: SamplingConfig) -> SamplingConfig:
        """`sampling` with the model's own values in place of None.

        Raises:
            RequestError: the parameters are those of another family, or this model cannot run them.
        """
        raise NotImplementedError

    def expert_boundary(self, sampling: SamplingConfig) -> int | None:  # noqa: ARG002
        """The number of steps of the first expert, of resolved `sampling`; None: one expert."""
        return None


def find_checkpoint(model: ModelConfig, *, weights: bool = True) -> Checkpoint:
    """Finds the checkpoint of `model`, downloads missing files of a hub model, and checks it.

    It reads only configs and safetensors headers. A folder is used in place. A name that is neither
    `demo` nor a folder is a hub id; the hub library's settings (HF_HOME, HF_HUB_OFFLINE, a login)
    apply.

    Args:
        model: not the dummy model.
        weights: whether to download and check the weight files too.

    Raises:
        ModelError: there is no such model, the user may not download it, or it is not a valid
            checkpoint of a known family with safetensors.
        RequestError: a folder with a revision, or an invalid name of a variant.
        ValueError: the dummy model, which has no checkpoint (a programming error).
    """
    if model.is_dummy:
        raise ValueError("the dummy model has no checkpoint")
    if model.variant is not None and not re.fullmatch(r"[A-Za-z0-9_]{1,40}", model.variant):
        raise RequestError(f"--variant {short_repr(model.variant)} is not a name such as fp16")
    local = _local_folder(model.name)
    if local is not None and model.revision is not None:
        raise RequestError(f"--revision is for hub models; {hub.show_name(model.name)} is a folder")
    if not weights and (model.name, model.revision) == (DEFAULT_MODEL, None):
        local = _ASSETS / "svd-xt"  # as published, and there without a network
    folder = local or hub.download(model, weights=weights)
    try:
        checkpoint = _check_configs(model, folder, None if local else hub.commit_of(folder))
        return _check_weight_headers(checkpoint) if weights else checkpoint
    except ModelError as error:
        message = f"model {hub.show_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint or _hint(model, local)) from error


def family_of_model(model: ModelConfig) -> str:
    """The family of a model, from its `model_index.json`; downloads at most the configs.

    Raises:
        ModelError: there is no such model, or its family is not known.
    """
    if model.name in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL):
        return "svd"
    folder = _local_folder(model.name) or hub.download(model, weights=False)
    try:
        return family_of_pipeline(_read_index(folder))
    except ModelError as error:
        message = f"model {hub.show_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint) from error


# 1. Find the folder.


def _local_folder(name: str) -> Path | None:
    """The folder that `name` refers to; None if it can only be a hub id."""
    if name == DEMO_MODEL:
        return _ASSETS / "demo-model"
    path = os.path.expanduser(name)
    if name.lower() in (DEMO_MODEL, DUMMY_MODEL) and not os.path.exists(path):
        raise ModelError(f"there is no model {hub.show_name(name)}", f"--model {name.lower()}")
    if os.path.isdir(path):
        return Path(path).resolve()
    if os.path.isfile(path):
        raise ModelError(f"{hub.show_name(name)} is a file, not a diffusers folder", hub.MODEL_HINT)
    if "://" in name:
        raise ModelError(f"{hub.show_name(name)} is a URL, not a hub id", hub.MODEL_HINT)
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"there is no folder {hub.show_name(name)}", hub.MODEL_HINT)
    return None


def _hint(model: ModelConfig, local: Path | None) -> str:
    if model.name == DEMO_MODEL:
        return "reinstall svdpp, which includes the demo model"
    if local is None:
        return f"hf download {shlex.quote(redact_tokens(model.name))} --force-download"
    return "copy or download the folder again, or --model demo"


# 2. Check its contents.


def _check_configs(model: ModelConfig, folder: Path, revision: str | None) -> Checkpoint:
    index = _read_index(folder)
    family = family_of_pipeline(index)
    _check_no_code(folder)
    rules = importlib.import_module(f"svdpp.models.{family}.checkpoint")
    checkpoint: Checkpoint = rules.check(
        index, name=model.name, folder=folder, revision=revision, variant=model.variant
    )
    return checkpoint


def family_of_pipeline(index: JsonFile) -> str:
    """The family of the pipeline that `model_index.json` names."""
    name = index.values.get("_class_name")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise index.error(f"the pipeline is {short_repr(name)}, not one of {known}", hub.MODEL_HINT)
    return FAMILIES[name]


def _check_weight_headers(checkpoint: Checkpoint) -> Checkpoint:
    """Checks that all weight files are complete; returns the checkpoint with its fingerprint."""
    folder, variant = checkpoint.folder, checkpoint.variant
    files = [path for part in checkpoint.weighted for path in weight_headers(folder, part, variant)]
    if checkpoint.revision is not None or checkpoint.name == DEMO_MODEL:
        return checkpoint
    return replace(checkpoint, fingerprint=fingerprint(folder, files))


def _read_index(folder: Path) -> JsonFile:
    path = folder / _INDEX_FILE
    if not path.is_file():
        raise ModelError(f"{_INDEX_FILE} is missing", hub.MODEL_HINT)
    return read_json(path, _INDEX_FILE)


def check_classes(index: JsonFile, classes: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that an index has exactly the components `classes`, of one of their classes."""
    for part in classes:
        if part not in index.values:
            raise index.error(f"the component {part} is missing")
    for part, entry in index.values.items():
        if part.startswith("_"):
            continue
        key, value = short_repr(part), short_repr(entry)
        if not (isinstance(entry, list) and len(entry) == 2):
            raise index.error(f"{key} is {value}, not a library and a class")
        if part in classes and entry[0] in _LIBRARIES:
            check_class(index, part, entry[1], classes[part])
        elif entry[0] not in (*_LIBRARIES, None):
            raise index.error(f"{key} is from the module {short_repr(entry[0])}, but {NO_CODE}")
        else:
            pipeline = index.values["_class_name"]
            raise index.error(f"{key} is {value}, which {pipeline} does not have")


def check_class(config: JsonFile, part: str, name: object, allowed: tuple[str, ...]) -> None:
    """ModelError if `name` is not one of the classes `allowed` for a component."""
    if name not in allowed:
        expected = " or ".join(allowed)
        raise config.error(f"the {part} is of class {short_repr(name)}, not {expected}")


def check_no_code_keys(config: JsonFile) -> None:
    """ModelError if a component's config names other code or other weights."""
    for key in config.values:
        if _CODE_KEYS.search(key):
            raise config.error(f"the key {short_repr(key)} is not supported: {NO_CODE}")


def _check_no_code(folder: Path) -> None:
    # Adapters are refused too, because transformers loads them from other repositories.
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            name = short_repr(path.relative_to(folder).as_posix())
            raise ModelError(
                f"the folder contains {name}, but {NO_CODE}",
                "remove the file if the weights do not need it",
            )


_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_INDEX_FILE = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
NO_CODE = "svdpp runs no code from a checkpoint"

#: The family of each pipeline that diffusers' `model_index.json` can name.
FAMILIES: Mapping[str, str] = {
    "StableVideoDiffusionPipeline": "svd",
    "WanPipeline": "wan",
    "WanImageToVideoPipeline": "wan",
    "LTXPipeline": "ltx",
    "LTXImageToVideoPipeline": "ltx",
}

#: Config keys that make the libraries load other code or weights: attn_implementation can name a
#: kernel on the hub, transformers_weights another file.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|quantization_config|_implementation|kernel|transformers_weights"
)
