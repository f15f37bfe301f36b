"""The packet: what travels with a clip between two ranks, and its header, description and payload.

gloo and NCCL accept a message of another size or type without an error, so a header of fixed size
says how many bytes follow, and the receiver checks it before it reads them. The payload is the
tensors on the rank's device end to end. Tensors in host memory, such as the state of a random
generator, are in the description, which the receiver reads in host memory as well.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from svdpp.errors import TransportError

PROTOCOL_VERSION = 5
_MAGIC = b"SVDPPKT\0"
# crc: of the payload; check: of the header itself.
_FORMATS = {
    **{"magic": "8s", "version": "H", "flags": "H", "clip": "Q", "step": "I", "sequence": "Q"},
    **{"begun": "d", "compute": "d", "description": "I", "bytes": "Q", "crc": "I", "check": "I"},
}
_HEAD = struct.Struct("<" + "".join(_FORMATS.values()))
HEADER_BYTES = _HEAD.size
_TOMBSTONE, _CHECKSUM, _MEMORY_PRESSURE = 1, 2, 4


def _positions(formats: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    sizes = (struct.calcsize(f"<{code}") for code in formats.values())
    return zip(formats, accumulate(sizes, initial=0), strict=False)


#: Offset of each field.
FIELDS: Mapping[str, int] = dict(_positions(_FORMATS))


@dataclass(frozen=True)
class Header:
    """What `Packet` says of a clip, and how many bytes follow: of the description, of the payload.

    `sequence` counts the packets sent on this link before this one. `crc` is the payload's crc32;
    None where none was taken.
    """

    clip: int
    next_step: int
    sequence: int
    begun_at: float
    description_bytes: int
    num_bytes: int
    tombstone: bool = False
    memory_pressure: bool = False
    crc: int | None = None
    compute_seconds: float = 0.0

    @property
    def _flags(self) -> int:
        return (
            _TOMBSTONE * self.tombstone
            | _CHECKSUM * (self.crc is not None)
            | _MEMORY_PRESSURE * self.memory_pressure
        )

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes, little-endian."""
        data = _HEAD.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self._flags,
            self.clip,
            self.next_step,
            self.sequence,
            self.begun_at,
            self.compute_seconds,
            self.description_bytes,
            self.num_bytes,
            self.crc or 0,
            0,
        )
        return data[: FIELDS["check"]] + struct.pack("<I", _check_of(data))

    @staticmethod
    def unpack(data: bytes) -> Header:
        """The header that `pack` wrote; TransportError if it is not."""
        magic, version, flags, *fields = _HEAD.unpack(data)
        clip, next_step, sequence, begun_at, compute, description, num_bytes, crc, check = fields
        if magic != _MAGIC:
            raise TransportError("the header does not begin as a packet's does")
        if version != PROTOCOL_VERSION:
            raise TransportError(
                f"the sender speaks packet protocol {version}, this rank {PROTOCOL_VERSION}",
                "install the same svdpp version for every rank",
            )
        if check != _check_of(data):
            raise TransportError("the header is damaged")
        return Header(
            *(clip, next_step, sequence, begun_at, description, num_bytes),
            tombstone=bool(flags & _TOMBSTONE),
            memory_pressure=bool(flags & _MEMORY_PRESSURE),
            crc=crc if flags & _CHECKSUM else None,
            compute_seconds=compute,
        )

    def check(self, *, clip: int, next_step: int, sequence: int) -> None:
        """Compares the header with what the receiver's action list expects."""
        pairs = {
            "sequence number": (self.sequence, sequence),
            "clip": (self.clip, clip),
            "next step": (self.next_step, next_step),
        }
        for name, (sent, expected) in pairs.items():
            if sent != expected:
                raise TransportError(
                    f"{name}: sent {sent}, expected {expected}",
                    details={"what": name, "got": sent, "expected": expected},
                )


def _check_of(header: bytes) -> int:
    return zlib.crc32(header[: FIELDS["check"]])


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
