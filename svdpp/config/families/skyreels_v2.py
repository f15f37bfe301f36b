"""Sampling parameters and specs of SkyReels-V2, with and without diffusion forcing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from svdpp.config.families.spec import (
    FLOW_SCHEDULERS,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    two_images,
)
from svdpp.config.families.wan import image_projection, last_image_facts, vae_channels
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2BaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of SkyReels-V2 share, with their defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4

    height: int = 544
    width: int = 960
    num_frames: int = 97
    fps: float = 24
    guidance_scale: float = 6.0
    max_sequence_length: int = 512


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2Sampling(SkyReelsV2BaseSampling):
    """Sampling parameters of SkyReels-V2 from text or an image, with diffusers' defaults."""

    family: Literal["skyreels_v2"] = "skyreels_v2"


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2ForcingSampling(SkyReelsV2BaseSampling):
    """Sampling parameters of diffusers' `SkyReelsV2DiffusionForcingPipeline`, with defaults."""

    family: Literal["skyreels_v2_df"] = "skyreels_v2_df"


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    return {**image_projection(configs), **last_image_facts(configs)}


SKYREELS_V2 = FamilySpec(
    sampling=SkyReelsV2Sampling,
    title="SkyReels-V2",
    example="Skywork/SkyReels-V2-T2V-14B-720P-Diffusers",
    license="Skywork License",
    denoiser="SkyReelsV2Transformer3DModel",
    gguf=True,
    text_pipeline="SkyReelsV2Pipeline",
    image_pipeline="SkyReelsV2ImageToVideoPipeline",
    last_image_arguments=two_images,
    schedulers=FLOW_SCHEDULERS,
    fp32_components=frozenset({"vae", "image_encoder"}),
    loras_as_wan=True,
    branches="calls",
    latent_channels=vae_channels,
    latent_dtype="stepped",
    checkpoint_facts=_checkpoint_facts,
    decodes_in_tiles=True,
)

SKYREELS_V2_FORCING = replace(
    SKYREELS_V2,
    sampling=SkyReelsV2ForcingSampling,
    title="SkyReels-V2, diffusion forcing with all frames in step",
    example="Skywork/SkyReels-V2-DF-14B-720P-Diffusers",
    text_pipeline="SkyReelsV2DiffusionForcingPipeline",
    image_pipeline=None,
    last_image_arguments=None,
    checkpoint_facts=image_projection,
    # The pipeline gives each latent frame its own timestep, which `step` of #
    # `FlowMatchEulerDiscreteScheduler` does not accept.
    schedulers=("UniPCMultistepScheduler",),
    initial_latent_source="latents",
    # the number is larger than any number of schedulers, so it means all schedulers
    num_results_equal_latents=1_000,
    frame_limits=(1, 97, "as longer clips need several denoising loops"),
)

FAMILIES = (SKYREELS_V2, SKYREELS_V2_FORCING)
