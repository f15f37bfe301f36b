"""Owns what the user asked for: frozen values, checked once, at the door. Stdlib and plan only.

Devices and dtypes are strings here; they become torch objects in `models` and `distributed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.layout import Layout, Split

if TYPE_CHECKING:
    from svdpp.plan.draft import DraftPlan

Fit = Literal["crop", "pad", "stretch"]
VideoFormat = Literal["mp4", "gif", "webp", "frames"]
Dtype = Literal["fp32", "fp16", "bf16"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEFAULT_NUM_STEPS = 28
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

#: Bytes of one element, by dtype.
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
# Frames travel, too.
_PACKET_DTYPE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "uint8": 1}

#: What differs from diffusers' defaults for the built-in models: the settings named in the demo
#: model's README (svdpp/assets/demo-model/README.md) as those that look good.
DEMO_SAMPLING: Mapping[str, Any] = {
    "height": 128,
    "width": 128,
    "num_frames": 14,
    "motion_bucket_id": 40,
    "max_guidance_scale": 1.1,
    "noise_aug_strength": 0.02,
}


def _require(condition: bool, message: str, hint: str = "") -> None:
    if not condition:
        raise RequestError(message, hint)


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor in a packet."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return math.prod(self.shape) * _PACKET_DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Shape and dtype of one clip's latent.

    Args:
        shape: positive sizes in the order of `dims`.
        dtype: element type, one of `DTYPE_BYTES`.
        dims: a letter for each axis. SVD holds latents as B F C H W; Conv3d, and so the dummy
            model, as B C F H W.

    Raises:
        RequestError: sizes not positive, or not one for each of `dims`.
    """

    shape: tuple[int, ...]
    dtype: Dtype = "fp32"
    dims: str = "BFCHW"

    def __post_init__(self) -> None:
        _require(
            len(self.shape) == len(self.dims) and all(size > 0 for size in self.shape),
            f"latent shape {' '.join(map(str, self.shape))} needs {len(self.dims)} positive sizes, "
            f"in the order {' '.join(self.dims)}",
        )
        _require(self.dtype in DTYPE_BYTES, f"dtype {self.dtype!r} is none of fp32, fp16, bf16")

    @property
    def num_bytes(self) -> int:
        """Bytes of the latent, without anything that travels with it."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights, and in which precision."""

    name: str = DEFAULT_MODEL
    """A hub id, a diffusers folder, `demo` (built in) or `dummy` (a small random Conv3d)."""
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    dtype: Dtype = "fp32"
    memory_opt: bool = False
    """Feed-forward chunking in the UNet: less memory, slower, and other bits."""
    channels_last: bool = False
    """Weights of UNet and VAE in the memory format of that name: other bits."""
    dummy_latent_shape: tuple[int, ...] = (1, 4, 14, 64, 64)
    """Latent shape of the dummy model, B C F H W."""
    dummy_sleeps: bool = False
    """Whether the dummy model takes the time that the pipeline's costs say, and so decodes too."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPE_BYTES, f"dtype {self.dtype!r} is none of fp32, fp16, bf16")
        _require(
            bool(self.name.strip()), "the model name is empty", "--model demo needs no download"
        )
        LatentSpec(shape=self.dummy_latent_shape, dims="BCFHW")

    @property
    def is_dummy(self) -> bool:
        """Whether this is the weightless stand-in."""
        return self.name == DUMMY_MODEL


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The knobs of diffusers' `StableVideoDiffusionPipeline.__call__`, with its defaults.

    `num_frames` and `decode_chunk_size` are None until the model is known: then the UNet's own
    frame count, and all frames at once, as diffusers has it.
    """

    num_inference_steps: int = DEFAULT_NUM_STEPS
    height: int = 576
    width: int = 1024
    num_frames: int | None = None
    fps: int = 7
    motion_bucket_id: int = 127
    noise_aug_strength: float = 0.02
    min_guidance_scale: float = 1.0
    max_guidance_scale: float = 3.0
    decode_chunk_size: int | None = None
    fit: Fit = "stretch"

    def __post_init__(self) -> None:
        _require(
            self.num_inference_steps >= 1,
            f"steps must be 1 or more, got {self.num_inference_steps}",
        )
        for name in ("height", "width"):
            self._check_side(name, getattr(self, name))
        for name in ("num_frames", "decode_chunk_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{_option(name)} must be 1 or more, got {value}")
        _require(1 <= self.fps <= 240, f"--fps must be 1 to 240 frames a second, got {self.fps}")
        _require(
            0 <= self.motion_bucket_id <= 1023,
            f"--motion-bucket-id must be 0 to 1023, got {self.motion_bucket_id}",
        )
        for name in ("noise_aug_strength", "min_guidance_scale", "max_guidance_scale"):
            value = getattr(self, name)
            _require(
                math.isfinite(value) and value >= 0,
                f"{_option(name)} must be a finite number, 0 or more, got {value}",
            )
        # diffusers decides on guidance twice: by the maximum when it encodes, by the larger of both
        # when it denoises. Where the two answers differ its own __call__ fails on shapes.
        _require(
            self.max_guidance_scale > 1 or self.min_guidance_scale <= 1,
            f"--min-guidance-scale {self.min_guidance_scale} is above 1 but --max-guidance-scale "
            f"{self.max_guidance_scale} is not: diffusers cannot run that",
        )
        _require(
            not (self.num_frames == 1 and self.max_guidance_scale > 1 >= self.min_guidance_scale),
            "one frame takes the minimum guidance alone, which is 1 or less while the maximum is "
            "above: diffusers cannot run that",
            "--max-guidance-scale 1 switches guidance off",
        )
        _require(self.fit in get_args(Fit), f"--fit must be crop, pad or stretch, got {self.fit!r}")

    @staticmethod
    def _check_side(name: str, value: int) -> None:
        below, above = max(8, value // 8 * 8), max(8, -(-value // 8) * 8)
        nearest = f"{below}" if below == above else f"{below} or {above}"
        _require(
            value >= 8 and value % 8 == 0,
            f"--{name} must be a positive multiple of 8, got {value}",
            f"nearest: --{name} {nearest}",
        )

    @property
    def guided(self) -> bool:
        """Whether two forward passes are made for classifier-free guidance."""
        return self.max_guidance_scale > 1

    @property
    def frames(self) -> int:
        """The frame count, once it is known.

        Raises:
            ValueError: `num_frames` has not been resolved against a model (a programmer's error).
        """
        if self.num_frames is None:
            raise ValueError("num_frames is resolved by the model first")
        return self.num_frames

    def resolved(self, *, model_frames: int) -> SamplingConfig:
        """A copy in which frame count and decode chunk are numbers, as diffusers chooses them."""
        frames = self.num_frames or model_frames
        return replace(self, num_frames=frames, decode_chunk_size=self.decode_chunk_size or frames)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """One clip sooner: an approximation first, the exact clip after it.

    Raises:
        RequestError: an agreement that no two clips can have.
    """

    start_steps: tuple[int, ...]
    """The step at which each rank starts, by rank; see `plan.draft.DraftPlan`."""
    accept_psnr_db: float | None = None
    """Two successive ranks whose frames agree to this PSNR, in dB, end the clip as it is then:
    approximate. None: the exact clip ends it."""

    def __post_init__(self) -> None:
        agreement = self.accept_psnr_db
        _require(
            agreement is None or (math.isfinite(agreement) and agreement > 0),
            f"--draft-psnr must be a finite PSNR above 0 dB, got {agreement}",
        )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """One pipeline: a model, the knobs of its sampler, and the ranks that share its steps.

    Raises:
        RequestError: anything in it that cannot be done, at construction, before any work.
    """

    world_size: int
    """Number of ranks W."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    device: str = "cpu"
    """`cpu`; `cuda` (rank r on cuda:r); or one device such as `cuda:0` shared by all ranks."""
    num_threads: int = 1
    """Intra-op threads of each CPU rank; bits depend on it, so the reference uses the same."""
    timeout_seconds: float = 600.0
    """A rank that makes no progress for this long is named and the run ends."""
    start_timeout_seconds: float = 600.0
    """Ranks have this long to load their model and join."""
    heartbeat_timeout_seconds: float = 15.0
    """A rank that sends no heartbeat for this long is taken for frozen."""
    split: Split = "uniform"
    """The rule by which each clip's steps are cut."""
    replicas: int = 1
    """Number of replicas R that the ranks form, a divisor of W; W of them is data parallel."""
    decoders: int = 1
    """Ranks at the end of each replica that take turns to finish clips."""
    costs: Costs = field(default_factory=Costs)
    """What the splits but `uniform` cut by."""
    draft: DraftConfig | None = None
    """All ranks walk the same clip from several starts, instead of sharing the steps of many."""
    checksum: bool = False
    """Whether packets carry a crc32 of their payload."""
    decode: bool = True
    """False leaves the clips at their final latents: for measuring the engine alone."""

    def __post_init__(self) -> None:
        self.plan  # noqa: B018  it checks W against the steps by itself
        if self.draft is not None:
            self._check_draft()
        _require(
            1 <= self.num_threads <= 1024, f"--threads must be 1 to 1024, got {self.num_threads}"
        )
        # diffusers compares the guidance as a tensor of the model's dtype in its loop, but as a
        # number when it encodes: a maximum that rounds to 1 would give it two answers.
        rounding = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[self.model.dtype]
        _require(
            not 1 < self.sampling.max_guidance_scale <= 1 + rounding,
            f"--max-guidance-scale {self.sampling.max_guidance_scale} rounds to 1 in "
            f"{self.model.dtype}: diffusers cannot run that",
            "--max-guidance-scale 1 switches guidance off",
        )
        kind, _, index = self.device.partition(":")
        _require(
            self.device in ("cpu", "cuda") or (kind == "cuda" and index.isdecimal()),
            f"--device must be cpu, cuda or cuda:N, got {self.device!r}",
        )
        for name in ("timeout_seconds", "start_timeout_seconds", "heartbeat_timeout_seconds"):
            value = getattr(self, name)
            _require(
                math.isfinite(value) and value > 0, f"{_option(name)} must be above 0, got {value}"
            )

    def _check_draft(self) -> None:
        num_start_steps, accept_psnr_db = (
            len(self.draft_plan.start_steps),
            self.draft and self.draft.accept_psnr_db,
        )
        _require(
            num_start_steps == self.world_size,
            f"--draft-starts names {num_start_steps} ranks, but there are {self.world_size}",
            f"use --world {num_start_steps}, or name {self.world_size} starts",
        )
        _require(
            not accept_psnr_db or num_start_steps > 2,
            "--draft-psnr compares two successive ranks before the exact one is done: of 2 ranks "
            "one "
            "is the exact one",
            "use --world 3 or more, and as many --draft-starts where they are named",
        )

    @property
    def plan(self) -> Layout | DraftPlan:
        """Who does what: of many clips, or of one."""
        return self.layout if self.draft is None else self.draft_plan

    @cached_property
    def draft_plan(self) -> DraftPlan:
        """Where each rank starts in a clip's steps, where that is what was asked for."""
        assert self.draft is not None
        from svdpp.plan.draft import DraftPlan  # few commands need it, and all of them start

        return DraftPlan(
            num_steps=self.sampling.num_inference_steps,
            start_steps=self.draft.start_steps,
            decodes=self.decodes,
        )

    @cached_property
    def layout(self) -> Layout:
        """Which way each clip takes through the ranks."""
        return Layout(
            num_steps=self.sampling.num_inference_steps,
            world_size=self.world_size,
            split=self.split,
            replicas=self.replicas,
            decoders=self.decoders,
            costs=self.costs,
            decodes=self.decodes,
        )

    def alone(self) -> PipelineConfig:
        """The same work on one device."""
        plain: dict[str, Any] = {"split": "uniform", "replicas": 1, "decoders": 1, "draft": None}
        return replace(self, world_size=1, costs=Costs(), **plain)

    @property
    def decodes(self) -> bool:
        """Whether clips become frames; the dummy model only pretends to, where it sleeps."""
        return self.decode and (not self.model.is_dummy or self.model.dummy_sleeps)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where one clip's file goes, and how it is encoded."""

    path: str
    format: VideoFormat = "mp4"
    crf: int = 18

    def __post_init__(self) -> None:
        _require(
            self.format in get_args(VideoFormat),
            f"--format must be one of {', '.join(get_args(VideoFormat))}, got {self.format!r}",
        )
        _require(0 <= self.crf <= 51, f"--crf must be 0 (lossless) to 51, got {self.crf}")

    @property
    def json_path(self) -> str:
        """Where the clip's record goes: beside it, under the same name."""
        suffix = "" if self.format == "frames" else f".{self.format}"
        return self.path.removesuffix(suffix) + ".json"

    @property
    def draft(self) -> OutputConfig:
        """Where the clip's approximation goes: beside it, and by its name known for one."""
        suffix = "" if self.format == "frames" else f".{self.format}"
        return replace(self, path=f"{self.path.removesuffix(suffix)}.draft{suffix}")


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """One clip: a photograph and a seed; the dummy model takes the seed alone."""

    seed: int
    image: str | None = None
    """Path of the image file."""
    image_sha256: str | None = None
    """Of the file's bytes, as they were checked at the door."""
    output: OutputConfig | None = None
    """None: the clip's hashes come back, no file is written."""
    latents_key: str | None = None
    """sha256, in hex, of all that the latent's bits depend on: names the clip's kept packets."""
    done_steps: int = 0
    """Steps that an earlier run has done, whose packet is kept; 0 begins with the image."""

    def __post_init__(self) -> None:
        # torch.Generator.manual_seed takes 64 bits; negative seeds alias positive ones there.
        _require(0 <= self.seed < 2**63, f"seed must be 0 to 2^63 - 1, got {self.seed}")
        if self.done_steps and self.latents_key is None:
            raise ValueError("steps done earlier are found by a hand-over key: there is none")


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """What `model_name` changes in diffusers' defaults; empty for every model but the demo's."""
    return DEMO_SAMPLING if model_name == DEMO_MODEL else {}


def _option(name: str) -> str:
    """The command-line spelling of a field name."""
    return "--" + name.removesuffix("_seconds").replace("num_", "").replace("_", "-")
