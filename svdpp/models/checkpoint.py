"""Owns finding a checkpoint and checking its configs and headers; reads no weight, knows no torch.

A checkpoint is untrusted. The values of its configs are checked against limits, and every error is
a `ModelError` that names the file.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models import hub
from svdpp.models.fingerprint import fingerprint
from svdpp.models.safetensors_header import (
    WEIGHT_STEMS,
    JsonFile,
    read_json,
    short_repr,
    weight_headers,
)
from svdpp.redaction import redact_tokens


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checked folder in diffusers' format, and the sizes that later checks need."""

    name: str
    """As the user typed it."""
    folder: Path
    revision: str | None
    """Commit hash of a hub model; None for a folder."""
    fingerprint: str | None
    """Of the weights in a user's folder, which may change; None for hub models and the demo."""
    variant: str | None
    num_frames: int
    """Number of frames for which the UNet was trained."""
    vae_scale_factor: int
    """Pixels per latent cell, in each direction."""
    latent_channels: int
    in_channels: int
    """Of the UNet: noisy latents and image latents, so twice `latent_channels`."""
    out_channels: int
    cross_attention_dim: int
    """Of the UNet; also the size of the image embedding."""
    addition_time_embed_dim: int
    projection_class_embeddings_input_dim: int
    feature_extractor_class: str

    @property
    def label(self) -> str:
        """The model's name in messages."""
        return f"model {hub.show_name(self.name)}"


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
            Stable Video Diffusion checkpoint with safetensors.
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
    wanted = (_INDEX_FILE, *_CONFIG_FILES.values())
    folder = local or hub.download(model, wanted, weights=weights)
    try:
        checkpoint = _check_configs(model, folder, None if local else hub.commit_of(folder))
        return _check_weight_headers(checkpoint) if weights else checkpoint
    except ModelError as error:
        message = f"model {hub.show_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint or _hint(model, local)) from error


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
    feature_extractor_class = _check_classes(index)
    _check_no_code(folder)
    configs = {part: read_json(folder / file, file) for part, file in _CONFIG_FILES.items()}
    for part, config in configs.items():
        _check_own_class(part, config)
    _check_scheduler(configs["scheduler"])
    sizes = _check_sizes(configs["unet"], configs["vae"], configs["image_encoder"])
    return Checkpoint(
        name=model.name,
        folder=folder,
        revision=revision,
        fingerprint=None,
        variant=model.variant,
        feature_extractor_class=feature_extractor_class,
        **sizes,
    )


def _check_weight_headers(checkpoint: Checkpoint) -> Checkpoint:
    """Checks that all weight files are complete; returns the checkpoint with its fingerprint."""
    folder, variant = checkpoint.folder, checkpoint.variant
    files = [path for part in WEIGHT_STEMS for path in weight_headers(folder, part, variant)]
    if checkpoint.revision is not None or checkpoint.name == DEMO_MODEL:
        return checkpoint
    return replace(checkpoint, fingerprint=fingerprint(folder, files))


def _read_index(folder: Path) -> JsonFile:
    path = folder / _INDEX_FILE
    if not path.is_file():
        raise ModelError(f"{_INDEX_FILE} is missing", hub.MODEL_HINT)
    return read_json(path, _INDEX_FILE)


def _check_classes(index: JsonFile) -> str:
    """Checks the class of every component; returns the class of the feature extractor."""
    name = index.values.get("_class_name")
    if name != _PIPELINE:
        raise index.error(f"the pipeline is {short_repr(name)}, not {_PIPELINE}", hub.MODEL_HINT)
    for part in _CLASSES:
        if part not in index.values:
            raise index.error(f"the component {part} is missing")
    for part, entry in index.values.items():
        if part.startswith("_"):
            continue
        key, value = short_repr(part), short_repr(entry)
        if not (isinstance(entry, list) and len(entry) == 2):
            raise index.error(f"{key} is {value}, not a library and a class")
        if part in _CLASSES and entry[0] in ("diffusers", "transformers"):
            _check_class(index, part, entry[1])
        elif entry[0] not in ("diffusers", "transformers", None):
            raise index.error(f"{key} is from the module {short_repr(entry[0])}, but {_NO_CODE}")
        else:
            raise index.error(f"{key} is {value}, which {_PIPELINE} does not have")
    return str(index.values["feature_extractor"][1])


def _check_class(config: JsonFile, part: str, name: object) -> None:
    if name in _CLASSES[part]:
        return
    if part != "scheduler":
        expected = " or ".join(_CLASSES[part])
        raise config.error(f"the {part} is of class {short_repr(name)}, not {expected}")
    hint = "use the model with EulerDiscreteScheduler, with which SVD was published"
    if isinstance(name, str) and name in _HISTORY_SCHEDULERS:
        reason = "keeps state from earlier steps, so its steps cannot be split between ranks"
        raise config.error(f"the scheduler {name} {reason}", hint)
    message = f"the scheduler is {short_repr(name)}; only EulerDiscreteScheduler is supported"
    raise config.error(message, hint)


def _check_no_code(folder: Path) -> None:
    # Adapters are refused too, because transformers loads them from other repositories.
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            name = short_repr(path.relative_to(folder).as_posix())
            raise ModelError(
                f"the folder contains {name}, but {_NO_CODE}",
                "remove the file if the weights do not need it",
            )


def _check_own_class(part: str, config: JsonFile) -> None:
    """Checks that the component's config names the right class and no other code or weights."""
    for key in config.values:
        if _CODE_KEYS.search(key):
            raise config.error(f"the key {short_repr(key)} is not supported: {_NO_CODE}")
    if part == "feature_extractor":
        old = config.values.get("feature_extractor_type", _CLASSES[part][0])
        _check_class(config, part, config.values.get("image_processor_type", old))
    elif part == "image_encoder":
        names = config.values.get("architectures")
        _check_class(config, part, names[0] if isinstance(names, list) and names else names)
        if config.values.get("model_type") != "clip_vision_model":
            name = short_repr(config.values.get("model_type"))
            raise config.error(f"model_type is {name}, not 'clip_vision_model'")
    else:
        _check_class(config, part, config.values.get("_class_name"))


def _check_scheduler(config: JsonFile) -> None:
    config.count("num_train_timesteps", 100_000)
    if config.values.get("use_beta_sigmas"):
        raise config.error("use_beta_sigmas needs scipy and is not supported")
    if config.values.get("use_karras_sigmas") and config.values.get("use_exponential_sigmas"):
        raise config.error("use_karras_sigmas and use_exponential_sigmas exclude each other")


def _check_sizes(unet: JsonFile, vae: JsonFile, image_encoder: JsonFile) -> dict[str, int]:
    """Checks the sizes that determine memory, and that the components fit each other."""
    for config, limits in ((unet, _UNET_LIMITS), (vae, _VAE_LIMITS), (image_encoder, _CLIP_LIMITS)):
        for key, largest in limits.items():
            config.counts(key, largest)
    latent_channels = vae.count("latent_channels", 64)
    embedding = image_encoder.count("projection_dim", _MAX_WIDTH)
    time_dim = unet.count("addition_time_embed_dim", _MAX_WIDTH)
    vae.require("in_channels", 3, "for red, green and blue")
    vae.require("out_channels", 3, "for red, green and blue")
    image_encoder.require("num_channels", 3, "for red, green and blue")
    image_encoder.require("image_size", 224, "the size of diffusers' CLIP input")
    unet.require("in_channels", 2 * latent_channels, "twice the VAE's latent_channels")
    unet.require("out_channels", latent_channels, "the VAE's latent_channels")
    if set(unet.counts("cross_attention_dim", _MAX_WIDTH)) != {embedding}:
        value = short_repr(unet.values["cross_attention_dim"])
        reason = "the image encoder's projection_dim"
        raise unet.error(f"cross_attention_dim is {value} but must be {embedding}, {reason}")
    key = "projection_class_embeddings_input_dim"
    unet.require(key, 3 * time_dim, "three times addition_time_embed_dim")
    return {
        "num_frames": unet.count("num_frames", 1024),
        "vae_scale_factor": 2 ** (len(vae.counts("block_out_channels", _MAX_WIDTH)) - 1),
        "latent_channels": latent_channels,
        "in_channels": 2 * latent_channels,
        "out_channels": latent_channels,
        "cross_attention_dim": embedding,
        "addition_time_embed_dim": time_dim,
        key: 3 * time_dim,
    }


_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_INDEX_FILE = "model_index.json"
_NO_CODE = "svdpp runs no code from a checkpoint"

_PIPELINE = "StableVideoDiffusionPipeline"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "unet": ("UNetSpatioTemporalConditionModel",),
    "vae": ("AutoencoderKLTemporalDecoder",),
    "image_encoder": ("CLIPVisionModelWithProjection",),
    "feature_extractor": ("CLIPImageProcessor", "CLIPImageProcessorPil", "CLIPFeatureExtractor"),
    "scheduler": ("EulerDiscreteScheduler",),
}
_CONFIG_FILES: Mapping[str, str] = {
    "unet": "unet/config.json",
    "vae": "vae/config.json",
    "image_encoder": "image_encoder/config.json",
    "feature_extractor": "feature_extractor/preprocessor_config.json",
    "scheduler": "scheduler/scheduler_config.json",
}

#: The schedulers of diffusers 0.42 whose step() reads state that an earlier step() has stored.
_HISTORY_SCHEDULERS = frozenset(
    f"{name}Scheduler"
    for name in (
        *("CosineDPMSolverMultistep", "DEISMultistep", "DPMSolverMultistep"),
        *("DPMSolverMultistepInverse", "DPMSolverSDE", "DPMSolverSinglestep"),
        *("EDMDPMSolverMultistep", "FlowMatchHeunDiscrete", "HeunDiscrete", "IPNDM"),
        *("KDPM2Discrete", "KDPM2AncestralDiscrete", "LMSDiscrete", "PNDM", "SASolver"),
        "UniPCMultistep",
    )
)

#: Config keys that make the libraries load other code or weights: attn_implementation can name a
#: kernel on the hub, transformers_weights another file.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|quantization_config|_implementation|kernel|transformers_weights"
)

# For comparison, SVD-XT has a width of 1280, 2 layers and 1 transformer layer per block, and 32
# CLIP layers.
_MAX_WIDTH = 16384
_UNET_LIMITS: Mapping[str, int] = {
    "block_out_channels": _MAX_WIDTH,
    "layers_per_block": 8,
    "transformer_layers_per_block": 16,
    "num_attention_heads": 256,
}
_VAE_LIMITS: Mapping[str, int] = {"block_out_channels": _MAX_WIDTH, "layers_per_block": 8}
_CLIP_LIMITS: Mapping[str, int] = {
    "hidden_size": _MAX_WIDTH,
    "intermediate_size": 4 * _MAX_WIDTH,
    "num_hidden_layers": 128,
    "num_attention_heads": 256,
    "patch_size": 224,
}
