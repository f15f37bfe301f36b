"""Owns what LTX-Video's configs must hold, and the sizes that later stages need; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from svdpp.config import LtxSampling, SamplingConfig
from svdpp.config.limits import require
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Use
from svdpp.models.family_config import (
    TOKENIZERS,
    PromptedCheckpoint,
    check_counts,
    read_config,
    read_scheduler,
    require_class,
    require_equal,
)
from svdpp.models.safetensors_header import JsonFile, short_repr
from svdpp.plan.layout import Roles


@dataclass(frozen=True, kw_only=True)
class LtxCheckpoint(PromptedCheckpoint):
    """A checkpoint of LTX-Video. It runs with text or an image."""

    family: ClassVar[str] = "ltx"

    timestep_conditioning: bool
    """Whether the VAE's decoder takes a timestep, and noise is drawn for it."""

    @property
    def size_multiple(self) -> tuple[int, int]:
        """See `PromptedCheckpoint`; 32 and 32, as diffusers' `check_inputs` requires."""
        return self.vae_scale_factor_spatial, self.vae_scale_factor_spatial

    @property
    def weighted(self) -> tuple[str, ...]:
        """See `Checkpoint`."""
        return ("transformer", "vae", "text_encoder")

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """See `Checkpoint`."""
        assert isinstance(sampling, LtxSampling)
        needed = {
            "text_encoder": roles.encode,
            "transformer": roles.denoise,
            "vae": roles.decode or (roles.encode and sampling.from_image),
        }
        return frozenset(part for part, is_needed in needed.items() if is_needed)

    @property
    def image_use(self) -> Use:
        """See `Checkpoint`."""
        return "optional"

    def resolve(self, sampling: SamplingConfig) -> LtxSampling:
        """See `Checkpoint`."""
        if not isinstance(sampling, LtxSampling):
            raise RequestError(f"{self.label} is of the family ltx, not {sampling.family}")
        self.check_size(sampling)
        require(
            sampling.num_inference_steps > 1 or not self.scheduler.values.get("shift_terminal"),
            "--steps must be 2 or more: the model's scheduler divides by zero for 1",
        )
        if not self.timestep_conditioning:
            for name, given in (
                ("--decode-timestep", sampling.decode_timestep != 0.0),
                ("--decode-noise-scale", sampling.decode_noise_scale is not None),
            ):
                require(not given, f"{name} has no effect: the model's VAE takes no timestep")
        require(
            sampling.guidance_rescale == 0.0 or sampling.guided,
            "--guidance-rescale has no effect: --guidance-scale of 1 or less turns guidance off",
        )
        return sampling


def check(index: JsonFile, *, folder: Path, **common: Any) -> LtxCheckpoint:
    """Checks the configs of a folder.

    Args:
        index: its `model_index.json`.
        folder: of the checkpoint.
        common: further fields of `Checkpoint`.

    Raises:
        ModelError: a config is missing, has unsupported values, or does not fit the others.
    """
    classes = {part: require_class(index, part, allowed) for part, allowed in _CLASSES.items()}
    vae = read_config(folder, "vae", _VAE_DEFAULTS)
    transformer = read_config(folder, "transformer", _TRANSFORMER_DEFAULTS)
    text_encoder = read_config(folder, "text_encoder", {})
    for config, limits in ((vae, _VAE_LIMITS), (transformer, _TRANSFORMER_LIMITS)):
        check_counts(config, limits)
    text_dim = text_encoder.count("d_model", _MAX_WIDTH)
    channels = vae.count("latent_channels", 4096)
    require_equal(transformer, "caption_channels", text_dim, "the text encoder's d_model")
    require_equal(transformer, "in_channels", channels, "the VAE's latent_channels")
    for key in ("patch_size", "patch_size_t"):
        require_equal(transformer, key, 1, "as in the published LTX-Video")
    if any(_list(vae, "decoder_inject_noise")):
        raise vae.error(
            "decoder_inject_noise is not supported: the decoder would draw noise from torch's "
            "global generator, so that no two runs are equal"
        )
    spatial, temporal = _compression(vae)
    return LtxCheckpoint(
        folder=folder,
        **common,
        pipeline_class=str(index.values["_class_name"]),
        scheduler=read_scheduler(folder, index, _SCHEDULERS),
        tokenizer_class=classes["tokenizer"],
        text_encoder_class=classes["text_encoder"],
        text_dim=text_dim,
        latent_channels=channels,
        vae_scale_factor_spatial=spatial,
        vae_scale_factor_temporal=temporal,
        timestep_conditioning=bool(vae.values["timestep_conditioning"]),
    )


def _compression(vae: JsonFile) -> tuple[int, int]:
    """Pixels and frames per latent cell, as `AutoencoderKLLTXVideo.__init__` computes them."""
    halvings = 2 ** sum(map(bool, _list(vae, "spatio_temporal_scaling")))
    spatial = vae.count("patch_size", 64) * halvings
    temporal = vae.count("patch_size_t", 64) * halvings
    if vae.values["spatial_compression_ratio"] is not None:
        spatial = vae.count("spatial_compression_ratio", 1024)
    if vae.values["temporal_compression_ratio"] is not None:
        temporal = vae.count("temporal_compression_ratio", 1024)
    return spatial, temporal


def _list(config: JsonFile, key: str) -> list[Any]:
    value = config.values[key]
    if not (isinstance(value, list) and len(value) <= _MAX_BLOCKS):
        raise config.error(f"{key} is {short_repr(value)}, not a list of booleans")
    return value


_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler",)
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": TOKENIZERS,
    "text_encoder": ("T5EncoderModel",),
    "transformer": ("LTXVideoTransformer3DModel",),
    "vae": ("AutoencoderKLLTXVideo",),
}
# Defaults of diffusers' classes, for keys that older files lack.
_VAE_DEFAULTS: Mapping[str, Any] = {
    "latent_channels": 128,
    "spatio_temporal_scaling": [True, True, True, False],
    "patch_size": 4,
    "patch_size_t": 1,
    "spatial_compression_ratio": None,
    "temporal_compression_ratio": None,
    "timestep_conditioning": False,
    "decoder_inject_noise": [],
}
_TRANSFORMER_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "caption_channels": 4096,
}

# For comparison, LTX-Video 2B has 28 layers and 32 heads of 64.
_MAX_WIDTH = 65536
_MAX_BLOCKS = 16
_TRANSFORMER_LIMITS: Mapping[str, int] = {
    "num_attention_heads": 256,
    "attention_head_dim": 1024,
    "cross_attention_dim": _MAX_WIDTH,
    "num_layers": 256,
}
_VAE_LIMITS: Mapping[str, int] = {"block_out_channels": 16384, "layers_per_block": 16}
