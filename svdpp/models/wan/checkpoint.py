"""Owns what Wan's configs must hold, and the sizes that later stages need; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from svdpp.config import SamplingConfig, WanSampling
from svdpp.config.limits import require
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Use
from svdpp.models.family_config import (
    TOKENIZERS,
    PromptedCheckpoint,
    check_counts,
    check_unset,
    component_class,
    missing,
    read_config,
    read_scheduler,
    require_class,
    require_equal,
)
from svdpp.models.safetensors_header import JsonFile, short_repr
from svdpp.plan.layout import Roles

#: The denoisers, by the number of the expert; the second runs the low-noise steps.
TRANSFORMERS = ("transformer", "transformer_2")


@dataclass(frozen=True, kw_only=True)
class WanCheckpoint(PromptedCheckpoint):
    """A checkpoint of Wan 2.1 or 2.2."""

    family: ClassVar[str] = "wan"
    fp32_components: ClassVar[frozenset[str]] = frozenset({"vae", "image_encoder"})

    patch_size: tuple[int, int, int]
    """Latent cells per token: frames, height, width."""
    boundary_ratio: float | None
    """Share of the training timesteps below which `transformer_2` runs; None for one expert."""
    expand_timesteps: bool
    """As in Wan 2.2 5B: one timestep per token, and the image replaces the first latent frame."""
    image_embeds: tuple[int, int] | None
    """Tokens and width of the image encoder's output; None without image encoder (Wan 2.1 only)."""
    image_processor_class: str | None
    text_to_video: bool
    image_to_video: bool

    @property
    def num_experts(self) -> int:
        """2 for Wan 2.2 A14B, otherwise 1."""
        return 1 if self.boundary_ratio is None else 2

    @property
    def size_multiple(self) -> tuple[int, int]:
        """See `PromptedCheckpoint`; 16 for most models, 32 for Wan 2.2 5B."""
        factor = self.vae_scale_factor_spatial
        return factor * self.patch_size[1], factor * self.patch_size[2]

    def latent_shape(self, sampling: WanSampling, channels: int) -> tuple[int, ...]:
        """1, channels, and the latent's frames, height and width."""
        return 1, channels, *self.latent_size(sampling)

    @property
    def weighted(self) -> tuple[str, ...]:
        """See `Checkpoint`."""
        encoders = () if self.image_embeds is None else ("image_encoder",)
        return (*TRANSFORMERS[: self.num_experts], "vae", "text_encoder", *encoders)

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """See `Checkpoint`."""
        assert isinstance(sampling, WanSampling)
        encodes_image = roles.encode and sampling.from_image
        needed = {
            **{part: expert in roles.experts for expert, part in enumerate(TRANSFORMERS)},
            "text_encoder": roles.encode,
            "vae": roles.decode or encodes_image,
            "image_encoder": encodes_image and self.image_embeds is not None,
        }
        return frozenset(part for part, is_needed in needed.items() if is_needed)

    @property
    def image_use(self) -> Use:
        """See `Checkpoint`."""
        if self.text_to_video:
            return "optional" if self.image_to_video else "refused"
        return "needed"

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """See `Checkpoint`."""
        return () if self.num_experts == 2 else ("guidance_scale_2",)

    def resolve(self, sampling: SamplingConfig) -> WanSampling:
        """See `Checkpoint`."""
        if not isinstance(sampling, WanSampling):
            raise RequestError(f"{self.label} is of the family wan, not {sampling.family}")
        self.check_size(sampling)
        if sampling.guidance_scale_2 is not None:
            require(
                self.num_experts == 2,
                "--guidance-scale-2 is for models with two experts, such as Wan 2.2 A14B",
            )
            require(
                sampling.guided,
                "--guidance-scale-2 has no effect: --guidance-scale of 1 or less turns guidance "
                "off",
            )
        from svdpp.models.wan.schedule import check_first_timesteps  # imports this module

        check_first_timesteps(self, sampling)
        return sampling

    def expert_boundary(self, sampling: SamplingConfig) -> int | None:
        """See `Checkpoint`."""
        if self.boundary_ratio is None:
            return None
        from svdpp.models.wan.schedule import boundary_step  # imports this module

        assert isinstance(sampling, WanSampling)
        return boundary_step(self, sampling)


def check(index: JsonFile, *, folder: Path, **common: Any) -> WanCheckpoint:
    """Checks the configs of a folder.

    Args:
        index: its `model_index.json`.
        folder: of the checkpoint.
        common: further fields of `Checkpoint`.

    Raises:
        ModelError: a config is missing, has unsupported values, or does not fit the others.
    """
    classes = {part: require_class(index, part, allowed) for part, allowed in _CLASSES.items()}
    boundary_ratio = _boundary_ratio(index)
    vae = read_config(folder, "vae", _VAE_DEFAULTS)
    transformer = read_config(folder, "transformer", _TRANSFORMER_DEFAULTS)
    text_encoder = read_config(folder, "text_encoder", {})
    for config, limits in ((vae, _VAE_LIMITS), (transformer, _TRANSFORMER_LIMITS)):
        check_counts(config, limits)
    check_unset(transformer, _TWO_IMAGES)
    text_dim = text_encoder.count("d_model", _MAX_WIDTH)
    require_equal(transformer, "text_dim", text_dim, "the text encoder's d_model")
    scheduler = read_scheduler(folder, index, _SCHEDULERS)
    check_unset(JsonFile("scheduler/scheduler_config.json", scheduler.values), _UNSUPPORTED)
    expand_timesteps = bool(index.values.get("expand_timesteps"))
    takes_image = _takes_image(transformer, vae.count("z_dim", 1024), expand_timesteps)
    if boundary_ratio is not None:
        _check_second_expert(folder, transformer)
    return WanCheckpoint(
        folder=folder,
        **common,
        pipeline_class=str(index.values["_class_name"]),
        scheduler=scheduler,
        tokenizer_class=classes["tokenizer"],
        text_encoder_class=classes["text_encoder"],
        text_dim=text_dim,
        latent_channels=vae.count("z_dim", 1024),
        vae_scale_factor_spatial=vae.count("scale_factor_spatial", 64),
        vae_scale_factor_temporal=vae.count("scale_factor_temporal", 64),
        patch_size=_patch_size(transformer),
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
        image_embeds=_image_embeds(folder, index, transformer),
        image_processor_class=component_class(index, "image_processor", _IMAGE_PROCESSORS),
        text_to_video=expand_timesteps or not takes_image,
        image_to_video=expand_timesteps or takes_image,
    )


def _boundary_ratio(index: JsonFile) -> float | None:
    """The ratio, checked against the experts that the checkpoint lists."""
    require_class(index, "transformer", ("WanTransformer3DModel",))
    second = component_class(index, "transformer_2", ("WanTransformer3DModel",))
    ratio = index.values.get("boundary_ratio")
    if ratio is None and second is None:
        return None
    if ratio is None:
        raise missing(index, "there is an expert transformer_2, but no boundary_ratio")
    if not (isinstance(ratio, float) and 0 < ratio < 1):
        raise index.error(f"boundary_ratio is {short_repr(ratio)}, not a number between 0 and 1")
    if second is None:
        raise missing(index, f"boundary_ratio is {ratio}, but the expert transformer_2 is missing")
    return ratio


def _check_second_expert(folder: Path, first: JsonFile) -> None:
    second = read_config(folder, "transformer_2", _TRANSFORMER_DEFAULTS)
    check_counts(second, _TRANSFORMER_LIMITS)
    for key in ("in_channels", "out_channels", "patch_size", "text_dim", "image_dim"):
        require_equal(second, key, first.values[key], "as in the transformer")


def _takes_image(transformer: JsonFile, z_dim: int, expand_timesteps: bool) -> bool:
    """Whether the transformer's input holds an image and its mask beside the latent."""
    channels = transformer.count("in_channels", _MAX_WIDTH)
    # One mask per frame of a latent frame, 4, and the image's latents (`prepare_latents`).
    with_image = 2 * z_dim + 4
    if channels == z_dim or (channels == with_image and not expand_timesteps):
        return channels == with_image
    expected = f"{z_dim}" if expand_timesteps else f"{z_dim} or {with_image}"
    raise transformer.error(f"in_channels is {channels}, not {expected}")


def _patch_size(transformer: JsonFile) -> tuple[int, int, int]:
    patch = transformer.counts("patch_size", 16)
    if len(patch) != 3:
        raise transformer.error(f"patch_size is {patch}, not three integers")
    return patch[0], patch[1], patch[2]


def _image_embeds(folder: Path, index: JsonFile, transformer: JsonFile) -> tuple[int, int] | None:
    name = component_class(index, "image_encoder", ("CLIPVisionModel",))
    width = transformer.values["image_dim"]
    if (name is None) != (width is None):
        raise missing(index, "the transformer's image_dim and the image encoder do not fit")
    if name is None:
        return None
    require_class(index, "image_processor", _IMAGE_PROCESSORS)
    config = read_config(folder, "image_encoder", {})
    check_counts(config, _CLIP_LIMITS)
    require_equal(transformer, "image_dim", config.values.get("hidden_size"), "CLIP's hidden_size")
    patches = config.count("image_size", 1024) // config.count("patch_size", 1024)
    return patches**2 + 1, config.count("hidden_size", _MAX_WIDTH)


_IMAGE_PROCESSORS = ("CLIPImageProcessor", "CLIPImageProcessorPil")
_SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": TOKENIZERS,
    "text_encoder": ("UMT5EncoderModel", "T5EncoderModel"),
    "vae": ("AutoencoderKLWan",),
}
_UNSUPPORTED = {
    "use_dynamic_shifting": "needs a value that Wan's pipeline does not give",
    "invert_sigmas": "reverses the order of the noise levels",
}
_TWO_IMAGES = {"pos_embed_seq_len": "is for models that take a first and a last image"}

# Defaults of diffusers' classes, for keys that older files lack.
_VAE_DEFAULTS: Mapping[str, Any] = {
    "z_dim": 16,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
}
_TRANSFORMER_DEFAULTS: Mapping[str, Any] = {
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "image_dim": None,
}

# For comparison, Wan 2.2 A14B has 40 layers and heads of 128, and a feed-forward width of 13824.
_MAX_WIDTH = 65536
_TRANSFORMER_LIMITS: Mapping[str, int] = {
    "num_attention_heads": 256,
    "attention_head_dim": 1024,
    "ffn_dim": _MAX_WIDTH,
    "num_layers": 256,
    "freq_dim": 4096,
    "rope_max_seq_len": 65536,
}
_VAE_LIMITS: Mapping[str, int] = {"base_dim": 4096, "num_res_blocks": 16}
_CLIP_LIMITS: Mapping[str, int] = {
    "intermediate_size": _MAX_WIDTH,
    "num_hidden_layers": 128,
    "num_attention_heads": 256,
}
