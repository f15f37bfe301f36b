"""Sampling parameters and specs of SkyReels-V2, with and without diffusion forcing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.frames import check_frames_from_image, check_video_frames
from svdpp.config.families.spec import (
    FLOW_SCHEDULERS,
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    two_images,
)
from svdpp.config.families.wan import (
    check_first_timesteps,
    image_projection,
    last_image_facts,
    size_multiple,
    vae_channels,
)
from svdpp.config.limits import MAX_FRAMES, require
from svdpp.config.sampling import VIDEO_FRAMES, Param, PromptedSampling

# Largest number of frames that the pipelines make in one denoising loop: their `base_num_frames`.
_LOOP_FRAMES = 97


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2BaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of SkyReels-V2 share, with their defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4

    height: int = 544
    width: int = 960
    num_frames: int = 97
    fps: float = 24
    guidance_scale: float = 6.0
    max_sequence_length: int = 512


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2Sampling(SkyReelsV2BaseSampling):
    """Sampling parameters of SkyReels-V2 from text or an image, with diffusers' defaults."""

    family: Literal["skyreels_v2"] = "skyreels_v2"


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2ForcingSampling(SkyReelsV2BaseSampling):
    """Sampling parameters of SkyReels-V2's diffusion forcing from text or an image."""

    family: Literal["skyreels_v2_df"] = "skyreels_v2_df"


@dataclass(frozen=True, kw_only=True)
class SkyReelsV2FromVideoSampling(SkyReelsV2BaseSampling):
    """Sampling parameters of diffusers' `SkyReelsV2DiffusionForcingVideoToVideoPipeline`.

    The clip begins with `video_frames` frames of the input video, followed by the frames that the
    pipeline generates. The first `video_frames` generated frames show the same part of the video
    again, encoded and decoded by the VAE.
    """

    # `video_frames` and the number of generated frames are each a multiple of 4 plus 1, so the
    # clip's number of frames is a multiple of 4 plus 2.
    frames_remainder: ClassVar[int] = 2
    from_video: ClassVar[bool] = True
    # The frames of the video are a part of the denoising loop. At least one latent frame (4 frames)
    # of the loop must be new.
    own: ClassVar[Mapping[str, Param]] = {
        "video_frames": replace(VIDEO_FRAMES, highest=_LOOP_FRAMES - 4)
    }

    family: Literal["skyreels_v2_df_v2v"] = "skyreels_v2_df_v2v"
    num_frames: int = 114
    video_frames: int = 17

    @property
    def generated_frames(self) -> int:
        """Number of frames that SkyReels-V2's pipeline generates: its argument `num_frames`."""
        return self.frames - self.video_frames


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    return {**_forcing_facts(configs), **last_image_facts(configs)}


def _forcing_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    return {"size_multiple": size_multiple(configs), **image_projection(configs)}


def _check_forcing(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    check_first_timesteps(checkpoint, sampling)
    check_frames_from_image(checkpoint, sampling)


def _check_from_video(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    check_first_timesteps(checkpoint, sampling)
    given, frames, unit = sampling.video_frames, sampling.frames, sampling.frames_unit
    check_video_frames(sampling)
    lowest, highest = 2 * given + unit, given + _LOOP_FRAMES
    require(
        lowest <= frames <= highest,
        f"with `video_frames` {given}, `num_frames` must be {lowest} to {highest}, got {frames}: "
        "the clip has the frames of the video twice, and then new frames",
        video_frames=given,
        frames=frames,
        lowest=lowest,
        highest=highest,
    )


SKYREELS_V2 = FamilySpec(
    sampling=SkyReelsV2Sampling,
    title="SkyReels-V2",
    example="Skywork/SkyReels-V2-T2V-14B-720P-Diffusers",
    license="Skywork License",
    denoiser="SkyReelsV2Transformer3DModel",
    gguf=True,
    text_pipeline="SkyReelsV2Pipeline",
    image_pipeline="SkyReelsV2ImageToVideoPipeline",
    last_image_arguments=two_images,
    schedulers=FLOW_SCHEDULERS,
    fp32_components=frozenset({"vae", "image_encoder"}),
    loras_as_wan=True,
    branches="calls",
    latent_channels=vae_channels,
    latent_dtype="stepped",
    checkpoint_facts=_checkpoint_facts,
    check_sampling=check_first_timesteps,
    decodes_in_tiles=True,
)

SKYREELS_V2_FORCING = replace(
    SKYREELS_V2,
    sampling=SkyReelsV2ForcingSampling,
    title="SkyReels-V2, diffusion forcing with all frames in step",
    example="Skywork/SkyReels-V2-DF-14B-720P-Diffusers",
    text_pipeline="SkyReelsV2DiffusionForcingPipeline",
    image_pipeline="SkyReelsV2DiffusionForcingImageToVideoPipeline",
    text_and_image=True,
    checkpoint_facts=_forcing_facts,
    check_sampling=_check_forcing,
    # The pipeline gives each latent frame its own timestep. `FlowMatchEulerDiscreteScheduler`
    # cannot be used, because its `step` takes only one timestep.
    schedulers=("UniPCMultistepScheduler",),
    # The pipeline writes the image's latents into the first frames. No step changes these frames,
    # so later steps can read them from the current latent.
    record_uses={"prepare_latents": "first step"},
    initial_latent_source="latents",
    # The pipeline appends the last image's latents to the latents that `prepare_latents` returns.
    latent_frames=lambda _, sampling, frames: frames + sampling.has_last_image,
    first_frames=lambda sampling: -int(sampling.has_last_image),
    # The pipeline has one scheduler for each latent frame, and writes the results of all schedulers
    # into the latent. The number 1000 stands for all schedulers: it is larger than any number of
    # latent frames.
    num_results_equal_latents=1_000,
    frame_limits=(1, _LOOP_FRAMES, "as longer clips need several denoising loops"),
)

SKYREELS_V2_FROM_VIDEO = replace(
    SKYREELS_V2_FORCING,
    sampling=SkyReelsV2FromVideoSampling,
    title="SkyReels-V2, diffusion forcing, continuing a video",
    text_pipeline=None,
    image_pipeline="SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    image_argument="video",
    last_image_arguments=None,
    text_and_image=False,
    aliases=(
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    ),
    # Call 0 of `preprocess_video` returns the frames of the video. The decode puts them before the
    # frames that it decodes.
    record_uses={**SKYREELS_V2_FORCING.record_uses, "video_processor.preprocess_video": 0},
    latent_frames=lambda _, sampling, frames: (
        frames - sampling.video_frames // sampling.frames_unit
    ),
    first_frames=lambda _: 0,
    decodes_in_tiles=False,  # a decode is not only a call of the VAE: it adds frames of the video
    frame_limits=(1, MAX_FRAMES, "the limits of svdpp"),
    check_sampling=_check_from_video,
    renamed_arguments={"overlap_history": "video_frames"},
    call_arguments=lambda sampling: {"num_frames": sampling.generated_frames},
)

FAMILIES = (SKYREELS_V2, SKYREELS_V2_FORCING, SKYREELS_V2_FROM_VIDEO)
