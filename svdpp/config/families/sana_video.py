"""Sampling parameters and spec of Sana-Video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.families.spec import FamilySpec
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class SanaVideoSampling(PromptedSampling):
    """Sampling parameters of `SanaVideoPipeline` and `SanaImageToVideoPipeline`, with defaults."""

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
    image_pipeline="SanaImageToVideoPipeline",
    text_and_image=True,
    schedulers=("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler"),
    # Checkpoints for 720p are refused: they have LTX-2's VAE, which needs other numbers of frames.
    component_classes={"text_encoder": "Gemma2Model", "vae": "AutoencoderKLWan"},
    fp32_components=frozenset({"vae"}),
    # In a clip from an image, the pipeline writes the image into the first frame of the latent. No
    # step changes this frame, so later steps can read it from the current latent.
    initial_latent_source="latents",
    num_results_equal_latents=1,
    latent_dtype="stepped from text",
    branches="batch",
    batched_arguments=frozenset(
        {"hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep"}
    ),
    renamed_arguments={"frames": "num_frames"},
    # With resolution binning, the pipeline would round the clip's height and width to the nearest
    # of some fixed sizes, and the latent would not have the expected shape.
    call_arguments=lambda _: {"use_resolution_binning": False},
    decodes_in_tiles=True,
)

FAMILIES = (SANA_VIDEO,)
