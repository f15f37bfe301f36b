"""Sampling parameters and specs of Wan 2.1 and 2.2, Wan VACE and Wan Animate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.guiders import GUIDER_CLASSES_WITH_SKIPS, check_guiders
from svdpp.config.families.spec import (
    FLOW_SCHEDULERS,
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
    two_images,
)
from svdpp.config.families.strength import STRENGTH, all_steps, check_strength
from svdpp.config.limits import require, shown
from svdpp.config.sampling import MAX_GUIDANCE, Param, PromptedSampling


@dataclass(frozen=True, kw_only=True)
class WanBaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of Wan share, with the most common defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    own: ClassVar[Mapping[str, Param]] = {
        "guidance_scale_2": Param(
            highest=MAX_GUIDANCE,
            help="Guidance scale in the steps of the low-noise expert.",
            shown_default="guidance_scale",
        ),
        "flow_shift": Param(
            highest=100.0,
            help="Shift of the noise levels, such as 3 at 480p and 5 at 720p.",
            excludes_lowest=True,
            shown_default="that of the model's scheduler",
        ),
    }

    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: float = 16
    """Frames per second of the video file; the model does not use it."""
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    max_sequence_length: int = 512


@dataclass(frozen=True, kw_only=True)
class WanSampling(WanBaseSampling):
    """Sampling parameters of `WanPipeline` and `WanImageToVideoPipeline`, with their defaults."""

    family: Literal["wan"] = "wan"


@dataclass(frozen=True, kw_only=True)
class WanReferenceSampling(WanBaseSampling):
    """Sampling parameters that pipelines of Wan VACE share for clips with or without references.

    A reference is an image of what the clip shows, such as a person. It is not a frame of the clip.
    """

    keeps_image_shape: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {
        **WanBaseSampling.own,
        "conditioning_scale": Param(highest=10, help="Weight of the reference image."),
    }

    conditioning_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WanControlSampling(WanBaseSampling):
    """Sampling parameters that pipelines of Wan VACE share for clips that a video controls."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {
        **WanBaseSampling.own,
        "conditioning_scale": Param(highest=10, help="Weight of the control video."),
    }

    conditioning_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WanVaceSampling(WanReferenceSampling):
    """Sampling parameters of diffusers' `WanVACEPipeline` for clips with a reference image."""

    family: Literal["wan_vace"] = "wan_vace"


@dataclass(frozen=True, kw_only=True)
class WanVaceControlSampling(WanControlSampling):
    """Sampling parameters of diffusers' `WanVACEPipeline` for clips that a video controls."""

    family: Literal["wan_vace_control"] = "wan_vace_control"


@dataclass(frozen=True, kw_only=True)
class WanFromVideoSampling(WanBaseSampling):
    """Sampling parameters of diffusers' `WanVideoToVideoPipeline`, with its defaults."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {**WanBaseSampling.own, "strength": STRENGTH}

    family: Literal["wan_v2v"] = "wan_v2v"
    num_inference_steps: int = 40
    strength: float = 0.8


@dataclass(frozen=True, kw_only=True)
class WanSegmentSampling(WanBaseSampling):
    """Sampling parameters of diffusers' `WanAnimatePipeline` for clips of one segment.

    The pipeline makes a longer clip in several segments, which svdpp does not support.
    """

    num_inference_steps: int = 20
    height: int = 720
    width: int = 1280
    num_frames: int = 77
    fps: float = 30
    guidance_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WanAnimateSampling(WanSegmentSampling):
    """Sampling parameters of Wan Animate in the mode that animates the image's character."""

    videos: ClassVar[Mapping[str, int | None]] = {"pose_video": None, "face_video": 512}

    family: Literal["wan_animate"] = "wan_animate"


@dataclass(frozen=True, kw_only=True)
class WanReplaceSampling(WanSegmentSampling):
    """Sampling parameters of Wan Animate in the mode that replaces the character of a video."""

    videos: ClassVar[Mapping[str, int | None]] = {
        "pose_video": None,
        "face_video": 512,
        "background_video": None,
        "mask_video": None,
    }

    family: Literal["wan_replace"] = "wan_replace"


@dataclass(frozen=True, kw_only=True)
class WanModularSampling(WanBaseSampling):
    """Sampling parameters of `WanModularPipeline` and `WanImage2VideoModularPipeline`."""

    family: Literal["wan_modular"] = "wan_modular"


@dataclass(frozen=True, kw_only=True)
class Wan22ModularSampling(WanBaseSampling):
    """Sampling parameters of `Wan22ModularPipeline` and `Wan22Image2VideoModularPipeline`."""

    family: Literal["wan22_modular"] = "wan22_modular"


@dataclass(frozen=True, kw_only=True)
class Wan22VaceModularSampling(WanReferenceSampling):
    """Sampling parameters of `Wan22VaceModularPipeline` for clips with a reference image."""

    family: Literal["wan22_vace_modular"] = "wan22_vace_modular"


@dataclass(frozen=True, kw_only=True)
class Wan22VaceControlModularSampling(WanControlSampling):
    """Sampling parameters of `Wan22VaceModularPipeline` for clips that a video controls."""

    family: Literal["wan22_vace_control_modular"] = "wan22_vace_control_modular"


_TWO_IMAGES = "is set only for models with a first and a last image"
#: Family that runs a model with one denoiser, by the class of the denoiser. An error names this
#: family if a user chose a family for models with two denoisers (experts).
_ONE_EXPERT = {"WanTransformer3DModel": "wan_modular", "WanVACETransformer3DModel": "wan_vace"}
#: Largest side of a patch that the denoiser may have, in positions of the latent.
_MAX_PATCH = 64
#: Value of `boundary_ratio` that diffusers' modular pipelines use if the checkpoint's index does
#: not set it.
_MODULAR_BOUNDARY = 0.875


def image_projection(configs: CheckpointConfigs) -> CheckpointFacts:
    """Return `has_image_projection`: whether Wan's denoiser has layers for an image's embedding.

    svdpp needs this fact to check LoRAs: diffusers silently ignores LoRA tensors for these layers
    if the denoiser lacks them.
    """
    transformer = configs.of("transformer", image_dim=None)
    return {"has_image_projection": transformer.values["image_dim"] is not None}


def last_image_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    """Return `last_image_use`: whether clips of a Wan checkpoint need or refuse a last image.

    If a last image is refused, the result also has `last_image_reason`, for the error message. If
    the denoiser embeds no image, the result is empty, so that the default applies: a last image is
    optional if the family takes one.
    """
    if configs.index.values.get("expand_timesteps"):
        reason = "diffusers ignores the image for a model with expand_timesteps, such as Wan 2.2 5B"
        return {"last_image_use": "refused", "last_image_reason": reason}
    transformer = configs.of("transformer", image_dim=None, pos_embed_seq_len=None)
    if transformer.values["image_dim"] is None:
        transformer.refuse("pos_embed_seq_len", _TWO_IMAGES)
        return {}
    if transformer.values["pos_embed_seq_len"] is not None:
        return {"last_image_use": "needed"}
    reason = (
        "its denoiser embeds only one image (it lacks pos_embed_seq_len, which Wan2.1-FLF2V has)"
    )
    return {"last_image_use": "refused", "last_image_reason": reason}


def _wan_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    return {**_checkpoint_facts(configs), **last_image_facts(configs)}


def _facts_of_one_image(configs: CheckpointConfigs) -> CheckpointFacts:
    configs.of("transformer").refuse("pos_embed_seq_len", _TWO_IMAGES)
    return _checkpoint_facts(configs)


def size_multiple(configs: CheckpointConfigs) -> tuple[int, int]:
    """Return the height and the width of one patch of Wan's denoiser, in pixels.

    A clip's height must be a multiple of the patch's height, and its width of the patch's width.
    """
    vae = configs.of("vae", scale_factor_spatial=8)
    unit = vae.positive_int("scale_factor_spatial", 64)
    transformer = configs.of("transformer", patch_size=[1, 2, 2])
    patch = transformer.values["patch_size"]
    if not (isinstance(patch, list) and len(patch) == 3 and all(map(_is_patch_side, patch))):
        raise transformer.error(
            f"patch_size is {shown(patch)}, not three numbers from 1 to {_MAX_PATCH}",
            details={"patch_size": shown(patch), "count": 3, "lowest": 1, "highest": _MAX_PATCH},
        )
    return unit * patch[1], unit * patch[2]


def _is_patch_side(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_PATCH


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    index, has_second = configs.index, "transformer_2" in configs.classes
    ratio = index.values.get("boundary_ratio")
    is_ratio = isinstance(ratio, float) and 0 < ratio < 1
    if not (is_ratio if has_second else ratio is None):
        state = "there" if has_second else "missing"
        message = f"boundary_ratio is {shown(ratio)}, but the expert transformer_2 is {state}"
        raise index.error(message, details={"boundary_ratio": shown(ratio)})
    return {
        "boundary_ratio": ratio,
        "size_multiple": size_multiple(configs),
        "unused_parameters": () if has_second else ("guidance_scale_2",),
        **image_projection(configs),
        **({"image_use": "optional"} if index.values.get("expand_timesteps") else {}),
    }


def _modular_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    index = configs.index
    if index.values.get("boundary_ratio") is not None:
        raise index.error(
            "boundary_ratio is set, so the model has two experts, but this family has only one",
            "use `family` wan22_modular",
            details={"boundary_ratio": shown(index.values["boundary_ratio"])},
        )
    found = _common_modular_facts(configs, "guider")
    return {**found, "unused_parameters": ("guidance_scale_2",)}


def _modular_facts_of_two_experts(configs: CheckpointConfigs) -> CheckpointFacts:
    index = configs.index
    if "transformer_2" not in configs.classes:
        raise index.error(
            "the expert transformer_2 is missing",
            "for a model with one denoiser, use `family` "
            f"{_ONE_EXPERT[configs.classes['transformer']]}",
            details={"component": "transformer_2"},
        )
    ratio = index.values.get("boundary_ratio", _MODULAR_BOUNDARY)
    if not (isinstance(ratio, float) and 0 < ratio < 1):
        message = f"boundary_ratio is {shown(ratio)}, not a number between 0 and 1"
        details = {"boundary_ratio": shown(ratio), "above": 0, "below": 1}
        raise index.error(message, details=details)
    return {**_common_modular_facts(configs, "guider", "guider_2"), "boundary_ratio": ratio}


def _common_modular_facts(configs: CheckpointConfigs, *guiders: str) -> CheckpointFacts:
    check_guiders(configs, *guiders)
    configs.index.refuse(
        "expand_timesteps",
        "is set only for Wan 2.2 5B, which diffusers' modular pipelines do not run",
    )
    configs.of("transformer").refuse("pos_embed_seq_len", _TWO_IMAGES)
    return {"size_multiple": size_multiple(configs), **image_projection(configs)}


def _facts_from_video(configs: CheckpointConfigs) -> CheckpointFacts:
    found = _facts_of_one_image(configs)
    if "image_use" in found or found["boundary_ratio"] is not None:
        raise configs.index.error(
            "only Wan 2.1 checkpoints for clips from text can make clips from a video"
        )
    return found


def check_first_timesteps(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    """Raise a `RequestError` if the first two timesteps of a clip are equal.

    UniPC rounds timesteps to integers. If the first two are equal, diffusers' schedulers start at
    the second one, and fail at the last step. Pipelines that call `scheduler.set_begin_index` do
    not need this check.

    Args:
        checkpoint: Checkpoint, whose scheduler gives the timesteps.
        sampling: Resolved sampling parameters of the clip.

    Raises:
        RequestError: The first two timesteps are equal.
    """
    timesteps = checkpoint.timesteps(sampling).tolist()
    lower_shift = ", or use a lower `flow_shift`" if hasattr(sampling, "flow_shift") else ""
    require(
        len(timesteps) == 1 or timesteps[0] != timesteps[1],
        f"the first two of {len(timesteps)} steps have the same timestep, {timesteps[0]}: "
        "diffusers cannot run that",
        f"use fewer `num_inference_steps`{lower_shift}",
        steps=len(timesteps),
        timestep=timesteps[0],
    )


def _check_sampling(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    if sampling.from_image:  # clips from text need no check: their pipeline calls `set_begin_index`
        check_first_timesteps(checkpoint, sampling)


def _check_from_video(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    check_strength(checkpoint, sampling)
    check_first_timesteps(checkpoint, sampling)


def vae_channels(pipe: Any) -> int:
    """Return the number of channels of Wan's latent, from the VAE's config.

    The denoiser's `in_channels` cannot be used: for clips from an image, it includes the image's
    channels.

    Args:
        pipe: Pipeline of diffusers.
    """
    return int(pipe.vae.config.z_dim)


def _check_two_guiders(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    check_first_timesteps(checkpoint, sampling)
    second = sampling.guidance_scale_2
    require(
        sampling.guidance_scale != 1 or second in (None, 1),
        f"`guidance_scale` 1 with `guidance_scale_2` {second} is not possible: "
        "without guidance in the first steps, diffusers encodes no negative prompt",
        "raise `guidance_scale` above 1, or leave `guidance_scale_2` out",
        guidance_scale=sampling.guidance_scale,
        guidance_scale_2=second,
    )


def _frames_with_image(_: Any, sampling: Any, frames: int) -> int:
    """Return the number of frames of Wan's latent, including those of images.

    The input image, if there is one, and each reference add one latent frame to `frames`.
    """
    return frames + int(sampling.from_image) + int(sampling.num_references)


def _frames_with_references(_: Any, sampling: Any, frames: int) -> int:
    """Return the number of frames of Wan's latent: `frames`, and one for each reference image."""
    return frames + int(sampling.num_references)


WAN = FamilySpec(
    sampling=WanSampling,
    title="Wan 2.1 and 2.2",
    example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    license="Apache-2.0",
    denoiser="WanTransformer3DModel",
    gguf=True,
    text_pipeline="WanPipeline",
    image_pipeline="WanImageToVideoPipeline",
    last_image_arguments=two_images,
    schedulers=FLOW_SCHEDULERS,
    denoisers=("transformer", "transformer_2"),
    fp32_components=frozenset({"vae", "image_encoder"}),
    loras_as_wan=True,
    branches="calls",
    latent_channels=vae_channels,
    latent_dtype="stepped",
    checkpoint_facts=_wan_facts,
    check_sampling=_check_sampling,
    decodes_in_tiles=True,
)

WAN_VACE = replace(
    WAN,
    sampling=WanVaceSampling,
    title="Wan VACE, whose image is a reference",
    example="Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    denoiser="WanVACETransformer3DModel",
    text_pipeline="WanVACEPipeline",
    image_pipeline="WanVACEPipeline",
    references_argument="reference_images",
    max_references=7,
    last_image_arguments=None,
    checkpoint_facts=_facts_of_one_image,
    check_sampling=check_first_timesteps,
    text_and_image=True,
    encode_components=("tokenizer", "text_encoder", "vae"),
    latent_frames=_frames_with_image,
)

WAN_VACE_CONTROL = replace(
    WAN_VACE,
    sampling=WanVaceControlSampling,
    title="Wan VACE, controlled by a video",
    text_pipeline=None,
    image_argument="video",
    aliases=("WanVACEPipeline",),
    text_and_image=False,
    latent_frames=_frames_with_references,
)

WAN_FROM_VIDEO = replace(
    WAN,
    sampling=WanFromVideoSampling,
    title="Wan 2.1 from a video",
    text_pipeline=None,
    image_pipeline="WanVideoToVideoPipeline",
    last_image_arguments=None,
    image_argument="video",
    aliases=("WanPipeline",),
    checkpoint_facts=_facts_from_video,
    check_sampling=_check_from_video,
    call_arguments=all_steps,
)

WAN_ANIMATE = replace(
    WAN,
    sampling=WanAnimateSampling,
    title="Wan Animate, whose character moves as the one in videos",
    example="Wan-AI/Wan2.2-Animate-14B-Diffusers",
    denoiser="WanAnimateTransformer3DModel",
    text_pipeline=None,
    image_pipeline="WanAnimatePipeline",
    last_image_arguments=None,
    checkpoint_facts=_facts_of_one_image,
    renamed_arguments={"segment_frame_length": "num_frames"},
    record_uses={
        # Call 1 (from 0) of this method returns the face video. The steps use only this result.
        "video_processor.preprocess_video": 1,
        "video_processor_for_mask.preprocess_video": "unused",
        "vae_image_processor.preprocess": "unused",
    },
    # The pipeline decodes each segment before it starts the next one, so ranks cannot split the
    # steps of several segments.
    frame_limits=(5, 77, "one segment of the model"),
    latent_frames=_frames_with_image,
    decodes_in_tiles=False,  # each segment is decoded within the denoising loop
)

WAN_REPLACE = replace(
    WAN_ANIMATE,
    sampling=WanReplaceSampling,
    title="Wan Animate, whose character replaces the one in a video",
    aliases=("WanAnimatePipeline",),
    call_arguments=lambda _: {"mode": "replace"},
)

WAN_MODULAR = replace(
    WAN,
    sampling=WanModularSampling,
    title="Wan 2.1, modular",
    aliases=("WanPipeline", "WanImageToVideoPipeline"),
    text_aliases=("WanPipeline",),
    size_from_image=True,
    # A last image is not supported, because the pipeline would need torchvision for it.
    last_image_arguments=None,
    gguf=False,
    loras=False,
    loras_as_wan=False,
    denoisers=("transformer",),
    component_classes={"guider": GUIDER_CLASSES_WITH_SKIPS},
    text_pipeline="WanModularPipeline",
    image_pipeline="WanImage2VideoModularPipeline",
    branches="replay",
    latent_dtype="fp32",
    decodes_in_tiles=False,
    modular=ModularSpec(blocks=("WanBlocks", "WanImage2VideoAutoBlocks")),
    checkpoint_facts=_modular_facts,
    check_sampling=check_first_timesteps,
)

WAN22_MODULAR = replace(
    WAN_MODULAR,
    sampling=Wan22ModularSampling,
    title="Wan 2.2 with two experts, modular",
    example="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    denoisers=("transformer", "transformer_2"),
    component_classes=dict.fromkeys(("guider", "guider_2"), GUIDER_CLASSES_WITH_SKIPS),
    text_pipeline="Wan22ModularPipeline",
    image_pipeline="Wan22Image2VideoModularPipeline",
    modular=ModularSpec(
        blocks=("Wan22Blocks", "Wan22Image2VideoBlocks"),
        guiders={"guider": "guidance_scale", "guider_2": "guidance_scale_2"},
    ),
    checkpoint_facts=_modular_facts_of_two_experts,
    check_sampling=_check_two_guiders,
)

WAN22_VACE_MODULAR = replace(
    WAN22_MODULAR,
    sampling=Wan22VaceModularSampling,
    title="Wan 2.2 VACE with two experts, modular, whose image is a reference",
    example="linoyts/Wan2.2-VACE-Fun-14B-diffusers",
    denoiser="WanVACETransformer3DModel",
    text_pipeline="Wan22VaceModularPipeline",
    image_pipeline="Wan22VaceModularPipeline",
    references_argument="reference_images",
    max_references=7,
    aliases=("WanVACEPipeline",),
    text_aliases=(),
    size_from_image=False,
    text_and_image=True,
    encode_components=("tokenizer", "text_encoder", "vae"),
    latent_frames=_frames_with_image,
    modular=ModularSpec(
        blocks=("Wan22VaceBlocks",),
        guiders={"guider": "guidance_scale", "guider_2": "guidance_scale_2"},
    ),
)

WAN22_VACE_CONTROL_MODULAR = replace(
    WAN22_VACE_MODULAR,
    sampling=Wan22VaceControlModularSampling,
    title="Wan 2.2 VACE with two experts, modular, controlled by a video",
    text_pipeline=None,
    image_argument="video",
    aliases=("Wan22VaceModularPipeline", "WanVACEPipeline"),
    text_and_image=False,
    latent_frames=_frames_with_references,
)

FAMILIES = (
    WAN,
    WAN_VACE,
    WAN_VACE_CONTROL,
    WAN_FROM_VIDEO,
    WAN_ANIMATE,
    WAN_REPLACE,
    WAN_MODULAR,
    WAN22_MODULAR,
    WAN22_VACE_MODULAR,
    WAN22_VACE_CONTROL_MODULAR,
)
