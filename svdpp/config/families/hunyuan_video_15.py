"""Sampling parameters and spec of HunyuanVideo-1.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.families.spec import (
    TWO_TEXT_ENCODERS,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
)
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Sampling(PromptedSampling):
    """Sampling parameters of HunyuanVideo-1.5, from text or an image, with diffusers' defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4

    family: Literal["hunyuan_video_15"] = "hunyuan_video_15"
    height: int = 480
    width: int = 848
    num_frames: int = 121
    fps: float = 24
    guidance_scale: float = 6.0
    max_sequence_length: int = 1000


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    """Return the sizes of clips from an image, and `max_sequence_length` as without effect."""
    unit = configs.of("vae", spatial_compression_ratio=16).positive_int(
        "spatial_compression_ratio", 64
    )
    target = configs.of("transformer", target_size=640).positive_int("target_size", 8192)
    return {"unused_parameters": ("max_sequence_length",), "image_sizes": (target, unit)}


HUNYUAN_VIDEO_15 = FamilySpec(
    sampling=HunyuanVideo15Sampling,
    title="HunyuanVideo-1.5",
    example="hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
    license="Tencent Hunyuan Community License",
    denoiser="HunyuanVideo15Transformer3DModel",
    text_pipeline="HunyuanVideo15Pipeline",
    image_pipeline="HunyuanVideo15ImageToVideoPipeline",
    size_from_image=True,
    encode_components=TWO_TEXT_ENCODERS,
    shared_components=("guider",),
    # Other guiders keep a momentum between steps, which packets do not contain.
    component_classes={"guider": r"ClassifierFreeGuidance"},
    loras=False,
    branches="calls",
    latent_channels=lambda pipe: int(pipe.num_channels_latents),
    latent_dtype="model",
    checkpoint_facts=_checkpoint_facts,
    decodes_in_tiles=True,
)

FAMILIES = (HUNYUAN_VIDEO_15,)
