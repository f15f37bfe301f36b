"""Owns where a checkpoint lies and whether it is sound, before any weight is read; knows no torch.

Everything in a checkpoint comes from a stranger: what its configs say is bounded and checked here,
and every fault is a `ModelError` that names the file.
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
from svdpp.models.safetensors_header import WEIGHT_STEMS, JsonFile, read_json, show, weight_headers
from svdpp.redaction import redact_tokens


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checked diffusers folder, and the sizes that later shape checks need."""

    name: str
    """As the user typed it."""
    folder: Path
    revision: str | None
    """Commit hash of a hub model; None for a folder."""
    fingerprint: str | None
    """Of the weights in a folder of the user's, where others may take their place; else None."""
    variant: str | None
    num_frames: int
    """Frames the UNet was trained for."""
    vae_scale_factor: int
    """Pixels to one latent cell, in each direction."""
    latent_channels: int
    in_channels: int
    """Of the UNet: noisy latents and image latents, so twice `latent_channels`."""
    out_channels: int
    cross_attention_dim: int
    """Of the UNet, and so the size of the image embedding."""
    addition_time_embed_dim: int
    projection_class_embeddings_input_dim: int
    feature_extractor_class: str

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"model {hub.show_name(self.name)}"


def find_checkpoint(model: ModelConfig, *, weights: bool = True) -> Checkpoint:
    """Finds the weights `model` names, downloading what is missing of a hub model, and checks them.

    Reads configs and safetensors headers only; without `weights` configs alone, and downloads no
    more than those; the default model's come with svdpp. A folder is used where it lies; a name
    that is neither `demo` nor a folder is a hub id, for which the hub library's own settings
    (HF_HOME, HF_HUB_OFFLINE, a login) hold.

    Raises:
        ModelError: there is no such model, it may not be downloaded, or it is not a sound
            Stable Video Diffusion checkpoint of safetensors.
        RequestError: a revision of a folder, or a variant that is no name.
        ValueError: the dummy model, which has no checkpoint (a programmer's error).
    """
    if model.is_dummy:
        raise ValueError("the dummy model has no checkpoint")
    if model.variant is not None and not re.fullmatch(r"[A-Za-z0-9_]{1,40}", model.variant):
        raise RequestError(f"--variant {show(model.variant)} is no variant name such as fp16")
    local = _local_folder(model.name)
    if local is not None and model.revision is not None:
        raise RequestError(f"--revision is for hub models; {hub.show_name(model.name)} is a folder")
    if not weights and (model.name, model.revision) == (DEFAULT_MODEL, None):
        local = _ASSETS / "svd-xt"  # as published, and there without a network
    wanted = (_INDEX_FILE, *_CONFIG_FILES.values())
    folder = local or hub.download(model, wanted, weights=weights)
    try:
        found = _checked(model, folder, revision=None if local else hub.commit_of(folder))
        return _with_weights(found) if weights else found
    except ModelError as error:
        message = f"model {hub.show_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint or _fix_hint(model, local)) from error


# 1. Where the folder is.


def _local_folder(name: str) -> Path | None:
    """The folder `name` means; None for what can only be a hub id."""
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
        raise ModelError(f"{hub.show_name(name)} is an address, not a hub id", hub.MODEL_HINT)
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"there is no folder {hub.show_name(name)}", hub.MODEL_HINT)
    return None


def _fix_hint(model: ModelConfig, local: Path | None) -> str:
    if model.name == DEMO_MODEL:
        return "install svdpp again: the demo model is part of it"
    if local is None:
        return f"hf download {shlex.quote(redact_tokens(model.name))} --force-download"
    return "copy or download the folder again, or --model demo"


# 2. What is in it.


def _checked(model: ModelConfig, folder: Path, revision: str | None) -> Checkpoint:
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


def _with_weights(found: Checkpoint) -> Checkpoint:
    """`found`, whose weights are there and whole by their headers."""
    headers = (weight_headers(found.folder, part, found.variant) for part in WEIGHT_STEMS)
    files = [path for each in headers for path in each]
    if found.revision is not None or found.name == DEMO_MODEL:
        return found
    return replace(found, fingerprint=fingerprint(found.folder, files))


def _read_index(folder: Path) -> JsonFile:
    path = folder / _INDEX_FILE
    if not path.is_file():
        raise ModelError(f"{_INDEX_FILE} is missing", hub.MODEL_HINT)
    return read_json(path, _INDEX_FILE)


def _check_classes(index: JsonFile) -> str:
    """Every component is of the one class that svdpp runs; returns the feature extractor's."""
    name = index.values.get("_class_name")
    if name != _PIPELINE:
        raise index.fault(f"the pipeline is {show(name)}, not {_PIPELINE}", hub.MODEL_HINT)
    for part in _CLASSES:
        if part not in index.values:
            raise index.fault(f"the component {part} is not named")
    for part, entry in index.values.items():
        if part.startswith("_"):
            continue
        if not (isinstance(entry, list) and len(entry) == 2):
            raise index.fault(f"{show(part)} is {show(entry)}, not a library and a class")
        if part in _CLASSES and entry[0] in ("diffusers", "transformers"):
            _check_class(index, part, entry[1])
        elif entry[0] not in ("diffusers", "transformers", None):
            raise index.fault(f"{show(part)} comes from the module {show(entry[0])}, {_NO_CODE}")
        else:
            raise index.fault(f"{show(part)} is {show(entry)}, which {_PIPELINE} does not have")
    return str(index.values["feature_extractor"][1])


def _check_class(config: JsonFile, part: str, name: object) -> None:
    if name in _CLASSES[part]:
        return
    if part != "scheduler":
        wanted = " or ".join(_CLASSES[part])
        raise config.fault(f"the {part} is of class {show(name)}, not {wanted}")
    mend = "use the model with its EulerDiscreteScheduler, the one SVD was published with"
    if isinstance(name, str) and name in _HISTORY_SCHEDULERS:
        reason = "carries history from step to step, so its steps cannot be cut between ranks"
        raise config.fault(f"the scheduler {name} {reason}", mend)
    sentence = "only EulerDiscreteScheduler is supported and proven"
    raise config.fault(f"the scheduler is {show(name)}; {sentence}", mend)


def _check_no_code(folder: Path) -> None:
    # Adapters are refused with it: transformers follows them to other repositories.
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            raise ModelError(
                f"{show(path.relative_to(folder).as_posix())} lies in the folder, {_NO_CODE}",
                "if the weights need no such file, take it away",
            )


def _check_own_class(part: str, config: JsonFile) -> None:
    """The component's own config agrees with the index, and brings nothing that loads code."""
    for key in config.values:
        if _CODE_KEYS.search(key):
            raise config.fault(f"the key {show(key)} is not supported, {_NO_CODE}")
    if part == "feature_extractor":
        old = config.values.get("feature_extractor_type", _CLASSES[part][0])
        _check_class(config, part, config.values.get("image_processor_type", old))
    elif part == "image_encoder":
        names = config.values.get("architectures")
        _check_class(config, part, names[0] if isinstance(names, list) and names else names)
        if config.values.get("model_type") != "clip_vision_model":
            name = show(config.values.get("model_type"))
            raise config.fault(f"model_type is {name}, not 'clip_vision_model'")
    else:
        _check_class(config, part, config.values.get("_class_name"))


def _check_scheduler(config: JsonFile) -> None:
    config.count("num_train_timesteps", 100_000)
    if config.values.get("use_beta_sigmas"):
        raise config.fault("use_beta_sigmas needs scipy and is not supported")
    if config.values.get("use_karras_sigmas") and config.values.get("use_exponential_sigmas"):
        raise config.fault("use_karras_sigmas and use_exponential_sigmas exclude each other")


def _check_sizes(unet: JsonFile, vae: JsonFile, image_encoder: JsonFile) -> dict[str, int]:
    """Bounds what sizes memory, and finds components that do not fit each other."""
    for config, limits in ((unet, _UNET_LIMITS), (vae, _VAE_LIMITS), (image_encoder, _CLIP_LIMITS)):
        for key, largest in limits.items():
            config.counts(key, largest)
    latent_channels = vae.count("latent_channels", 64)
    embedding = image_encoder.count("projection_dim", _MAX_WIDTH)
    time_dim = unet.count("addition_time_embed_dim", _MAX_WIDTH)
    vae.require("in_channels", 3, "for red, green and blue")
    vae.require("out_channels", 3, "for red, green and blue")
    image_encoder.require("num_channels", 3, "for red, green and blue")
    image_encoder.require("image_size", 224, "the size diffusers gives it")
    unet.require("in_channels", 2 * latent_channels, "twice the VAE's latent_channels")
    unet.require("out_channels", latent_channels, "the VAE's latent_channels")
    if set(unet.counts("cross_attention_dim", _MAX_WIDTH)) != {embedding}:
        value = show(unet.values["cross_attention_dim"])
        because = "the image encoder's projection_dim"
        raise unet.fault(f"cross_attention_dim is {value} but must be {embedding}, {because}")
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
_NO_CODE = "and svdpp runs no code from a checkpoint"

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

#: Those of diffusers 0.42 whose step() reads what an earlier step() left in the instance.
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

#: Config keys that make the libraries fetch or run something else than the class asked for:
#: attn_implementation may name a kernel on the hub, transformers_weights another file.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|quantization_config|_implementation|kernel|transformers_weights"
)

# SVD-XT has a width of 1280, 2 layers and 1 transformer layer in a block, 32 CLIP layers.
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
