"""Sampling parameters and specs of MiniMax-H3, which makes video and sound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.fixed import check_fixed
from svdpp.config.families.spec import CheckedCheckpoint, FamilySpec, ModularSpec, two_images
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3Sampling(PromptedSampling):
    """Sampling parameters of diffusers' `MiniMaxH3ModularPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 17
    frames_remainder: ClassVar[int] = 5
    latent_axes: ClassVar[str] = "NC"

    family: Literal["minimax_h3"] = "minimax_h3"
    height: int = 768
    width: int = 1344
    num_frames: int = 124
    fps: float = 24
    guidance_scale: float = 1.0
    max_sequence_length: int = 4096


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3ReferencesSampling(MiniMaxH3Sampling):
    """Sampling parameters of `MiniMaxH3ModularPipeline` for clips with references."""

    keeps_image_shape: ClassVar[bool] = True
    max_image_aspect: ClassVar[int | None] = 4

    family: Literal["minimax_h3_references"] = "minimax_h3_references"  # type: ignore[assignment]


#: Parameters that users cannot choose in this family, each with the reason.
_FIXED = {
    "fps": "the model makes the sound for this rate",
    "guidance_scale": "the model runs without guidance",
    "max_sequence_length": "the pipeline reads the whole prompt",
}


def _check_sampling(_: CheckedCheckpoint, sampling: Any) -> None:
    check_fixed(sampling, _FIXED)


def _latent_channels(pipe: Any) -> int:
    """Return the number of channels of MiniMax-H3's latent.

    The pipeline packs each patch of the VAE's latent into one position. So the number of channels
    is the number of values in a patch.
    """
    return int(pipe.vae_latent_channels * math.prod(pipe.patch_size))


def _latent_frames(pipe: Any, sampling: Any, _: int) -> int:
    per_chunk, latents = int(pipe.vae_frames_per_chunk), int(pipe.vae_latents_per_chunk)
    return int((sampling.frames - latents) // per_chunk * latents + 2)


_MODULAR = ModularSpec(blocks=("MiniMaxH3Blocks",), audio="audio")

MINIMAX_H3 = FamilySpec(
    sampling=MiniMaxH3Sampling,
    title="MiniMax-H3",
    example="MiniMaxAI/MiniMax-H3",
    license="MiniMax H3 Community License",
    denoiser="MiniMaxH3Transformer3DModel",
    text_pipeline="MiniMaxH3ModularPipeline",
    image_pipeline="MiniMaxH3ModularPipeline",
    last_image_arguments=two_images,
    text_and_image=True,
    schedulers=("MiniMaxH3Scheduler",),
    encode_components=("tokenizer", "processor", "text_encoder"),
    decode_components=("vae", "audio_vae"),
    shared_components=("audio_scheduler",),
    component_classes={
        "processor": "Qwen3VLProcessor",
        "text_encoder": "Qwen3VLForConditionalGeneration",
        "audio_vae": "AutoencoderKLMiniMaxH3Audio",
        "audio_scheduler": "MiniMaxH3Scheduler",
    },
    loras=False,
    latent_channels=_latent_channels,
    latent_frames=_latent_frames,
    # The pipeline makes clips of 5 to 15 seconds: 124 frames are the fewest that it allows, and 345
    # the most.
    frame_limits=(124, 345, "which are 5 to 15 seconds"),
    check_sampling=_check_sampling,
    # The pipeline's `num_inference_steps` counts noise levels. The last level is 0 and has no step,
    # so the argument is one more than the number of steps.
    call_arguments=lambda sampling: {"num_inference_steps": sampling.num_inference_steps + 1},
    audio_rate=lambda pipe: int(pipe.audio_sampling_rate),
    modular=_MODULAR,
)

MINIMAX_H3_REFERENCES = replace(
    MINIMAX_H3,
    sampling=MiniMaxH3ReferencesSampling,
    title="MiniMax-H3, whose images are references",
    text_pipeline=None,
    text_and_image=False,
    last_image_arguments=None,
    aliases=("MiniMaxH3ModularPipeline",),
    denoisers=("transformer_ref",),
    references_argument="references",
    max_references=8,
    modular=replace(_MODULAR, reference_class="MiniMaxH3ImageReference"),
)

FAMILIES = (MINIMAX_H3, MINIMAX_H3_REFERENCES)
