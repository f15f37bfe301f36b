"""The choice of a model and its precision, and the shape of the dummy's latent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from svdpp.config.limits import (
    MAX_LATENT_ELEMENTS,
    MAX_LORA_WEIGHT,
    check_type,
    is_number,
    require,
    shown,
)

Dtype = Literal["fp32", "fp16", "bf16"]
#: One of two experts: of the steps with high noise, which come first, or with low noise.
Expert = Literal["high", "low"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

#: Bytes of one element, by dtype.
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Shape and dtype of one clip's latent."""

    shape: tuple[int, ...]
    dtype: Dtype = "fp32"
    dims: str = "BFCHW"
    """A letter for each axis; B C F H W for the dummy model, because Conv3d requires it."""

    def __post_init__(self) -> None:
        sizes = " ".join(map(shown, self.shape))
        require(
            len(self.shape) == len(self.dims)
            and all(type(size) is int and size > 0 for size in self.shape),
            f"latent shape {sizes} needs {len(self.dims)} positive sizes, "
            f"in the order {' '.join(self.dims)}",
        )
        require(
            math.prod(self.shape) <= MAX_LATENT_ELEMENTS,
            f"latent shape {sizes} has more than {MAX_LATENT_ELEMENTS} elements",
        )
        _check_dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the latent, without the rest of a packet."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


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
        return LatentSpec(shape=shape, dtype=self.dtype, dims="BCFHW")

    @property
    def is_dummy(self) -> bool:
        """Whether this is the dummy model, which has no weights to load."""
        return self.name == DUMMY_MODEL


def _check_dtype(dtype: object) -> None:
    known = ", ".join(DTYPE_BYTES)
    require(dtype in (*DTYPE_BYTES,), f"--dtype must be one of {known}, got {shown(dtype)}")
