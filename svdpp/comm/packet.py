"""The packet: what travels with a clip between two ranks, as tensors and as flat bytes.

A packet describes itself. Its payload is the tensors on the rank's device end to end. Tensors in
host memory, such as the state of a random generator, are in the description, which the receiver
reads in host memory as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from svdpp.errors import TransportError


@dataclass
class Packet:
    """One clip between two ranks: what later ranks need, and nothing else.

    Args:
        clip: index of the clip.
        next_step: number of steps done.
        begun_at: unix time in seconds at which the clip's encode began.
        tensors: by name, contiguous or not, on the rank's device or in host memory; none in a
            tombstone.
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


def describe(tensors: Mapping[str, torch.Tensor], device: torch.device) -> bytes:
    """The description of a packet's tensors, with the bytes of those in host memory."""
    entries, in_host_memory = [], []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_host = tensor.device.type != device.type
        entries.append([name, dtype, list(tensor.shape), is_host])
        if is_host:
            assert tensor.is_cpu, f"{name} is on {tensor.device}"
            in_host_memory.append(_bytes_of(tensor).numpy().tobytes())
    return b"".join([json.dumps(entries).encode(), b"\n", *in_host_memory])


def flatten(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The payload: uint8, queued on the current stream of `device`."""
    parts = [_bytes_of(tensor) for tensor in tensors.values() if tensor.device.type == device.type]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def assemble(description: bytes, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a packet, each in memory of its own: a view could be misaligned."""
    text, _, rest = description.partition(b"\n")
    try:
        entries = [
            (name, getattr(torch, dtype), shape, is_host)
            for name, dtype, shape, is_host in json.loads(text)
        ]
    except (ValueError, AttributeError, TypeError) as error:
        raise TransportError("a packet's description cannot be read") from error
    host = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else payload[:0]
    tensors: dict[str, torch.Tensor] = {}
    taken = {False: 0, True: 0}
    for name, dtype, shape, is_host in entries:
        start, num_bytes = taken[is_host], math.prod(shape) * dtype.itemsize
        taken[is_host] += num_bytes
        part = (host if is_host else payload)[start : taken[is_host]].clone()
        if part.numel() != num_bytes:
            break
        tensors[name] = part.view(dtype).view(shape)
    if (taken[False], taken[True]) != (payload.numel(), len(rest)):
        raise TransportError(
            f"a packet of {payload.numel()} bytes is described as {taken[False]} bytes"
        )
    return tensors


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
