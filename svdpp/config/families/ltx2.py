"""Sampling parameters and specs of LTX-2: video with sound from text, images or a video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.ltx import check_vae
from svdpp.config.families.spec import (
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import MAX_GUIDANCE, Param, PromptedSampling


@dataclass(frozen=True, kw_only=True)
class Ltx2BaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of LTX-2 share, with their defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"
    own: ClassVar[Mapping[str, Param]] = {
        "stg_scale": Param(
            highest=MAX_GUIDANCE, help="Scale of the video's spatio-temporal guidance; 0 is off."
        ),
        "stg_block": Param(
            highest=1000,
            help="Index of the transformer block that spatio-temporal guidance perturbs.",
            kind=int,
        ),
        "modality_scale": Param(
            highest=MAX_GUIDANCE, help="Scale of the video's guidance by the audio; 1 is off."
        ),
        "guidance_rescale": Param(
            highest=1, help="How much the guided video is rescaled; 0 is off."
        ),
        "audio_guidance_scale": Param(
            highest=MAX_GUIDANCE, help="Scale of the audio's guidance by the prompt; 1 is off."
        ),
        "audio_stg_scale": Param(
            highest=MAX_GUIDANCE, help="Scale of the audio's spatio-temporal guidance; 0 is off."
        ),
        "audio_modality_scale": Param(
            highest=MAX_GUIDANCE, help="Scale of the audio's guidance by the video; 1 is off."
        ),
        "audio_guidance_rescale": Param(
            highest=1, help="How much the guided audio is rescaled; 0 is off."
        ),
    }

    num_inference_steps: int = 30
    height: int = 512
    width: int = 768
    num_frames: int = 121
    fps: float = 24
    guidance_scale: float = 3.0
    max_sequence_length: int = 1024
    stg_scale: float = 1.0
    stg_block: int = 28
    modality_scale: float = 3.0
    guidance_rescale: float = 0.7
    audio_guidance_scale: float = 7.0
    audio_stg_scale: float = 1.0
    audio_modality_scale: float = 3.0
    audio_guidance_rescale: float = 0.7


@dataclass(frozen=True, kw_only=True)
class Ltx2Sampling(Ltx2BaseSampling):
    """Sampling parameters of `LTX2Pipeline` and `LTX2ImageToVideoPipeline`, with their defaults."""

    family: Literal["ltx2"] = "ltx2"


@dataclass(frozen=True, kw_only=True)
class Ltx2ConditionSampling(Ltx2BaseSampling):
    """Sampling parameters of diffusers' `LTX2ConditionPipeline`, with its defaults."""

    crops_image: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {
        **Ltx2BaseSampling.own,
        "strength": Param(
            highest=1,
            help="How closely the first or last frame follows its image; 0 is not at all.",
        ),
    }

    family: Literal["ltx2_condition"] = "ltx2_condition"
    strength: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Ltx2ReferenceSampling(Ltx2BaseSampling):
    """Sampling parameters that all families with `LTX2InContextPipeline` share.

    Their clips have a reference: an image or a video to which the denoiser attends in every step.
    """

    own: ClassVar[Mapping[str, Param]] = {
        **Ltx2BaseSampling.own,
        "reference_strength": Param(
            highest=1,
            help="Strength of the reference; at 0 the model sees only noise, at 1 no noise.",
        ),
        "reference_downscale_factor": Param(
            lowest=1,
            highest=8,
            kind=int,
            help="Factor by which the reference's height and width are smaller than the clip's.",
        ),
        "conditioning_attention_strength": Param(
            highest=1, help="How much clip and reference attend to each other; 0 is not at all."
        ),
    }

    reference_strength: float = 1.0
    reference_downscale_factor: int = 1
    conditioning_attention_strength: float = 1.0

    @property
    def reference_frames(self) -> int:
        """Number of frames of LTX-2's reference, which is a video as long as the clip."""
        return self.num_frames


@dataclass(frozen=True, kw_only=True)
class Ltx2InContextSampling(Ltx2ReferenceSampling):
    """Sampling parameters of `LTX2InContextPipeline` for clips whose image is a reference."""

    crops_image: ClassVar[bool] = True

    family: Literal["ltx2_in_context"] = "ltx2_in_context"

    @property
    def reference_frames(self) -> int:
        """Number of frames of LTX-2's reference, which is an image: 1."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Ltx2InContextVideoSampling(Ltx2ReferenceSampling):
    """Sampling parameters of `LTX2InContextPipeline` for clips whose video is a reference."""

    from_video: ClassVar[bool] = True

    family: Literal["ltx2_in_context_video"] = "ltx2_in_context_video"


@dataclass(frozen=True, kw_only=True)
class Ltx2InContextFirstImageSampling(Ltx2ReferenceSampling):
    """Sampling parameters of `LTX2InContextPipeline` for a first image and a reference video."""

    crops_image: ClassVar[bool] = True
    videos: ClassVar[Mapping[str, int | None]] = {"reference_video": None}
    own: ClassVar[Mapping[str, Param]] = {
        **Ltx2ReferenceSampling.own,
        "strength": Ltx2ConditionSampling.own["strength"],
    }

    family: Literal["ltx2_in_context_first_image"] = "ltx2_in_context_first_image"
    strength: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Ltx2ModularSampling(Ltx2BaseSampling):
    """Sampling parameters of diffusers' `LTX2ModularPipeline`, with its defaults."""

    family: Literal["ltx2_modular"] = "ltx2_modular"
    width: int = 704

    @property
    def step_axes(self) -> str:
        """Axes of the latent after a step, one letter each, as in `latent_axes`.

        Before step 0, the latent has the axes `latent_axes`, where N is one axis for all positions.
        For clips from an image, each step returns a latent with separate axes for frames, height
        and width instead of N.
        """
        return "BCFHW" if self.from_image else self.latent_axes


@dataclass(frozen=True)
class VideoCondition:
    """Image that an LTX-2 clip shows at one frame, with the fields of `LTX2VideoCondition`."""

    frames: Any
    """PIL image that the clip shows."""
    index: int
    """Index of the frame in the latent; -1: the last frame."""
    strength: float
    """Weight of the image: 0 (no effect) to 1 (the frame is the image)."""
    crf: int = 0
    """Rate factor (crf) of an H.264 compression of the image. 0: no compression, so that PyAV is
    not needed."""


@dataclass(frozen=True)
class ReferenceCondition:
    """Image or video that LTX-2 attends to, with the fields of `LTX2ReferenceCondition`."""

    frames: Any
    """PIL image, or the list of a video's PIL images."""
    strength: float
    """Strength of the reference: 0 (the denoiser sees only noise) to 1 (the denoiser sees the
    reference without noise)."""


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    if check_vae(configs):
        raise configs.of("vae").error(
            "timestep_conditioning is true, so the decode draws noise, which svdpp does not support"
        )
    return {}


def _condition_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    configs.index.refuse(
        "audio_scheduler", "gives the sound a schedule of its own, with which svdpp is not tested"
    )
    return _checkpoint_facts(configs)


def _guidance_arguments(sampling: Any) -> dict[str, Any]:
    has_stg = sampling.stg_scale > 0 or sampling.audio_stg_scale > 0
    return {"spatio_temporal_guidance_blocks": [sampling.stg_block] if has_stg else None}


def _image_arguments(sampling: Any) -> dict[str, Any]:
    # Without this argument, diffusers would first compress the input image with H.264, which needs
    # PyAV.
    return {"image_crf": 0} if sampling.from_image else {}


def _call_arguments(sampling: Any) -> dict[str, Any]:
    return {**_guidance_arguments(sampling), **_image_arguments(sampling)}


LTX2 = FamilySpec(
    sampling=Ltx2Sampling,
    title="LTX-2",
    example="Lightricks/LTX-2",
    license="LTX-2 Community License",
    denoiser="LTX2VideoTransformer3DModel",
    gguf=True,
    text_pipeline="LTX2Pipeline",
    image_pipeline="LTX2ImageToVideoPipeline",
    text_and_image=True,
    encode_components=("tokenizer", "text_encoder", "connectors"),
    decode_components=("vae", "audio_vae", "vocoder"),
    component_classes={
        "audio_vae": r"AutoencoderKLLTX2Audio",
        "connectors": r"LTX2TextConnectors",
        "vocoder": r"LTX2Vocoder(WithBWE)?",
    },
    pipeline_package="ltx2",
    record_uses={"encode_prompt": "unused", "prepare_audio_latents": "first step"},
    initial_latent_source="latents",
    num_results_equal_latents=1,
    checkpoint_facts=_checkpoint_facts,
    renamed_arguments={"frame_rate": "fps"},
    call_arguments=_call_arguments,
    decodes_in_tiles=True,
)


def _first_condition(image: Any, sampling: Any) -> dict[str, Any]:
    return {"conditions": [VideoCondition(image, 0, sampling.strength)]}


def _two_conditions(first: Any, last: Any, sampling: Any) -> dict[str, Any]:
    strength = sampling.strength
    return {"conditions": [VideoCondition(first, 0, strength), VideoCondition(last, -1, strength)]}


LTX2_CONDITION = replace(
    LTX2,
    sampling=Ltx2ConditionSampling,
    title="LTX-2, whose images are conditions",
    text_pipeline="LTX2ConditionPipeline",
    image_pipeline="LTX2ConditionPipeline",
    image_arguments=_first_condition,
    last_image_arguments=_two_conditions,
    aliases=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    initial_latent_source=None,
    checkpoint_facts=_condition_facts,
    call_arguments=_guidance_arguments,
    latent_frames=lambda _, sampling, frames: frames + sampling.has_last_image,
)


def _reference(frames: Any, sampling: Any) -> dict[str, Any]:
    return {"reference_conditions": [ReferenceCondition(frames, sampling.reference_strength)]}


def _first_image_and_reference(source: Any, sampling: Any) -> dict[str, Any]:
    return {
        **_first_condition(source["image"], sampling),
        **_reference(source["reference_video"], sampling),
    }


def _check_reference(_: CheckedCheckpoint, sampling: Any) -> None:
    factor = sampling.reference_downscale_factor
    unit = sampling.side_unit * factor
    for name in ("height", "width"):
        side = getattr(sampling, name)
        require(
            side % unit == 0,
            f"`{name}` must be a multiple of {unit} with `reference_downscale_factor` {factor}, "
            f"got {side}",
            field=name,
            value=side,
            unit=unit,
            reference_downscale_factor=factor,
        )


def _reference_positions(pipe: Any, sampling: Any) -> int:
    """Return how many positions LTX-2's reference adds at the end of the clip's latent."""
    factor = sampling.reference_downscale_factor * pipe.vae_spatial_compression_ratio
    frames = (sampling.reference_frames - 1) // pipe.vae_temporal_compression_ratio + 1
    return int(frames * (sampling.height // factor) * (sampling.width // factor))


LTX2_IN_CONTEXT = replace(
    LTX2_CONDITION,
    sampling=Ltx2InContextSampling,
    title="LTX-2 in context, whose image is a reference",
    text_pipeline=None,
    image_pipeline="LTX2InContextPipeline",
    text_and_image=False,
    # Every rank computes this mask itself, because the mask is too large to send: it has one number
    # for each pair of positions of the clip and the reference.
    record_uses={**LTX2.record_uses, "_build_video_self_attention_mask": "recomputed"},
    image_arguments=_reference,
    last_image_arguments=None,
    check_sampling=_check_reference,
    latent_frames=lambda _, __, frames: frames,
    appended_positions=_reference_positions,
)

LTX2_IN_CONTEXT_VIDEO = replace(
    LTX2_IN_CONTEXT,
    sampling=Ltx2InContextVideoSampling,
    title="LTX-2 in context, whose video is a reference",
    aliases=(*LTX2_IN_CONTEXT.aliases, "LTX2InContextPipeline"),
)

LTX2_IN_CONTEXT_FIRST_IMAGE = replace(
    LTX2_IN_CONTEXT_VIDEO,
    sampling=Ltx2InContextFirstImageSampling,
    title="LTX-2 in context, from a first image and a reference video",
    image_arguments=_first_image_and_reference,
)


def _guider_configs(sampling: Any) -> dict[str, dict[str, Any]]:
    return {
        "guider": {
            "stg_scale": sampling.stg_scale,
            "spatio_temporal_guidance_blocks": [sampling.stg_block],
            "modality_scale": sampling.modality_scale,
            "guidance_rescale": sampling.guidance_rescale,
        },
        "audio_guider": {
            "stg_scale": sampling.audio_stg_scale,
            "modality_scale": sampling.audio_modality_scale,
            "guidance_rescale": sampling.audio_guidance_rescale,
        },
    }


def _check_modular(_: object, sampling: Any) -> None:
    least = sampling.frames_unit + 1
    require(
        not sampling.from_image or sampling.num_frames >= least,
        f"`num_frames` of a clip from an image must be at least {least}, got "
        f"{sampling.num_frames}: the image is the first frame, and steps make only later ones",
        frames=sampling.num_frames,
        lowest=least,
    )


LTX2_MODULAR = replace(
    LTX2,
    sampling=Ltx2ModularSampling,
    title="LTX-2, modular",
    text_pipeline="LTX2ModularPipeline",
    image_pipeline="LTX2ModularPipeline",
    aliases=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    gguf=False,
    loras=False,
    record_uses={},
    initial_latent_source=None,
    num_results_equal_latents=0,
    branches="replay",
    # In clips from an image, the steps get a latent without the first frame, which is the image.
    latent_frames=lambda _, sampling, frames: frames - sampling.from_image,
    check_sampling=_check_modular,
    call_arguments=_image_arguments,
    decodes_in_tiles=False,
    modular=ModularSpec(
        blocks=("LTX2AutoBlocks",),
        audio="audio",
        guiders={"guider": "guidance_scale", "audio_guider": "audio_guidance_scale"},
        guider_configs=_guider_configs,
    ),
)

FAMILIES = (
    LTX2,
    LTX2_CONDITION,
    LTX2_IN_CONTEXT,
    LTX2_IN_CONTEXT_VIDEO,
    LTX2_IN_CONTEXT_FIRST_IMAGE,
    LTX2_MODULAR,
)
