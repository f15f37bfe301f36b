"""The packet: what travels with a clip between two ranks, and its header, description and payload.

gloo and NCCL accept a message of another size or type without an error, so a header of fixed size
says how many bytes follow, and the receiver checks it before it reads them. The description says
which packet it is, and which tensors the payload has end to end: those on the rank's device.
Tensors in host memory, such as the state of a random generator, follow the description's text; the
receiver reads them in host memory as well.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from svdpp.errors import TransportError

# All ranks have one version of svdpp (`driver.ranks.shared_settings`).
_HEADER = struct.Struct("<IIQI")
HEADER_BYTES = _HEADER.size
#: Offset of each field of the header. `crc` is of the description, `check` of the fields before.
FIELDS = {"description": 0, "crc": 4, "bytes": 8, "check": 16}


@dataclass
class Packet:
    """One clip between two ranks: what later ranks need.

    Args:
        next_step: number of steps done.
        begun_at: unix time in seconds at which the clip's encode began.
        tensors: by name, contiguous or not, on the rank's device or in host memory.
        tombstone: the clip is lost; the packet, without tensors, still travels, since the lists of
            the ranks behind expect it.
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


class Header(NamedTuple):
    """How many bytes follow: of the description, with its crc32, and of the payload."""

    description_bytes: int
    crc: int
    num_bytes: int

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes, little-endian."""
        data = _HEADER.pack(*self, 0)
        return data[: FIELDS["check"]] + struct.pack("<I", _check_of(data))

    @staticmethod
    def unpack(data: bytes) -> Header:
        """The header that `pack` wrote; TransportError if it is not."""
        *sizes, check = _HEADER.unpack(data)
        if check != _check_of(data):
            raise TransportError("the header is damaged")
        return Header(*sizes)


def _check_of(header: bytes) -> int:
    return zlib.crc32(header[: FIELDS["check"]])


def describe(packet: Packet, device: torch.device, crc: int | None = None) -> bytes:
    """The description; `crc` is the payload's crc32."""
    facts = {**vars(packet), "tensors": {}}
    entries, in_host_memory = [], []
    for name, tensor in packet.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_host = tensor.device.type != device.type
        entries.append([name, dtype, list(tensor.shape), is_host])
        if is_host:
            assert tensor.is_cpu, f"{name} is on {tensor.device}"
            in_host_memory.append(_bytes_of(tensor).numpy().tobytes())
    content = {"packet": facts, "tensors": entries, "crc": crc}
    return b"".join([json.dumps(content).encode(), b"\n", *in_host_memory])


def flatten(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The payload: uint8, queued on the current stream of `device`."""
    parts = [_bytes_of(tensor) for tensor in tensors.values() if tensor.device.type == device.type]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


class Description:
    """A description that has arrived; the payload follows."""

    def __init__(self, data: bytes) -> None:
        text, _, self._in_host_memory = data.partition(b"\n")
        try:
            content = json.loads(text)
            self.crc: int | None = content["crc"]
            self._packet = Packet(**content["packet"])
            self._entries = [
                (name, getattr(torch, dtype), shape, is_host)
                for name, dtype, shape, is_host in content["tensors"]
            ]
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise TransportError("a packet's description cannot be read") from error

    def check(self, clip: int, next_step: int) -> None:
        """Compares the packet with what the receiver's action list expects."""
        for name, sent, expected in (
            ("clip", self._packet.clip, clip),
            ("next step", self._packet.next_step, next_step),
        ):
            if sent != expected:
                raise TransportError(f"{name}: sent {sent}, expected {expected}")

    def packet(self, payload: torch.Tensor) -> Packet:
        """The packet; each tensor has memory of its own, as a view could be misaligned."""
        rest = self._in_host_memory
        host = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else payload[:0]
        tensors: dict[str, torch.Tensor] = {}
        taken = {False: 0, True: 0}
        for name, dtype, shape, is_host in self._entries:
            start, num_bytes = taken[is_host], math.prod(shape) * dtype.itemsize
            taken[is_host] += num_bytes
            part = (host if is_host else payload)[start : taken[is_host]].clone()
            if part.numel() != num_bytes:
                break
            tensors[name] = part.view(dtype).view(shape)
        if (taken[False], taken[True]) != (payload.numel(), len(rest)):
            found, said = payload.numel(), taken[False]
            raise TransportError(f"a packet of {found} bytes is described as {said} bytes")
        return replace(self._packet, tensors=tensors)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
