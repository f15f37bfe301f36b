"""Sampling parameters and spec of Stable Video Diffusion: clips from an image, without a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from svdpp.config.families.spec import CheckpointConfigs, CheckpointFacts, FamilySpec
from svdpp.config.limits import require
from svdpp.config.sampling import DEFAULT_NUM_STEPS, CommonSampling


@dataclass(frozen=True, kw_only=True)
class SvdSampling(CommonSampling):
    """Sampling parameters of diffusers' `StableVideoDiffusionPipeline`, with its defaults."""

    latent_axes: ClassVar[str] = "BFCHW"
    from_image: ClassVar[bool] = True
    has_last_image: ClassVar[bool] = False
    num_references: ClassVar[int] = 0

    family: Literal["svd"] = "svd"
    num_inference_steps: int = DEFAULT_NUM_STEPS
    height: int = 576
    width: int = 1024
    fps: float = 7
    motion_bucket_id: int = 127
    noise_aug_strength: float = 0.02
    min_guidance_scale: float = 1.0
    max_guidance_scale: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_guidance_scale, self.max_guidance_scale
        # diffusers decides twice whether guidance is on. In the encode, guidance is on if
        # `max_guidance_scale` is above 1. In the denoising loop, it is on if `max_guidance_scale`
        # or `min_guidance_scale` is above 1. If the two decisions differ, the pipeline fails with a
        # shape error.
        require(
            high > 1 or low <= 1,
            f"`min_guidance_scale` {low} is above 1 but `max_guidance_scale` {high} is not: "
            "diffusers cannot run that",
            min_guidance_scale=low,
            max_guidance_scale=high,
            limit=1,
        )
        require(
            not (self.num_frames == 1 and high > 1 >= low),
            "a clip of one frame uses only `min_guidance_scale`, which is 1 or less, but "
            "`max_guidance_scale` is above 1: diffusers cannot run that",
            "use `max_guidance_scale` 1 to run without guidance",
            min_guidance_scale=low,
            max_guidance_scale=high,
            frames=1,
        )

    @property
    def uses_guidance(self) -> bool:
        """Whether classifier-free guidance is on, which doubles the forward passes of each step."""
        return self.max_guidance_scale > 1

    def with_model_defaults(self, *, model_frames: int) -> Self:
        """Return a copy of the sampling parameters with diffusers' values in place of None.

        `num_frames` becomes `model_frames`. `decode_chunk_size` becomes the number of frames, so
        that all frames are decoded at once.

        Args:
            model_frames: Number of frames in the model's config.
        """
        frames = self.num_frames or model_frames
        return replace(self, num_frames=frames, decode_chunk_size=self.decode_chunk_size or frames)


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    reason = "the size of diffusers' CLIP input"
    configs.of("image_encoder").require("image_size", 224, reason)
    return {"model_frames": configs.of("unet").positive_int("num_frames", 1024)}


def _latent_channels(pipe: Any) -> int:
    """Return the number of channels of SVD's latent: half of the UNet's input channels.

    The other half is for the image's latent.
    """
    return int(pipe.unet.config.in_channels) // 2


SVD = FamilySpec(
    sampling=SvdSampling,
    title="Stable Video Diffusion",
    example="stabilityai/stable-video-diffusion-img2vid-xt",
    license="Stability AI Community License",
    denoiser="UNetSpatioTemporalConditionModel",
    image_pipeline="StableVideoDiffusionPipeline",
    takes_prompt=False,
    schedulers=("EulerDiscreteScheduler",),
    denoisers=("unet",),
    encode_components=("feature_extractor", "image_encoder"),
    loras=False,
    num_results_equal_latents=1,
    branches="batch",
    batched_arguments=frozenset({"sample", "encoder_hidden_states", "added_time_ids"}),
    latent_channels=_latent_channels,
    latent_dtype="model",
    decodes_in_chunks=True,
    memory_options=True,
    checkpoint_facts=_checkpoint_facts,
    resizes_early=True,
)

FAMILIES = (SVD,)
