"""Sampling parameters and spec of Kandinsky 6, which makes video with sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import (
    TWO_TEXT_ENCODERS,
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling

#: Scheduler of the distilled checkpoints.
_DISTILLED = "PiflowScheduler"


@dataclass(frozen=True, kw_only=True)
class Kandinsky6Sampling(PromptedSampling):
    """Sampling parameters of diffusers' `Kandinsky6TI2VAPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    latent_axes: ClassVar[str] = "BFHWC"
    crops_image: ClassVar[bool] = True

    family: Literal["kandinsky6"] = "kandinsky6"
    height: int = 512
    width: int = 768
    num_frames: int = 121
    fps: float = 24
    guidance_scale: float = 5.0
    max_sequence_length: int = 1024


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    transformer = configs.of("transformer", visual_cond=True, visual_token_type_num_embeddings=0)
    takes_image = (
        transformer.values["visual_cond"]
        and transformer.values["visual_token_type_num_embeddings"] >= 2
    )
    return {"image_use": "optional" if takes_image else "refused"}


def _check_sampling(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    require(
        checkpoint.scheduler_class != _DISTILLED or not sampling.uses_guidance,
        f"`guidance_scale` must be at most 1 for a distilled model (its scheduler is "
        f"{_DISTILLED}), got {sampling.guidance_scale:g}",
        field="guidance_scale",
        value=sampling.guidance_scale,
        highest=1,
        scheduler=_DISTILLED,
    )


KANDINSKY6 = FamilySpec(
    sampling=Kandinsky6Sampling,
    title="Kandinsky 6",
    example="kandinskylab/Kandinsky-6.0-Lite-5s-Diffusers",
    # The license has not been verified, so users are referred to the model card.
    license="that of its model card",
    denoiser="Kandinsky6Transformer3DModel",
    text_pipeline="Kandinsky6TI2VAPipeline",
    image_pipeline="Kandinsky6TI2VAPipeline",
    text_and_image=True,
    schedulers=("FlowMatchEulerDiscreteScheduler", _DISTILLED),
    encode_components=TWO_TEXT_ENCODERS,
    decode_components=("vae", "audio_vae", "vocoder"),
    component_classes={"audio_vae": "MMAudioVAE", "vocoder": "MMAudioVocoder"},
    loras=False,
    record_uses={"prepare_audio_latents": "first step"},
    branches="calls",
    latent_channels=lambda pipe: int(pipe.transformer.config.in_visual_dim),
    latent_frames=lambda _, sampling, frames: frames + sampling.from_image,
    latent_dtype="model",
    # The latent that the encode returns consists only of noise. The pipeline appends the image's
    # frame to the latent later. So the latent of a clip from an image has one frame fewer before
    # the first step than after it.
    first_frames=lambda sampling: -int(sampling.from_image),
    audio_rate=lambda pipe: int(pipe.audio_sample_rate),
    checkpoint_facts=_checkpoint_facts,
    check_sampling=_check_sampling,
    renamed_arguments={"frame_rate": "fps"},
    decodes_in_tiles=True,
)

FAMILIES = (KANDINSKY6,)
