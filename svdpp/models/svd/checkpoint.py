"""The check of a Stable Video Diffusion checkpoint's configs; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.config import SamplingConfig, SvdSampling
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.models.class_check import check_class, check_classes, check_no_code_keys
from svdpp.models.safetensors_header import JsonFile, read_json, short_repr
from svdpp.plan.layout import Roles


@dataclass(frozen=True, kw_only=True)
class SvdCheckpoint(Checkpoint):
    """A checkpoint of `StableVideoDiffusionPipeline`."""

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
    def family(self) -> str:
        """See `Checkpoint`."""
        return "svd"

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """See `Checkpoint`."""
        del sampling
        needed = {
            "image_encoder": roles.encode,
            "vae": roles.encode or roles.decode,
            "unet": roles.denoise,
        }
        return frozenset(part for part, is_needed in needed.items() if is_needed)

    @property
    def weighted(self) -> tuple[str, ...]:
        """See `Checkpoint`."""
        return ("unet", "vae", "image_encoder")

    @property
    def image_use(self) -> Use:
        """See `Checkpoint`."""
        return "needed"

    @property
    def prompt_use(self) -> Use:
        """See `Checkpoint`."""
        return "refused"

    def resolve(self, sampling: SamplingConfig) -> SvdSampling:
        """See `Checkpoint`."""
        if not isinstance(sampling, SvdSampling):
            raise RequestError(f"{self.label} is Stable Video Diffusion, not {sampling.family}")
        return sampling.resolved(model_frames=self.num_frames)


def check(index: JsonFile, *, folder: Path, **common: Any) -> SvdCheckpoint:
    """Checks the configs of a folder.

    Args:
        index: its `model_index.json`.
        folder: of the checkpoint.
        common: further fields of `Checkpoint`.

    Raises:
        ModelError: a config is missing or wrong.
    """
    _check_scheduler_class(index, index.values.get("scheduler"))
    check_classes(index, _CLASSES)
    configs = {part: read_json(folder / file, file) for part, file in _CONFIG_FILES.items()}
    for part, config in configs.items():
        _check_own_class(part, config)
    _check_scheduler(configs["scheduler"])
    sizes = _check_sizes(configs["unet"], configs["vae"], configs["image_encoder"])
    feature_extractor_class = str(index.values["feature_extractor"][1])
    return SvdCheckpoint(
        folder=folder, feature_extractor_class=feature_extractor_class, **common, **sizes
    )


def _check_scheduler_class(config: JsonFile, entry: object) -> None:
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    if entry is None or name in _CLASSES["scheduler"]:
        return
    hint = "use the model with EulerDiscreteScheduler, with which SVD was published"
    if isinstance(name, str) and name in _HISTORY_SCHEDULERS:
        reason = "keeps state from earlier steps, so its steps cannot be split between ranks"
        raise config.error(f"the scheduler {name} {reason}", hint)
    message = f"the scheduler is {short_repr(name)}; only EulerDiscreteScheduler is supported"
    raise config.error(message, hint)


def _check_own_class(part: str, config: JsonFile) -> None:
    """Checks that the component's config names the right class and no other code or weights."""
    check_no_code_keys(config)
    allowed = _CLASSES[part]
    if part == "feature_extractor":
        old = config.values.get("feature_extractor_type", allowed[0])
        check_class(config, part, config.values.get("image_processor_type", old), allowed)
    elif part == "image_encoder":
        names = config.values.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        check_class(config, part, name, allowed)
        if config.values.get("model_type") != "clip_vision_model":
            name = short_repr(config.values.get("model_type"))
            raise config.error(f"model_type is {name}, not 'clip_vision_model'")
    elif part == "scheduler":
        _check_scheduler_class(config, config.values.get("_class_name", ""))
    else:
        check_class(config, part, config.values.get("_class_name"), allowed)


def _check_scheduler(config: JsonFile) -> None:
    config.count("num_train_timesteps", 100_000)
    if config.values.get("use_beta_sigmas"):
        raise config.error("use_beta_sigmas needs scipy and is not supported")
    if config.values.get("use_karras_sigmas") and config.values.get("use_exponential_sigmas"):
        raise config.error("use_karras_sigmas and use_exponential_sigmas exclude each other")


def _check_sizes(unet: JsonFile, vae: JsonFile, image_encoder: JsonFile) -> dict[str, Any]:
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
