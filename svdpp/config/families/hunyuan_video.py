"""Sampling parameters and spec of HunyuanVideo."""

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
class HunyuanVideoSampling(PromptedSampling):
    """Sampling parameters of HunyuanVideo, from text or an image, with diffusers' defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    embedded_guidance: ClassVar[bool] = True

    family: Literal["hunyuan_video"] = "hunyuan_video"
    height: int = 720
    width: int = 1280
    num_frames: int = 129
    fps: float = 15
    guidance_scale: float = 6.0
    max_sequence_length: int = 256


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    if "image_processor" in configs.classes:
        transformer = configs.of("transformer", image_condition_type=None)
        reason = "because with other types the clip lacks the first four frames"
        transformer.require("image_condition_type", "token_replace", reason)
    return {}


HUNYUAN_VIDEO = FamilySpec(
    sampling=HunyuanVideoSampling,
    title="HunyuanVideo",
    example="hunyuanvideo-community/HunyuanVideo",
    license="Tencent Hunyuan Community License",
    denoiser="HunyuanVideoTransformer3DModel",
    gguf=True,
    text_pipeline="HunyuanVideoPipeline",
    image_pipeline="HunyuanVideoImageToVideoPipeline",
    encode_components=TWO_TEXT_ENCODERS,
    num_results_equal_latents=1,
    # In clips from text, the first step converts the latent to the denoiser's dtype. In clips from
    # an image, the pipeline joins the result of each step with the image's latent, which is
    # float32, so the whole latent stays float32.
    latent_dtype="stepped from text",
    checkpoint_facts=_checkpoint_facts,
    decodes_in_tiles=True,
)

FAMILIES = (HUNYUAN_VIDEO,)
