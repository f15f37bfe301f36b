"""Helios, which makes a clip in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.chunks import check_steps_of_chunks
from svdpp.config.families.spec import (
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import MAX_FRAMES, require
from svdpp.config.sampling import PromptedSampling

# Latent frames of each chunk, frames that the VAE makes of them, and its temporal factor.
_LATENT_FRAMES, _CHUNK, _TEMPORAL = 9, 33, 4


def _frames_of(chunks: int) -> int:
    """Return the number of frames that the pipeline keeps of a number of whole chunks."""
    return (_CHUNK * chunks - 1) // _TEMPORAL * _TEMPORAL + 1


def _chunks_of(frames: int) -> int:
    return -(-frames // _CHUNK)


@dataclass(frozen=True, kw_only=True)
class HeliosSampling(PromptedSampling):
    """The parameters of diffusers' `HeliosModularPipeline`, with defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 32

    family: Literal["helios"] = "helios"
    num_inference_steps: int = 200
    height: int = 384
    width: int = 640
    num_frames: int = 129
    fps: float = 24
    guidance_scale: float = 5.0
    max_sequence_length: int = 512

    @property
    def steps_unit(self) -> int:
        """Number of chunks, which all have the same number of steps."""
        return _chunks_of(self.num_frames)

    def _check_frames(self) -> None:
        chunks = _chunks_of(self.num_frames)
        below = _frames_of(max(1, chunks - 1))
        nearest = sorted({below, _frames_of(chunks), _frames_of(chunks + 1)})
        require(
            self.num_frames == _frames_of(chunks),
            f"`num_frames` must be those of whole chunks, got {self.num_frames}",
            f"nearest: `num_frames` {' or '.join(map(str, nearest))}",
            frames=self.num_frames,
            nearest=nearest,
        )


def _call_arguments(sampling: Any) -> dict[str, Any]:
    """Return `num_inference_steps` for one chunk, and `num_frames` of all whole chunks."""
    chunks = _chunks_of(sampling.num_frames)
    steps = sampling.num_inference_steps // chunks
    return {"num_frames": _CHUNK * chunks, "num_inference_steps": steps}


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    vae = configs.of("vae", scale_factor_spatial=8, scale_factor_temporal=_TEMPORAL)
    vae.require("scale_factor_temporal", _TEMPORAL, "by which the frames of a chunk are counted")
    unit = 2 * vae.positive_int("scale_factor_spatial", 64)
    return {"size_multiple": (unit, unit)}


HELIOS = FamilySpec(
    sampling=HeliosSampling,
    title="Helios",
    example="BestWishYsh/Helios-Base",
    license="Apache-2.0",
    denoiser="HeliosTransformer3DModel",
    text_pipeline="HeliosModularPipeline",
    image_pipeline="HeliosModularPipeline",
    aliases=("HeliosPipeline",),
    text_aliases=("HeliosPipeline",),
    text_and_image=True,
    schedulers=("HeliosScheduler",),
    fp32_components=frozenset({"vae"}),
    loras=False,
    latent_frames=lambda *_: _LATENT_FRAMES,
    frame_limits=(_CHUNK, MAX_FRAMES, "all that svdpp makes in chunks"),
    modular=ModularSpec(blocks=("HeliosAutoBlocks",)),
    checkpoint_facts=_checkpoint_facts,
    check_sampling=check_steps_of_chunks,
    call_arguments=_call_arguments,
)

FAMILIES = (HELIOS,)
