"""Sampling parameters and spec of Sana-Video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.families.spec import FamilySpec
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class SanaVideoSampling(PromptedSampling):
    """Sampling parameters of diffusers' `SanaVideoPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 4

    family: Literal["sana_video"] = "sana_video"
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: float = 16
    guidance_scale: float = 6.0
    max_sequence_length: int = 300


SANA_VIDEO = FamilySpec(
    sampling=SanaVideoSampling,
    title="Sana-Video",
    example="Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
    license="NVIDIA Open Model License",
    denoiser="SanaVideoTransformer3DModel",
    text_pipeline="SanaVideoPipeline",
    schedulers=("DPMSolverMultistepScheduler",),
    # Checkpoints for 720p have the VAE of LTX-2, for which `frames_unit` would have to be 8. They
    # are refused.
    component_classes={"text_encoder": "Gemma2Model", "vae": "AutoencoderKLWan"},
    fp32_components=frozenset({"vae"}),
    branches="batch",
    batched_arguments=frozenset(
        {"hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep"}
    ),
    renamed_arguments={"frames": "num_frames"},
    # With resolution binning, the pipeline would make the latent of another height and width
    # than the clip's.
    call_arguments=lambda _: {"use_resolution_binning": False},
    decodes_in_tiles=True,
)

FAMILIES = (SANA_VIDEO,)
