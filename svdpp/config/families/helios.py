"""Sampling parameters and specs of Helios, which makes a clip in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from svdpp.config.families.chunks import check_steps_of_chunks
from svdpp.config.families.fixed import check_fixed
from svdpp.config.families.spec import (
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
    ModularSpec,
)
from svdpp.config.limits import MAX_FRAMES, require
from svdpp.config.sampling import VIDEO_FRAMES, Param, PromptedSampling

# Number of latent frames of each chunk, and number of frames that the VAE decodes from them.
_LATENT_FRAMES, _CHUNK = 9, 33
# Temporal compression factor of the VAE.
_TEMPORAL = 4
# Number of stages in which the pyramid pipelines make a chunk. Each stage doubles the height and
# width of the stage before it.
_STAGES = 3
# Default number of frames to read from an input video. They fill the pipeline's history: the 19
# latent frames before a chunk, to which the denoiser attends. Two chunks would not be enough: they
# have only 18 latent frames.
_HISTORY_FRAMES = 3 * _CHUNK
# Parameters of families that continue a video. The pipeline encodes whole chunks of the video, so
# the video must have at least one chunk.
_FROM_VIDEO = {"video_frames": replace(VIDEO_FRAMES, lowest=_CHUNK)}


def _frames_of(chunks: int) -> int:
    """Return the number of frames of a Helios clip that consists of `chunks` whole chunks."""
    return (_CHUNK * chunks - 1) // _TEMPORAL * _TEMPORAL + 1


@dataclass(frozen=True, kw_only=True)
class HeliosBaseSampling(PromptedSampling):
    """Sampling parameters that all pipelines of Helios share, with their defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 32

    height: int = 384
    width: int = 640
    num_frames: int = 129
    fps: float = 24
    guidance_scale: float = 5.0
    max_sequence_length: int = 512

    @property
    def chunks(self) -> int:
        """Number of chunks in which Helios makes the clip."""
        return -(-self.num_frames // _CHUNK)

    @property
    def steps_unit(self) -> int:
        """Number of chunks of the clip; `num_inference_steps` must be a multiple of this number."""
        return self.chunks

    def _check_frames(self) -> None:
        chunks = self.chunks
        below = _frames_of(max(1, chunks - 1))
        nearest = sorted({below, _frames_of(chunks), _frames_of(chunks + 1)})
        require(
            self.num_frames == _frames_of(chunks),
            f"`num_frames` must fill whole chunks, got {self.num_frames}",
            f"use `num_frames` {' or '.join(map(str, nearest))}",
            frames=self.num_frames,
            nearest=nearest,
        )


@dataclass(frozen=True, kw_only=True)
class HeliosSampling(HeliosBaseSampling):
    """Sampling parameters of diffusers' `HeliosModularPipeline`, with its defaults."""

    family: Literal["helios"] = "helios"
    num_inference_steps: int = 200


@dataclass(frozen=True, kw_only=True)
class HeliosFromVideoSampling(HeliosBaseSampling):
    """Sampling parameters of `HeliosModularPipeline` for clips that continue a video."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = _FROM_VIDEO

    family: Literal["helios_v2v"] = "helios_v2v"
    num_inference_steps: int = 200
    video_frames: int = _HISTORY_FRAMES


@dataclass(frozen=True, kw_only=True)
class HeliosPyramidBaseSampling(HeliosBaseSampling):
    """Sampling parameters of Helios pipelines that make each chunk in stages of rising size."""

    side_unit: ClassVar[int] = 16 * 2 ** (_STAGES - 1)

    @property
    def num_stages(self) -> int:
        """Number of pyramid stages of all chunks of a clip together: `_STAGES` in each chunk."""
        return _STAGES * self.chunks

    @property
    def steps_unit(self) -> int:
        """Number of pyramid stages of all chunks, which must divide `num_inference_steps`."""
        return self.num_stages

    @property
    def steps_per_stage(self) -> int:
        """Number of steps of each pyramid stage; in chunk 0, distilled models run twice as many."""
        return self.num_inference_steps // self.steps_unit

    def place_of(self, step: int) -> StepPlace:
        """Return a step's pyramid stage in its chunk, and whether the step is the stage's last.

        Args:
            step: Index of the step in the clip, from 0.
        """
        per_stage = self.steps_per_stage
        return StepPlace(step // per_stage % _STAGES, step % per_stage == per_stage - 1)


@dataclass(frozen=True, kw_only=True)
class HeliosPyramidSampling(HeliosPyramidBaseSampling):
    """Sampling parameters of diffusers' `HeliosPyramidModularPipeline`, with its defaults."""

    family: Literal["helios_pyramid"] = "helios_pyramid"
    num_inference_steps: int = 120


@dataclass(frozen=True, kw_only=True)
class HeliosPyramidFromVideoSampling(HeliosPyramidBaseSampling):
    """Sampling parameters of `HeliosPyramidModularPipeline` for clips that continue a video."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = _FROM_VIDEO

    family: Literal["helios_pyramid_v2v"] = "helios_pyramid_v2v"
    num_inference_steps: int = 120
    video_frames: int = _HISTORY_FRAMES


@dataclass(frozen=True, kw_only=True)
class HeliosDistilledBaseSampling(HeliosPyramidBaseSampling):
    """Sampling parameters that all pipelines of distilled Helios models share.

    By default, each stage has 2 steps, as in the published model.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 1.0

    @property
    def steps_unit(self) -> int:
        """Divisor of `num_inference_steps`: the number of pyramid stages of all chunks.

        Each stage of the first chunk counts as two stages, because it has twice as many steps as a
        stage of any other chunk.
        """
        return self.num_stages + _STAGES

    def place_of(self, step: int) -> StepPlace:
        """Return a step's pyramid stage in its chunk, and whether the step is the stage's last.

        A stage of the first chunk has twice as many steps as a stage of any other chunk.

        Args:
            step: Index of the step in the clip, from 0.
        """
        first_chunk = 2 * _STAGES * self.steps_per_stage
        if step >= first_chunk:
            return super().place_of(step - first_chunk)
        per_stage = 2 * self.steps_per_stage
        return StepPlace(step // per_stage, step % per_stage == per_stage - 1)


@dataclass(frozen=True, kw_only=True)
class HeliosDistilledSampling(HeliosDistilledBaseSampling):
    """Sampling parameters of diffusers' `HeliosPyramidDistilledModularPipeline`."""

    family: Literal["helios_distilled"] = "helios_distilled"


@dataclass(frozen=True, kw_only=True)
class HeliosDistilledFromVideoSampling(HeliosDistilledBaseSampling):
    """Sampling parameters of `HeliosPyramidDistilledModularPipeline` to continue a video."""

    from_video: ClassVar[bool] = True
    own: ClassVar[Mapping[str, Param]] = _FROM_VIDEO

    family: Literal["helios_distilled_v2v"] = "helios_distilled_v2v"
    video_frames: int = _HISTORY_FRAMES


class StepPlace(NamedTuple):
    """Place of a step in a chunk of a Helios clip: its stage, and whether it is the last there."""

    stage: int
    """Index of the step's stage in the chunk, from 0."""
    ends_stage: bool
    """Whether the step is the last step of its stage."""


def _call_arguments(sampling: Any) -> dict[str, Any]:
    """Return the numbers of frames and steps as `__call__` arguments of Helios' plain pipeline.

    This pipeline has no pyramid stages. It expects the number of frames of all chunks together,
    which can be above the clip's, and the number of steps of each chunk.
    """
    steps = sampling.num_inference_steps // sampling.chunks
    return {"num_frames": _CHUNK * sampling.chunks, "num_inference_steps": steps}


def _pyramid_arguments(sampling: Any) -> dict[str, Any]:
    """Return the numbers of frames and steps as `__call__` arguments of Helios' pyramid pipelines.

    The pipelines expect the number of frames of all chunks together, which can be above the clip's,
    and a list with the number of steps of each stage of a chunk.
    """
    steps = [sampling.steps_per_stage] * _STAGES
    return {"num_frames": _CHUNK * sampling.chunks, "pyramid_num_inference_steps_list": steps}


def _check_stages(_: object, sampling: Any) -> None:
    unit, steps = sampling.steps_unit, sampling.num_inference_steps
    twice = " (stages of the first chunk count twice)" if unit > sampling.num_stages else ""
    require(
        steps % unit == 0,
        f"`num_inference_steps` counts the steps of all {_STAGES} stages of all chunks, so for a "
        f"clip of {sampling.num_frames} frames (chunks: {sampling.chunks}) it must be a multiple "
        f"of {unit}{twice}, got {steps}",
        frames=sampling.num_frames,
        chunks=sampling.chunks,
        stages=_STAGES,
        unit=unit,
        steps=steps,
    )


def _check_distilled(checkpoint: object, sampling: Any) -> None:
    check_fixed(sampling, {"guidance_scale": "the model is distilled to run without guidance"})
    _check_stages(checkpoint, sampling)


def _latent_divisor(sampling: Any, step: int) -> int:
    """Return how many times smaller the sides of a Helios latent are than in the last stage.

    `step` is the number of finished steps. The result is 4, 2 or 1: each stage doubles the sides.
    """
    stage = sampling.place_of(step - 1).stage if step else 0
    return int(2 ** (_STAGES - 1 - stage))


def _distilled_latent_dtype(sampling: Any, step: int) -> Literal["fp32", "model"]:
    """Return the dtype of the latent of a distilled Helios model after a number of steps.

    Each chunk begins with noise in float32, and the latent stays float32 in the chunk's first
    stage. The last step of this stage converts the latent to the denoiser's dtype, which the latent
    keeps in the later stages of the chunk.

    Args:
        sampling: Sampling parameters of the clip.
        step: Number of finished steps.
    """
    if not step:
        return "fp32"
    place = sampling.place_of(step - 1)
    return "model" if place.stage or place.ends_stage else "fp32"


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    vae = configs.of("vae", scale_factor_spatial=8, scale_factor_temporal=_TEMPORAL)
    reason = f"because svdpp knows only chunks of {_CHUNK} frames"
    vae.require("scale_factor_temporal", _TEMPORAL, reason)
    scheduler = configs.of("scheduler", scheduler_type="unipc", shift=1.0)
    scheduler.require(
        "scheduler_type",
        "unipc",
        "because other types cast the latent to the denoiser's dtype, and svdpp needs float32",
    )
    if scheduler.values.get("use_dynamic_shifting"):
        reason = "because diffusers allows no other shift with use_dynamic_shifting"
        scheduler.require("shift", 1.0, reason)
    unit = 2 * vae.positive_int("scale_factor_spatial", 64)
    return {"size_multiple": (unit, unit)}


def _pyramid_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    scheduler = configs.of("scheduler", stages=_STAGES)
    scheduler.require("stages", _STAGES, "because svdpp counts the steps of three stages")
    (unit, _) = _checkpoint_facts(configs)["size_multiple"]
    unit *= 2 ** (_STAGES - 1)
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
    # The denoiser is called twice in a step, once for each branch of the guidance, and the guider
    # reads the results only after the second call. So two ranks can each do one of the calls.
    branches="calls",
    latent_frames=lambda *_: _LATENT_FRAMES,
    frame_limits=(_CHUNK, MAX_FRAMES, "from one chunk to the limit of svdpp"),
    modular=ModularSpec(blocks=("HeliosAutoBlocks",)),
    checkpoint_facts=_checkpoint_facts,
    check_sampling=check_steps_of_chunks,
    call_arguments=_call_arguments,
)

HELIOS_PYRAMID = replace(
    HELIOS,
    sampling=HeliosPyramidSampling,
    title="Helios, each chunk in three sizes",
    example="BestWishYsh/Helios-Mid",
    text_pipeline="HeliosPyramidModularPipeline",
    image_pipeline="HeliosPyramidModularPipeline",
    aliases=("HeliosPyramidPipeline",),
    text_aliases=("HeliosPyramidPipeline",),
    modular=ModularSpec(blocks=("HeliosPyramidAutoBlocks",), latent_divisor=_latent_divisor),
    checkpoint_facts=_pyramid_facts,
    check_sampling=_check_stages,
    call_arguments=_pyramid_arguments,
)

HELIOS_DISTILLED = replace(
    HELIOS_PYRAMID,
    sampling=HeliosDistilledSampling,
    title="Helios, distilled",
    example="BestWishYsh/Helios-Distilled",
    text_pipeline="HeliosPyramidDistilledModularPipeline",
    image_pipeline="HeliosPyramidDistilledModularPipeline",
    schedulers=("HeliosDMDScheduler",),
    branches=None,  # the pipeline has no guidance
    latent_dtype=_distilled_latent_dtype,
    modular=ModularSpec(
        blocks=("HeliosPyramidDistilledAutoBlocks",), latent_divisor=_latent_divisor
    ),
    check_sampling=_check_distilled,
)


def _from_video(spec: FamilySpec, sampling: type[Any], title: str) -> FamilySpec:
    """Return a copy of a Helios spec, with the same pipeline, for clips that continue a video."""
    pipeline = spec.image_pipeline
    assert pipeline is not None
    return replace(
        spec,
        sampling=sampling,
        title=title,
        text_pipeline=None,
        image_argument="video",
        text_and_image=False,
        aliases=(pipeline, *spec.aliases),
        text_aliases=(),
    )


FAMILIES = (
    HELIOS,
    _from_video(HELIOS, HeliosFromVideoSampling, "Helios, continuing a video"),
    HELIOS_PYRAMID,
    _from_video(
        HELIOS_PYRAMID,
        HeliosPyramidFromVideoSampling,
        "Helios, each chunk in three sizes, continuing a video",
    ),
    HELIOS_DISTILLED,
    _from_video(
        HELIOS_DISTILLED,
        HeliosDistilledFromVideoSampling,
        "Helios, distilled, continuing a video",
    ),
)
