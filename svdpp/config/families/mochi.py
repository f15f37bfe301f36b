"""Sampling parameters and spec of Mochi 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.families.spec import FamilySpec
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class MochiSampling(PromptedSampling):
    """Sampling parameters of diffusers' `MochiPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 6

    family: Literal["mochi"] = "mochi"
    num_inference_steps: int = 64
    height: int = 480
    width: int = 848
    num_frames: int = 19
    fps: float = 30
    guidance_scale: float = 4.5
    max_sequence_length: int = 256


MOCHI = FamilySpec(
    sampling=MochiSampling,
    title="Mochi 1",
    example="genmo/mochi-1-preview",
    license="Apache-2.0",
    denoiser="MochiTransformer3DModel",
    gguf=True,
    text_pipeline="MochiPipeline",
    branches="batch",
    batched_arguments=frozenset(
        {"hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep"}
    ),
    latent_dtype="model",
)

FAMILIES = (MOCHI,)
