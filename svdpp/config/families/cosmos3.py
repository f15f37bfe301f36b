"""Sampling parameters and specs of Cosmos 3, from text, an image or a video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.fixed import check_fixed
from svdpp.config.families.frames import check_frames_from_image, check_video_frames
from svdpp.config.families.spec import (
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import is_number, require, shown
from svdpp.config.sampling import VIDEO_FRAMES, Param, PromptedSampling


@dataclass(frozen=True, kw_only=True)
class Cosmos3BaseSampling(PromptedSampling):
    """Sampling parameters that all families of Cosmos 3 share, with diffusers' defaults."""

    frames_unit: ClassVar[int] = 4

    height: int = 720
    width: int = 1280
    num_frames: int = 189
    fps: float = 24
    """Frames per second; the denoiser also takes this number as an input."""
    guidance_scale: float = 6.0
    max_sequence_length: int = 4096
    """Field that all families with prompts have. It has no effect in this family, because the
    denoiser reads all tokens of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Cosmos3Sampling(Cosmos3BaseSampling):
    """Sampling parameters of `Cosmos3OmniModularPipeline` for clips from text or an image."""

    crops_image: ClassVar[bool] = True

    family: Literal["cosmos3"] = "cosmos3"


@dataclass(frozen=True, kw_only=True)
class Cosmos3SoundSampling(Cosmos3BaseSampling):
    """Sampling parameters of `Cosmos3OmniModularPipeline` for clips with sound."""

    crops_image: ClassVar[bool] = True

    family: Literal["cosmos3_sound"] = "cosmos3_sound"


@dataclass(frozen=True, kw_only=True)
class Cosmos3FromVideoSampling(Cosmos3BaseSampling):
    """Sampling parameters of `Cosmos3OmniModularPipeline` for clips that continue a video."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {"video_frames": VIDEO_FRAMES}

    family: Literal["cosmos3_v2v"] = "cosmos3_v2v"
    video_frames: int = 5
    """Number of frames that the clip takes from the input video as its first frames: a multiple of
    `frames_unit` plus 1. The default is that of diffusers."""


@dataclass(frozen=True, kw_only=True)
class Cosmos3DistilledSampling(Cosmos3BaseSampling):
    """Sampling parameters of `Cosmos3DistilledModularPipeline` for clips from text or an image."""

    crops_image: ClassVar[bool] = True
    has_fixed_steps: ClassVar[bool] = True

    family: Literal["cosmos3_distilled"] = "cosmos3_distilled"
    num_inference_steps: int = 4
    guidance_scale: float = 1.0


#: Parameters that can have only one value with a distilled checkpoint, each with the reason.
_FIXED = {
    "num_inference_steps": "the model is distilled for this number of noise levels",
    "guidance_scale": "the model is distilled to run without guidance",
}


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    configs.index.require(
        "enable_safety_checker",
        False,
        "because svdpp does not support cosmos_guardrail, the package of the safety checker",
    )
    unit = configs.of("vae", scale_factor_spatial=8).positive_int("scale_factor_spatial", 64)
    return {"size_multiple": (unit, unit), "unused_parameters": ("max_sequence_length",)}


def _sound_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    configs.of("transformer", sound_gen=False).require("sound_gen", True, "to make sound")
    return _checkpoint_facts(configs)


def _distilled_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    sigmas = configs.index.values.get("distilled_sigmas")
    steps = Cosmos3DistilledSampling.num_inference_steps
    if not (isinstance(sigmas, list) and len(sigmas) == steps and all(map(is_number, sigmas))):
        raise configs.index.error(
            f"distilled_sigmas is {shown(sigmas)}, but svdpp runs only models with {steps} noise "
            "levels",
            details={"distilled_sigmas": shown(sigmas), "steps": steps},
        )
    return _checkpoint_facts(configs)


def _check_distilled(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    check_fixed(sampling, _FIXED)
    check_frames_from_image(checkpoint, sampling)


def _check_from_video(_: CheckedCheckpoint, sampling: Any) -> None:
    check_video_frames(sampling)
    given = sampling.video_frames
    require(
        given < sampling.frames,
        f"`num_frames` must be above `video_frames` {given}, got {sampling.frames}: the clip "
        "begins with `video_frames` frames of the video, and at least one new frame must follow",
        "raise `num_frames`, or lower `video_frames`",
        frames=sampling.frames,
        above=given,
    )


def _video_arguments(frames: Any, sampling: Any) -> dict[str, Any]:
    """Return the arguments of Cosmos 3's pipeline for the video that a clip continues.

    The arguments are the video's frames, and the indices of the latent frames that show the video.
    """
    num_latents = (sampling.video_frames - 1) // sampling.frames_unit + 1
    return {"video": frames, "condition_frame_indexes_vision": tuple(range(num_latents))}


_MODULAR = ModularSpec(
    blocks=("Cosmos3OmniBlocks",),
    guiders={},
    has_batch=False,
    rewritten=frozenset(
        {
            *("vision_tokens", "vision_timesteps", "velocity_vision"),
            *("sound_tokens", "sound_timesteps"),
        }
    ),
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
    modular=_MODULAR,
    checkpoint_facts=_checkpoint_facts,
    check_sampling=check_frames_from_image,
)

COSMOS3_FROM_VIDEO = replace(
    COSMOS3,
    sampling=Cosmos3FromVideoSampling,
    title="Cosmos 3, continuing a video, modular",
    text_pipeline=None,
    image_arguments=_video_arguments,
    aliases=("Cosmos3OmniModularPipeline",),
    text_and_image=False,
    check_sampling=_check_from_video,
)

COSMOS3_SOUND = replace(
    COSMOS3,
    sampling=Cosmos3SoundSampling,
    title="Cosmos 3 with sound, modular",
    aliases=("Cosmos3OmniModularPipeline",),
    decode_components=("vae", "sound_tokenizer"),
    component_classes={
        **COSMOS3.component_classes,
        "sound_tokenizer": "Cosmos3AVAEAudioTokenizer",
    },
    audio_rate=lambda pipe: int(pipe.sound_sampling_rate),
    checkpoint_facts=_sound_facts,
    call_arguments=lambda _: {"enable_sound": True},
    modular=replace(_MODULAR, audio="sound"),
)

COSMOS3_DISTILLED = replace(
    COSMOS3,
    sampling=Cosmos3DistilledSampling,
    title="Cosmos 3, distilled, modular",
    example="nvidia/Cosmos3-Super-Image2Video-4Step",
    text_pipeline="Cosmos3DistilledModularPipeline",
    image_pipeline="Cosmos3DistilledModularPipeline",
    schedulers=("FlowMatchEulerDiscreteScheduler",),
    steps_use_generator=True,
    branches=None,
    checkpoint_facts=_distilled_facts,
    check_sampling=_check_distilled,
    modular=replace(_MODULAR, blocks=("Cosmos3DistilledBlocks",)),
)

FAMILIES = (COSMOS3, COSMOS3_SOUND, COSMOS3_FROM_VIDEO, COSMOS3_DISTILLED)
