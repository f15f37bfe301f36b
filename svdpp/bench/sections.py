"""Owns the sections of a bench's configuration: their fields, types and limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from svdpp.config import DEFAULT_MODEL, Fit
from svdpp.config.limits import MAX_CLIPS
from svdpp.plan.layout import Split

_MAX_ROUNDS = 1000


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


#: Not strict, because YAML 1.1 reads 1e3 as text.
Number = Annotated[float, BeforeValidator(_no_truth_value), Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]

#: Number of clips in a round.
NumClips = Annotated[int, Field(ge=1, le=MAX_CLIPS)]

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """Strict: otherwise `true` and "1" would count as 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Model(Section):
    """The weights; the fields are options of `svdpp run`."""

    name: str = DEFAULT_MODEL
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    memory_opt: bool = False
    channels_last: bool = False
    latent_shape: list[Positive] = Field(default=[1, 4, 14, 64, 64], min_length=5, max_length=5)
    """Of the dummy model: B, C, F, H, W."""


class Ranks(Section):
    """How the ranks share the work; the fields are options of `svdpp run`."""

    world: Positive | None = None
    """Number of ranks W; None: every GPU, or 2 on the CPU."""
    device: str = "cuda"
    split: Split = "uniform"
    """If not given, `balanced` for a model with two experts."""
    share_experts: bool = False
    """Whether one rank may hold both experts of a model that has two."""
    replicas: Positive = 1
    decoders: Positive = 1
    costs: str | None = None
    """Costs file or preset for the split; None: svd-xt-a100."""
    draft: bool = False
    """Whether all ranks draft one clip at a time, without split, replicas and decoders."""
    start_steps: str | None = None
    """Start steps of a draft, such as "0,14"; None: the default ones."""
    threads: Positive | None = None
    """CPU threads of each rank, in every case; None: cores // ranks, on CUDA 1."""
    deterministic: bool = False
    """torch's strict mode, in every case."""
    allow_mixed_devices: bool = False
    checksum: bool = False
    timeout: Number = 600.0
    start_timeout: Number = 600.0


class Workload(Section):
    """The clips to be made."""

    clips: NumClips = 8
    """Measured clips of each round, without the warm-up."""
    images: list[str] = []
    """Files, which the clips take in turn; empty: the four that come with svdpp, or none for a
    model that also makes clips from text."""
    prompts: list[str] | None = Field(default=None, min_length=1)
    """For a model that takes prompts: each is combined with each image. None: an example, with
    another number for each clip."""
    negative_prompt: str | None = None
    steps: Positive | None = None
    """None: 28 or 50, as `svdpp run`."""
    height: Positive | None = None
    width: Positive | None = None
    frames: Positive | None = None
    fps: Positive | None = None
    motion_bucket_id: int | None = None
    noise_aug_strength: Number | None = None
    min_guidance_scale: Number | None = None
    max_guidance_scale: Number | None = None
    guidance_scale: Number | None = None
    guidance_scale_2: Number | None = None
    guidance_rescale: Number | None = None
    flow_shift: Number | None = None
    decode_timestep: Number | None = None
    decode_noise_scale: Number | None = None
    max_sequence_length: Positive | None = None
    decode_chunk_size: Positive | None = None
    fit: Fit = "stretch"


class Measure(Section):
    """The number of rounds, the warm-up, and the seeds."""

    warmups: Annotated[int, Field(ge=0, le=_MAX_ROUNDS)] = 1
    """Clips through every rank before the measured ones, in each round."""
    repeats: Annotated[int, Field(ge=1, le=_MAX_ROUNDS)] = 3
    """Rounds; each starts the processes of every case again."""
    seeds: list[Seed] = Field(default=[0], min_length=1)
    """All images take the first seed, then all take the second, and so on, in a cycle."""
