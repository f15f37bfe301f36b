"""Sampling parameters and specs of CogVideoX, from text, an image or a video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import FamilySpec
from svdpp.config.families.strength import STRENGTH, all_steps, check_strength
from svdpp.config.sampling import Param, PromptedSampling


@dataclass(frozen=True, kw_only=True)
class CogVideoXBaseSampling(PromptedSampling):
    """Sampling parameters that all families of CogVideoX share, with diffusers' defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    latent_axes: ClassVar[str] = "BFCHW"

    height: int = 480
    width: int = 720
    num_frames: int = 49
    fps: float = 8
    guidance_scale: float = 6.0
    max_sequence_length: int = 226


@dataclass(frozen=True, kw_only=True)
class CogVideoXSampling(CogVideoXBaseSampling):
    """Sampling parameters of CogVideoX from text or an image, with diffusers' defaults."""

    family: Literal["cogvideox"] = "cogvideox"


@dataclass(frozen=True, kw_only=True)
class CogVideoXFromVideoSampling(CogVideoXBaseSampling):
    """Sampling parameters of diffusers' `CogVideoXVideoToVideoPipeline`, with its defaults."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = {"strength": STRENGTH}

    family: Literal["cogvideox_v2v"] = "cogvideox_v2v"
    num_inference_steps: int = 40
    strength: float = 0.8


def _latent_channels(pipe: Any) -> int:
    """Return the number of channels of CogVideoX's latent, from the VAE's config.

    The denoiser's `in_channels` cannot be used: for clips from an image it is twice as large.
    """
    return int(pipe.vae.config.latent_channels)


def _latent_frames(pipe: Any, _: Any, frames: int) -> int:
    """Return the number of latent frames of a CogVideoX clip, rounded up to whole patches.

    `frames` is the number of latent frames to which the VAE compresses the clip. In CogVideoX 1.5,
    a patch of the denoiser spans several latent frames. The pipeline adds latent frames to fill the
    last patch, and removes them before the decode.
    """
    size = pipe.transformer.config.patch_size_t or 1
    return -(-frames // size) * size


COGVIDEOX = FamilySpec(
    sampling=CogVideoXSampling,
    title="CogVideoX",
    example="THUDM/CogVideoX-2b",
    license="Apache-2.0",
    denoiser="CogVideoXTransformer3DModel",
    text_pipeline="CogVideoXPipeline",
    image_pipeline="CogVideoXImageToVideoPipeline",
    schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    branches="batch",
    batched_arguments=frozenset({"hidden_states", "encoder_hidden_states", "timestep"}),
    shared_arguments=frozenset({"image_rotary_emb", "ofs"}),
    latent_channels=_latent_channels,
    latent_frames=_latent_frames,
    latent_dtype="model",
)

COGVIDEOX_FROM_VIDEO = replace(
    COGVIDEOX,
    sampling=CogVideoXFromVideoSampling,
    title="CogVideoX from a video",
    text_pipeline=None,
    image_pipeline="CogVideoXVideoToVideoPipeline",
    image_argument="video",
    aliases=("CogVideoXPipeline",),
    check_sampling=check_strength,
    call_arguments=all_steps,
)

FAMILIES = (COGVIDEOX, COGVIDEOX_FROM_VIDEO)
