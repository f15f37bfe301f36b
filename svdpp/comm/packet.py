"""Owns the packet: what travels with a clip between two ranks, as tensors and as flat bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from svdpp.config import TensorSpec

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
    "int64": torch.int64,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass
class Packet:
    """One clip between two ranks: what later ranks need, and nothing else.

    Args:
        clip: index of the clip.
        next_step: number of steps done.
        begun_at: unix time in seconds at which the clip's encode began.
        tensors: by name, contiguous or not, all on the rank's device; none in a tombstone.
        tombstone: the clip has failed at an earlier rank. The packet still travels, since the
            lists of the ranks behind expect it, but no rank works on it.
        memory_pressure: the CUDA allocator of a rank had to free its cache for this clip, or ran
            out of memory; cuDNN may have used another kernel then, with other bits.
        compute_seconds: that ranks have computed for the clip so far, in encode, steps and decode;
            of a resumed clip, those of the steps before as well.
    """

    clip: int
    next_step: int
    begun_at: float
    tensors: dict[str, torch.Tensor]
    tombstone: bool = False
    memory_pressure: bool = False
    compute_seconds: float = 0.0

    def make_tombstone(self) -> None:
        """Drops the tensors: the clip is lost, or not wanted any more."""
        self.tensors, self.tombstone = {}, True


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of `tensor`, as a header has them.

    Raises:
        ValueError: a dtype that packets do not carry.
    """
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"packets do not carry {tensor.dtype}")
    return TensorSpec(tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype])


def specs(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, TensorSpec], ...]:
    """Name and spec of each tensor, in packet order."""
    return tuple((name, tensor_spec(tensor)) for name, tensor in tensors.items())


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All bytes end to end, uint8, queued on the current stream of the tensors' device."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unflatten(
    payload: torch.Tensor, tensors: Iterable[tuple[str, TensorSpec]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in `payload`, each in memory of its own: a view could be misaligned."""
    offset = 0
    for name, spec in tensors:
        part = payload[offset : offset + spec.num_bytes].clone()
        offset += spec.num_bytes
        yield name, part.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
