"""Sampling parameters and spec of Kandinsky 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import (
    TWO_TEXT_ENCODERS,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
)
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class Kandinsky5Sampling(PromptedSampling):
    """Sampling parameters of `Kandinsky5T2VPipeline` and `Kandinsky5I2VPipeline`, with defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    latent_axes: ClassVar[str] = "BFHWC"

    family: Literal["kandinsky5"] = "kandinsky5"
    height: int = 512
    width: int = 768
    num_frames: int = 121
    fps: float = 24
    guidance_scale: float = 5.0
    max_sequence_length: int = 512


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    reason = "because sparse attention needs CUDA kernels and is not tested"
    transformer = configs.of("transformer", attention_type="regular")
    transformer.require("attention_type", "regular", reason)
    return {}


def _check_sampling(_: object, sampling: Any) -> None:
    """Raise a `RequestError` if a Kandinsky 5 clip from an image has fewer than 17 frames.

    The pipeline normalises the first four latent frames with statistics of the later latent frames.
    So the pipeline needs a fifth latent frame, which clips of 17 or more frames have.

    Raises:
        RequestError: The clip starts from an image and has fewer than 17 frames.
    """
    enough = not sampling.from_image or sampling.num_frames >= 17
    require(
        enough,
        f"`num_frames` must be at least 17 for a clip from an image, got {sampling.num_frames}",
        frames=sampling.num_frames,
        lowest=17,
    )


def _latent_channels(pipe: Any) -> int:
    """Return the number of channels of Kandinsky 5's latent.

    In checkpoints with `visual_cond`, the latent also has the channels of an image and of a mask.
    """
    channels = int(pipe.transformer.config.in_visual_dim)
    return 2 * channels + 1 if pipe.transformer.config.visual_cond else channels


KANDINSKY5 = FamilySpec(
    sampling=Kandinsky5Sampling,
    title="Kandinsky 5",
    example="kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
    license="MIT",
    denoiser="Kandinsky5Transformer3DModel",
    text_pipeline="Kandinsky5T2VPipeline",
    image_pipeline="Kandinsky5I2VPipeline",
    text_and_image=True,
    encode_components=TWO_TEXT_ENCODERS,
    initial_latent_source="latents",
    num_results_equal_latents=1,
    branches="calls",
    latent_channels=_latent_channels,
    latent_dtype="model",
    checkpoint_facts=_checkpoint_facts,
    check_sampling=_check_sampling,
    decodes_in_tiles=True,
)

FAMILIES = (KANDINSKY5,)
