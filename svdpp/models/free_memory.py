"""Free memory, and quick figures for the check of memory before a run: no weights, no diffusers.

`models.memory` tells the memory of any model, but takes seconds. For the built-in models, which fit
many times over, an upper bound says so at once.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as functional

from svdpp.config import DEMO_MODEL, DTYPE_BYTES, ModelConfig, SamplingConfig
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyUNet
from svdpp.models.safetensors_header import num_elements

# Elements for each pixel: of a frame that is decoded, and of a frame that is denoised.
_DECODED, _DENOISED = 512, 80
# CLIP, and tensors whose size does not go by the clip's.
_FIXED_BYTES = 256 * 2**20
_DUMMY_ELEMENTS, _DUMMY_ELEMENTS_PER_CHANNEL = 600, 40
_UNKNOWN = 2**62
_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def free_bytes(device: torch.device | str) -> int:
    """Free bytes of the host, or of the GPU of this rank.

    Only a process that uses the GPU may call it, because it creates a CUDA context. The parent uses
    `launch.gpus`.
    """
    device = torch.device(device)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def available_bytes() -> int:
    """Host memory in bytes that a new process can use without swapping; MemAvailable in proc(5)."""
    for line in _meminfo().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> str:
    try:
        return Path("/proc/meminfo").read_text()
    except OSError:
        return ""


def gib_text(num_bytes: int) -> str:
    """An amount of memory for messages, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


@torch.no_grad()
def bare_process_bytes() -> int:
    """Resident bytes of a rank's process without a model.

    It measures this process, which must already have imported what a rank imports. It runs each
    kind of kernel once, because the libraries' code becomes resident only then (about 20 MiB).
    """
    DummyUNet()(torch.zeros(1, 4, 2, 8, 8), 0)
    batch = functional.conv2d(torch.zeros(16, 32, 8, 8), torch.zeros(32, 32, 3, 3))
    batch = functional.group_norm(batch, 4).flatten(2)
    functional.gelu(functional.linear(batch, torch.zeros(36, 36)))
    functional.scaled_dot_product_attention(batch, batch, batch)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


def activation_bound(
    checkpoint: Checkpoint | None, model: ModelConfig, sampling: SamplingConfig
) -> int:
    """Bytes above the weights that no part of the model exceeds; huge if no bound is known.

    `checkpoint` is None for the dummy model.
    """
    size = DTYPE_BYTES[model.dtype]
    if checkpoint is None:
        batch, channels, *sides = model.dummy_latent.shape
        per_position = _DUMMY_ELEMENTS + _DUMMY_ELEMENTS_PER_CHANNEL * channels
        return batch * math.prod(sides) * per_position * size
    if checkpoint.name != DEMO_MODEL:
        return _UNKNOWN
    frames, pixels = sampling.frames, sampling.height * sampling.width
    chunk = min(sampling.decode_chunk_size or frames, frames)
    results = 3 * frames * pixels * 3 * 4  # fp32 RGB
    decoded = chunk * pixels * _DECODED * size + results
    return _FIXED_BYTES + max(decoded, frames * pixels * _DENOISED * size, pixels * _DECODED * 4)


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
