"""An upper bound of the memory that a model takes, by arithmetic alone: no torch, no weights.

`models.memory` tells the memory exactly, but takes seconds and imports diffusers. Most runs fit
many times over, and this bound says so at once. Its factors lie above what the exact estimate gives
for the demo model and for SVD-XT (tests/models/test_memory_bound.py compares them).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from svdpp.config import DTYPE_BYTES, ModelConfig, SamplingConfig
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.json_file import read_json
from svdpp.models.safetensors_header import num_elements

# Live bytes for each position and channel of a part's widest tensor, in elements. Convolutions that
# unfold their input take 9 (two dimensions) or 27 (three) of them.
_DECODE_FACTOR = 16
_DENOISE_FACTOR = 40
_ENCODE_FACTOR = 16
_DUMMY_ELEMENTS, _DUMMY_ELEMENTS_PER_CHANNEL = 600, 40
# CLIP, and tensors whose size does not go by the clip's.
_FIXED_BYTES = 256 * 2**20
_MAX_CHANNELS = 16384
_UNKNOWN = 2**62
_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def activation_bound(
    checkpoint: Checkpoint | None, model: ModelConfig, sampling: SamplingConfig
) -> int:
    """Bytes above the weights that no part of the model exceeds; huge if no bound is known.

    Args:
        checkpoint: None for the dummy model.
        model: its dtype is that of weights and latents.
        sampling: resolved.
    """
    size = DTYPE_BYTES[model.dtype]
    if checkpoint is None:
        batch, channels, *sides = model.dummy_latent.shape
        per_position = _DUMMY_ELEMENTS + _DUMMY_ELEMENTS_PER_CHANNEL * channels
        return batch * math.prod(sides) * per_position * size
    if checkpoint.family != "svd":
        return _UNKNOWN
    unet, vae = (_channels(checkpoint, part)[0] for part in ("unet", "vae"))
    pixels = sampling.height * sampling.width
    chunk = min(sampling.decode_chunk_size or sampling.frames, sampling.frames)
    frames = sampling.frames * pixels * 3 * 4  # fp32 RGB
    cells: int = 2 * sampling.frames * pixels // 4 ** (len(_channels(checkpoint, "vae")) - 1)
    return _FIXED_BYTES + max(
        chunk * pixels * vae * size * _DECODE_FACTOR + 3 * frames,
        cells * unet * size * _DENOISE_FACTOR,
        pixels * vae * 4 * _ENCODE_FACTOR,
    )


class WeightBytes(NamedTuple):
    """The weights of one component as a rank holds them."""

    num_bytes: int
    is_shared: bool
    """Whether they are mapped from files, once for all processes of a machine."""


def weight_bytes(checkpoint: Checkpoint, model: ModelConfig, component: str) -> WeightBytes:
    """The weights of a component in the dtype that it is loaded in, from its files' headers.

    Files that have that dtype are mapped; otherwise each rank has a copy.
    """
    dtype = "fp32" if component in checkpoint.row.fp32 else model.dtype
    headers = checkpoint.weight_files(component)
    stored = {name for header in headers.values() for name, _ in header.values()}
    is_shared = all(_DTYPES.get(name) == dtype for name in stored)
    return WeightBytes(num_elements(headers) * DTYPE_BYTES[dtype], is_shared)


def _channels(checkpoint: Checkpoint, part: str) -> tuple[int, ...]:
    config = read_json(checkpoint.folder, f"{part}/config.json")
    return config.counts("block_out_channels", _MAX_CHANNELS)
