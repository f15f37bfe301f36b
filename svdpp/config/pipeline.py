"""The configuration of a pipeline: model, sampler, and the ranks that share the steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from svdpp.config.families import SamplingConfig
from svdpp.config.limits import (
    MAX_CUDA_INDEX,
    MAX_LATENT_ELEMENTS,
    MAX_LORA_WEIGHT,
    check_seconds,
    check_type,
    check_whole,
    is_number,
    max_threads,
    require,
    shown,
)
from svdpp.config.sampling import SvdSampling
from svdpp.plan.costs import Costs
from svdpp.plan.layout import Layout, Split, frame_chunks, present_split
from svdpp.plan.split import MAX_RANKS

Dtype = Literal["fp32", "fp16", "bf16"]
#: One of two experts: of the steps with high noise, which come first, or with low noise.
Expert = Literal["high", "low"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

#: The demo model's defaults where they differ from diffusers' (svdpp/assets/demo-model/README.md).
DEMO_SAMPLING: Mapping[str, Any] = {
    "height": 128,
    "width": 128,
    "num_frames": 14,
    "motion_bucket_id": 40,
    "max_guidance_scale": 1.1,
    "noise_aug_strength": 0.02,
}


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Shape and dtype of a latent of the dummy model."""

    shape: tuple[int, ...]
    """B C F H W, because Conv3d requires it."""
    dtype: Dtype = "fp32"

    def __post_init__(self) -> None:
        sizes = " ".join(map(shown, self.shape))
        require(
            len(self.shape) == 5 and all(type(size) is int and size > 0 for size in self.shape),
            f"latent shape {sizes} needs 5 positive sizes, in the order B C F H W",
        )
        require(
            math.prod(self.shape) <= MAX_LATENT_ELEMENTS,
            f"latent shape {sizes} has more than {MAX_LATENT_ELEMENTS} elements",
        )
        _check_dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA, and the weight with which it is added to the denoiser."""

    name: str
    """A safetensors file, or `OWNER/NAME/PATH` of one on the hub."""
    weight: float = 1.0
    expert: Expert | None = None
    """Which of two experts it is for; None if the model has one."""
    revision: str | None = None
    """Commit of a file on the hub; None: its main branch."""
    sha256: str | None = None
    """Of the file, if another one is to be refused."""

    def __post_init__(self) -> None:
        check_type("--lora", self.name, str)
        require(bool(self.name.strip()), "--lora is empty", "name a safetensors file")
        is_weight = is_number(self.weight) and abs(self.weight) <= MAX_LORA_WEIGHT
        require(
            is_weight,
            f"the weight of a --lora must be a finite number, {-MAX_LORA_WEIGHT:g} to "
            f"{MAX_LORA_WEIGHT:g}, got {shown(self.weight)}",
        )
        require(self.expert in (None, "high", "low"), "the expert of a --lora is high or low")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The weights and their precision."""

    name: str = DEFAULT_MODEL
    """A hub id, a diffusers folder, `demo` (built in), or `dummy` (a small random Conv3d)."""
    family: str | None = None
    """How to run a checkpoint that several families run; None: as its own pipeline says."""
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    dtype: Dtype = "fp32"
    memory_opt: bool = False
    """Feed-forward chunking in the UNet: needs less memory, is slower and changes the bits."""
    channels_last: bool = False
    """Weights of UNet and VAE in this memory format: changes the bits."""
    loras: tuple[Lora, ...] = ()
    """Added to the denoiser, in this order."""
    dummy_latent_shape: tuple[int, ...] | None = None
    """Latent shape of the dummy model, B C F H W. None: that of SVD at 512 pixels. If the dummy
    sleeps, None is a tiny latent, because its real computation must fit in the time of its sleep.
    """
    dummy_sleeps: bool = False
    """Whether the dummy model sleeps for the time of the pipeline's costs; then it also decodes."""

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        check_type("--model", self.name, str)
        require(bool(self.name.strip()), "--model is empty", "--model demo needs no download")
        for name in ("family", "revision", "variant"):
            check_type(f"--{name}", getattr(self, name), str, type(None))
        for name in ("local_files_only", "memory_opt", "channels_last", "dummy_sleeps"):
            check_type(f"--{name.replace('_', '-')}", getattr(self, name), bool)
        for name, given in (("--lora", self.loras), ("--family", self.family)):
            require(not (given and self.is_dummy), f"the dummy model takes no {name}")
        self.dummy_latent  # noqa: B018  checks the shape

    @property
    def dummy_latent(self) -> LatentSpec:
        """The dummy model's latent."""
        shape = self.dummy_latent_shape
        if shape is None:
            shape = (1, 4, 2, 8, 8) if self.dummy_sleeps else (1, 4, 14, 64, 64)
        return LatentSpec(shape=shape, dtype=self.dtype)

    @property
    def is_dummy(self) -> bool:
        """Whether this is the dummy model, which has no weights to load."""
        return self.name == DUMMY_MODEL


def _check_dtype(dtype: object) -> None:
    known = get_args(Dtype)
    require(dtype in known, f"--dtype must be one of {', '.join(known)}, got {shown(dtype)}")


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """The defaults of `model_name` that differ from diffusers'; empty except for the demo model."""
    return DEMO_SAMPLING if model_name == DEMO_MODEL else {}


# The fields of a layout in which a rank shares no clip with another one.
_WHOLE: dict[str, Any] = {"split": "uniform", "decoders": 1, "cfg_parallel": 1, "decode_ranks": 1}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A pipeline: a model, the parameters of its sampler, and the ranks that share its steps."""

    world_size: int
    """Number of ranks W."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SvdSampling)
    device: str = "cpu"
    """`cpu`, `cuda` (rank r on cuda:r), or one device such as `cuda:0` shared by all ranks."""
    num_threads: int = 1
    """Intra-op threads of each CPU rank; the bits depend on it, so the reference uses the same."""
    timeout_seconds: float = 600.0
    """The run ends and names a rank that makes no progress for this long."""
    start_timeout_seconds: float = 600.0
    """Ranks must load their model and join within this time."""
    heartbeat_timeout_seconds: float = 15.0
    """A rank that sends no heartbeat for this long counts as stalled."""
    split: Split = "uniform"
    """The rule that cuts each clip's steps."""
    replicas: int = 1
    """Number of replicas R, a divisor of W; R = W is data parallel."""
    decoders: int = 1
    """Ranks at the end of each replica that finish its clips alternately."""
    costs: Costs = field(default_factory=Costs)
    """The costs by which splits other than `uniform` cut."""
    expert_boundary: int | None = None
    """Steps of the first of two experts; the model gives it when the configuration is resolved."""
    cfg_parallel: int = 1
    """2: two ranks do each step of a clip together, each for one branch of the guidance."""
    decode_ranks: int | None = None
    """Ranks that decode each clip together; None: when the configuration is resolved, both ranks of
    a pair if the model decodes in chunks of frames and a clip has several, else one."""
    share_experts: bool = False
    """Whether one rank may hold both experts, so that the steps can be cut anywhere."""
    checksum: bool = False
    """Whether packets carry a crc32 of their payload."""
    deterministic: bool = False
    """Use torch's deterministic algorithms in ranks and reference; False: torch's defaults."""
    allow_mixed_devices: bool = False
    """Whether ranks may differ in something that the bits depend on; clips are then not exact."""
    decode: bool = True
    """False: clips end with their final latents, to measure the engine without decode."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", present_split(self.split))
        check_whole("--world", self.world_size, 1, MAX_RANKS)
        self.layout  # noqa: B018  checks the ranks against the steps
        check_whole("--threads", self.num_threads, 1, max_threads(), " on this machine")
        self._check_rounded_guidance()
        require(
            self.cfg_parallel == 1 or not self.allow_mixed_devices,
            "--cfg-parallel 2 cannot be used with --allow-mixed-devices: both ranks of a pair go "
            "on from the same bits",
        )
        _check_device(self.device)
        check_seconds("--timeout", self.timeout_seconds)
        check_seconds("--start-timeout", self.start_timeout_seconds)
        check_seconds("--heartbeat-timeout", self.heartbeat_timeout_seconds)
        for name in ("checksum", "deterministic", "allow_mixed_devices", "share_experts"):
            check_type(f"--{name.replace('_', '-')}", getattr(self, name), bool)
        check_type("decode", self.decode, bool)

    def _check_rounded_guidance(self) -> None:
        # diffusers decides whether to guide from a Python number when it encodes, but from a tensor
        # of the model's dtype in its loop. A maximum that rounds to 1 would give two answers.
        rounding = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[self.model.dtype]
        if not isinstance(self.sampling, SvdSampling):
            return
        require(
            not 1 < self.sampling.max_guidance_scale <= 1 + rounding,
            f"--max-guidance-scale {self.sampling.max_guidance_scale} rounds to 1 in "
            f"{self.model.dtype}: diffusers cannot run that",
            "use --max-guidance-scale 1 to run without guidance",
        )

    @cached_property
    def layout(self) -> Layout:
        """The layout, which gives the route of each clip through the ranks."""
        return Layout(
            num_steps=self.sampling.num_inference_steps,
            world_size=self.world_size,
            split=self.split,
            replicas=self.replicas,
            decoders=self.decoders,
            costs=self.costs,
            decodes=self.decodes,
            expert_boundary=self.expert_boundary,
            share_experts=self.share_experts,
            cfg_parallel=self.cfg_parallel,
            decode_ranks=1 if self.decode_ranks is None else self.decode_ranks,
            chunks=self.chunks,
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Frames of each part of a clip that is decoded at once; empty: not known yet."""
        frames, size = self.sampling.num_frames, self.sampling.decode_chunk_size
        return frame_chunks(frames, size) if frames and size else ()

    def alone(self) -> PipelineConfig:
        """The same configuration with one rank."""
        return replace(self, world_size=1, replicas=1, costs=Costs(), **_WHOLE)

    def data_parallel(self) -> PipelineConfig:
        """The same configuration with whole clips on each rank."""
        return replace(self, replicas=self.world_size, **_WHOLE)

    @property
    def decodes(self) -> bool:
        """Whether clips are decoded to frames; the dummy model does so only if it sleeps."""
        return self.decode and (not self.model.is_dummy or self.model.dummy_sleeps)


def _check_device(device: object) -> None:
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,9}))?", device) if isinstance(device, str) else None
    require(
        match is not None and int(match[1] or 0) <= MAX_CUDA_INDEX,
        f"--device must be cpu, cuda or cuda:N, got {shown(device)}",
    )
