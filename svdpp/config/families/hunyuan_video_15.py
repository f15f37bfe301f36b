"""Sampling parameters and specs of HunyuanVideo-1.5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.guiders import GUIDER_CLASSES, check_guiders
from svdpp.config.families.spec import (
    TWO_TEXT_ENCODERS,
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15BaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of HunyuanVideo-1.5 share, with their defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4

    height: int = 480
    width: int = 848
    num_frames: int = 121
    fps: float = 24
    guidance_scale: float = 6.0
    max_sequence_length: int = 1000


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Sampling(HunyuanVideo15BaseSampling):
    """Sampling parameters of `HunyuanVideo15Pipeline` and `HunyuanVideo15ImageToVideoPipeline`."""

    family: Literal["hunyuan_video_15"] = "hunyuan_video_15"


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15ModularSampling(HunyuanVideo15BaseSampling):
    """Sampling parameters of `HunyuanVideo15ModularPipeline`."""

    crops_image: ClassVar[bool] = True

    family: Literal["hunyuan_video_15_modular"] = "hunyuan_video_15_modular"


_UNUSED = {"unused_parameters": ("max_sequence_length",)}


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    """Return facts of a checkpoint: `image_sizes` and `unused_parameters`.

    `image_sizes` describes, by two numbers, the sizes that clips from an image may have: those to
    which the pipeline crops images (see `CheckedCheckpoint.image_sizes`). `unused_parameters`
    lists `max_sequence_length`, which has no effect.
    """
    unit = configs.of("vae", spatial_compression_ratio=16).positive_int(
        "spatial_compression_ratio", 64
    )
    target = configs.of("transformer", target_size=640).positive_int("target_size", 8192)
    return {**_UNUSED, "image_sizes": (target, unit)}


def _modular_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    """Check a modular HunyuanVideo-1.5 checkpoint; return its rule for the input image.

    The rule `image_use` says whether clips must have, may have or must not have an input image.

    The modular pipeline can make clips from text and from images. But each published checkpoint is
    trained for only one of the two. Only checkpoints for images have an image encoder.
    """
    check_guiders(configs, "guider")
    if configs.index.values["_class_name"] == _IMAGE_PIPELINE:
        return {**_UNUSED, "image_use": "needed"}
    has_encoder = "image_encoder" in configs.classes
    return {**_UNUSED, "image_use": "optional" if has_encoder else "refused"}


def _check_guidance(_: CheckedCheckpoint, sampling: Any) -> None:
    require(
        sampling.uses_guidance,
        f"`guidance_scale` must be above 1, got {sampling.guidance_scale}: without guidance, "
        "diffusers' modular pipeline fails, because it encodes no negative prompt",
        "raise `guidance_scale` above 1",
        guidance_scale=sampling.guidance_scale,
        above=1,
    )


_IMAGE_PIPELINE = "HunyuanVideo15ImageToVideoPipeline"


HUNYUAN_VIDEO_15 = FamilySpec(
    sampling=HunyuanVideo15Sampling,
    title="HunyuanVideo-1.5",
    example="hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
    license="Tencent Hunyuan Community License",
    denoiser="HunyuanVideo15Transformer3DModel",
    text_pipeline="HunyuanVideo15Pipeline",
    image_pipeline=_IMAGE_PIPELINE,
    size_from_image=True,
    encode_components=TWO_TEXT_ENCODERS,
    shared_components=("guider",),
    # Other guiders are refused, because they may keep state, such as a momentum, between steps.
    # Packets between ranks contain this state only for modular pipelines, and this pipeline is not
    # modular.
    component_classes={"guider": r"ClassifierFreeGuidance"},
    loras=False,
    branches="calls",
    latent_channels=lambda pipe: int(pipe.num_channels_latents),
    latent_dtype="model",
    checkpoint_facts=_checkpoint_facts,
    decodes_in_tiles=True,
)

HUNYUAN_VIDEO_15_MODULAR = replace(
    HUNYUAN_VIDEO_15,
    sampling=HunyuanVideo15ModularSampling,
    title="HunyuanVideo-1.5, modular",
    text_pipeline="HunyuanVideo15ModularPipeline",
    image_pipeline="HunyuanVideo15ModularPipeline",
    text_and_image=True,
    aliases=("HunyuanVideo15Pipeline", _IMAGE_PIPELINE),
    text_aliases=("HunyuanVideo15Pipeline",),
    size_from_image=False,
    # Checkpoints must have all components in `shared_components`. The guider is not listed, because
    # a checkpoint may lack it: diffusers then creates a default guider.
    shared_components=(),
    component_classes={"guider": GUIDER_CLASSES},
    branches="replay",
    checkpoint_facts=_modular_facts,
    check_sampling=_check_guidance,
    decodes_in_tiles=False,
    modular=ModularSpec(blocks=("HunyuanVideo15AutoBlocks",)),
)

FAMILIES = (HUNYUAN_VIDEO_15, HUNYUAN_VIDEO_15_MODULAR)
