"""Sampling parameters and spec of Latte, whose clips have a fixed number of frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from svdpp.config.families.spec import CheckpointConfigs, CheckpointFacts, FamilySpec
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class LatteSampling(PromptedSampling):
    """Sampling parameters of diffusers' `LattePipeline`, with its defaults."""

    family: Literal["latte"] = "latte"
    height: int = 512
    width: int = 512
    num_frames: int = 16
    fps: float = 8
    guidance_scale: float = 7.5
    max_sequence_length: int = 120


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    """Return facts of a Latte checkpoint: `frames` and `unused_parameters`.

    The lowest and the highest number in `frames` are equal, because the model makes clips of only
    one length. `unused_parameters` lists `max_sequence_length`, which has no effect.
    """
    count = configs.of("transformer", video_length=16).positive_int("video_length", 1024)
    frames = count, count, "the only number of frames that the model makes"
    return {"unused_parameters": ("max_sequence_length",), "frames": frames}


LATTE = FamilySpec(
    sampling=LatteSampling,
    title="Latte",
    example="maxin-cn/Latte-1",
    license="Apache-2.0",
    denoiser="LatteTransformer3DModel",
    text_pipeline="LattePipeline",
    schedulers=("DDIMScheduler",),
    loras=False,
    num_results_equal_latents=1,
    branches="batch",
    batched_arguments=frozenset({"hidden_states", "encoder_hidden_states", "timestep"}),
    latent_dtype="model",
    checkpoint_facts=_checkpoint_facts,
    renamed_arguments={"video_length": "num_frames"},
)

FAMILIES = (LATTE,)
