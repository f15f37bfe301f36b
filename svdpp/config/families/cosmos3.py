"""Sampling parameters and spec of Cosmos 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import (
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class Cosmos3Sampling(PromptedSampling):
    """Sampling parameters of `Cosmos3OmniModularPipeline`, with diffusers' defaults."""

    frames_unit: ClassVar[int] = 4

    family: Literal["cosmos3"] = "cosmos3"
    height: int = 720
    width: int = 1280
    num_frames: int = 189
    fps: float = 24
    """Frames per second, which the denoiser reads."""
    guidance_scale: float = 6.0
    max_sequence_length: int = 4096
    """Without effect: the denoiser reads all tokens of a prompt."""


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    configs.index.require(
        "enable_safety_checker",
        False,
        "because svdpp does not support cosmos_guardrail, the package of the safety checker",
    )
    unit = configs.of("vae", scale_factor_spatial=8).positive_int("scale_factor_spatial", 64)
    return {"size_multiple": (unit, unit), "unused_parameters": ("max_sequence_length",)}


def _check_sampling(_: CheckedCheckpoint, sampling: Any) -> None:
    require(
        not sampling.from_image or sampling.frames > 1,
        f"a clip from an image needs more than 1 `num_frames`, got {sampling.frames}",
        frames=sampling.frames,
        above=1,
    )


COSMOS3 = FamilySpec(
    sampling=Cosmos3Sampling,
    title="Cosmos 3, modular",
    example="nvidia/Cosmos3-Nano",
    license="NVIDIA Open Model License",
    denoiser="Cosmos3OmniTransformer",
    text_pipeline="Cosmos3OmniModularPipeline",
    image_pipeline="Cosmos3OmniModularPipeline",
    text_and_image=True,
    schedulers=("UniPCMultistepScheduler",),
    encode_components=("text_tokenizer",),
    component_classes={"text_tokenizer": r"Qwen2Tokenizer(Fast)?|TokenizersBackend"},
    loras=False,
    cuts_prompts=False,
    branches="replay",
    latent_channels=lambda pipe: int(pipe.num_channels_latents),
    modular=ModularSpec(blocks=("Cosmos3OmniBlocks",), guiders={}, has_video_batch=False),
    checkpoint_facts=_checkpoint_facts,
    check_sampling=_check_sampling,
)

FAMILIES = (COSMOS3,)
