"""Owns which model is run, in which precision, and the shapes of what it passes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from svdpp.config.limits import MAX_LATENT_ELEMENTS, check_type, require, shown

Dtype = Literal["fp32", "fp16", "bf16"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

#: Bytes of one element, by dtype.
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
# Frames travel, too.
_PACKET_DTYPE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "uint8": 1}


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
        RequestError: sizes not positive, not one for each of `dims`, or too many elements.
    """

    shape: tuple[int, ...]
    dtype: Dtype = "fp32"
    dims: str = "BFCHW"

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
    dummy_latent_shape: tuple[int, ...] | None = None
    """Latent of the dummy model, B C F H W. None: that of SVD at 512 pixels, or a tiny one where
    the dummy sleeps, since it also computes and must be done with that in the time of its sleep."""
    dummy_sleeps: bool = False
    """Whether the dummy model sleeps for as long as the pipeline's costs say, and so decodes."""

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        check_type("--model", self.name, str)
        require(
            bool(self.name.strip()), "the model name is empty", "--model demo needs no download"
        )
        for name in ("revision", "variant"):
            check_type(f"--{name}", getattr(self, name), str, type(None))
        for name in ("local_files_only", "memory_opt", "channels_last", "dummy_sleeps"):
            check_type(f"--{name.replace('_', '-')}", getattr(self, name), bool)
        self.dummy_latent  # noqa: B018  it checks the shape

    @property
    def dummy_latent(self) -> LatentSpec:
        """The dummy model's latent."""
        shape = self.dummy_latent_shape
        if shape is None:
            shape = (1, 4, 2, 8, 8) if self.dummy_sleeps else (1, 4, 14, 64, 64)
        return LatentSpec(shape=shape, dtype=self.dtype, dims="BCFHW")

    @property
    def is_dummy(self) -> bool:
        """Whether this is the stand-in without weights."""
        return self.name == DUMMY_MODEL


def _check_dtype(dtype: object) -> None:
    require(dtype in (*DTYPE_BYTES,), f"dtype {shown(dtype)} is none of {', '.join(DTYPE_BYTES)}")
