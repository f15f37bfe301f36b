"""Sampling parameters and specs of LTX-Video, up to version 0.9.1 and from version 0.9.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import (
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import Param, PromptedSampling


@dataclass(frozen=True, kw_only=True)
class LtxSampling(PromptedSampling):
    """Sampling parameters of `LTXPipeline` and `LTXImageToVideoPipeline`, with their defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"
    own: ClassVar[Mapping[str, Param]] = {
        "guidance_rescale": Param(
            highest=1, help="How much the guided prediction is rescaled; 0 is off."
        ),
        "decode_timestep": Param(
            highest=1, help="Noise level of the decode, for a VAE that is conditioned on it."
        ),
        "decode_noise_scale": Param(
            highest=1,
            help="Share of noise mixed into the latent before the decode.",
            shown_default="decode_timestep",
        ),
    }

    family: Literal["ltx"] = "ltx"
    height: int = 512
    width: int = 704
    num_frames: int = 161
    fps: float = 25
    guidance_scale: float = 3.0
    guidance_rescale: float = 0.0
    decode_timestep: float = 0.0
    decode_noise_scale: float | None = None
    max_sequence_length: int = 128


@dataclass(frozen=True, kw_only=True)
class LtxConditionSampling(PromptedSampling):
    """Sampling parameters of diffusers' `LTXConditionPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"
    own: ClassVar[Mapping[str, Param]] = {
        "guidance_rescale": Param(
            highest=1, help="How much the guided prediction is rescaled; 0 is off."
        ),
        "decode_timestep": Param(
            highest=1, help="Noise level of the decode, for a VAE that is conditioned on it."
        ),
        "decode_noise_scale": Param(
            highest=1, help="Share of noise mixed into the latent before the decode."
        ),
        "strength": Param(
            highest=1,
            help="How closely the first or last frame follows its image; 0 is not at all.",
        ),
        "image_cond_noise_scale": Param(highest=1, help="Noise that each step adds to the image."),
    }

    family: Literal["ltx_condition"] = "ltx_condition"
    height: int = 512
    width: int = 704
    num_frames: int = 161
    fps: float = 25
    guidance_scale: float = 3.0
    max_sequence_length: int = 256
    guidance_rescale: float = 0.0
    decode_timestep: float = 0.0
    decode_noise_scale: float = 0.0
    strength: float = 1.0
    image_cond_noise_scale: float = 0.15


def check_vae(configs: CheckpointConfigs) -> bool:
    """Refuse an LTX VAE whose decoder draws noise; return whether the decoder takes a timestep.

    Raises:
        ModelError: The VAE's decoder draws noise from torch's global generator.
    """
    vae = configs.of("vae", timestep_conditioning=False, decoder_inject_noise=[])
    vae.refuse("decoder_inject_noise", "draws noise from torch's global generator")
    return bool(vae.values["timestep_conditioning"])


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    has_timestep = check_vae(configs)
    return {
        "decode_draws_noise": has_timestep,
        "unused_parameters": () if has_timestep else ("decode_timestep", "decode_noise_scale"),
    }


def _check_sampling(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    require(
        sampling.num_inference_steps > 1 or not checkpoint.scheduler_config.get("shift_terminal"),
        "`num_inference_steps` must be 2 or more: the model's scheduler divides by zero for 1",
        steps=sampling.num_inference_steps,
        lowest=2,
    )


def ltx_generator_device(checkpoint: CheckedCheckpoint, sampling: Any, device: str) -> str:
    """Return the device of an LTX clip's random generator: the CPU if diffusers allows this.

    If the VAE's decoder is conditioned on a timestep, `LTXImageToVideoPipeline` calls `torch.randn`
    with the pipeline's device, which would fail with a generator on the CPU.

    Args:
        checkpoint: Checked checkpoint.
        sampling: Sampling parameters.
        device: Device of the pipeline.
    """
    return device if sampling.from_image and checkpoint.decode_draws_noise else "cpu"


def _two_conditions(first: Any, last: Any, sampling: Any) -> dict[str, Any]:
    """Return the arguments of `LTXConditionPipeline` for an image at the first and the last frame.

    diffusers combines the n-th entries of the four lists into one condition. Each `frame_index` is
    a multiple of 8, because a latent frame stands for 8 frames.
    """
    return {
        "image": [first, last],
        "video": [None, None],
        "frame_index": [0, sampling.frames - 1],
        "strength": [sampling.strength, sampling.strength],
    }


LTX = FamilySpec(
    sampling=LtxSampling,
    title="LTX-Video",
    example="Lightricks/LTX-Video",
    license="LTX-Video Open Weights License",
    denoiser="LTXVideoTransformer3DModel",
    gguf=True,
    text_pipeline="LTXPipeline",
    image_pipeline="LTXImageToVideoPipeline",
    text_and_image=True,
    initial_latent_source="latents",
    num_results_equal_latents=1,
    branches="batch",
    batched_arguments=frozenset(
        {
            *("hidden_states", "encoder_hidden_states", "encoder_attention_mask"),
            *("timestep", "video_coords"),
        }
    ),
    checkpoint_facts=_checkpoint_facts,
    check_sampling=_check_sampling,
    renamed_arguments={"frame_rate": "fps"},
    generator_device=ltx_generator_device,
    decodes_in_tiles=True,
)

LTX_CONDITION = replace(
    LTX,
    sampling=LtxConditionSampling,
    title="LTX-Video 0.9.5 and later, whose image is a condition",
    example="Lightricks/LTX-Video-0.9.5",
    text_pipeline="LTXConditionPipeline",
    image_pipeline="LTXConditionPipeline",
    last_image_arguments=_two_conditions,
    record_uses={"add_noise_to_image_conditioning_latents": "first step"},
    initial_latent_source="noise",
    latent_frames=lambda _, sampling, frames: frames + sampling.has_last_image,
    generator_device=lambda *_: "cpu",
)

FAMILIES = (LTX, LTX_CONDITION)
