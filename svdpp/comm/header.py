"""Owns the fixed-size header that precedes each payload, and the checks on it.

gloo and NCCL accept a message of another size or type without an error, so the header describes the
packet, and the receiver checks it before it reads the payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from svdpp.config import TensorSpec
from svdpp.errors import TransportError

PROTOCOL_VERSION = 4
HEADER_BYTES = 2048
MAX_TENSORS = 16
MAX_DIMS = 8
_MAGIC = b"SVDPPKT\0"
_DTYPE_CODES = {"fp32": 1, "fp16": 2, "bf16": 3, "uint8": 4, "int64": 5, "bool": 6}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}
# begun: unix time at which the clip's encode began; compute: seconds that ranks have computed for
# the clip; crc: of the payload; count: of tensors.
_HEAD_FORMATS = {
    **{"magic": "8s", "version": "H", "flags": "H", "clip": "Q", "step": "I", "sequence": "Q"},
    **{"begun": "d", "compute": "d", "bytes": "Q", "crc": "I", "count": "H"},
}
_TENSOR_FORMATS = {"name": "32s", "dtype": "B", "dims": "B", "shape": f"{MAX_DIMS}Q"}
_HEAD, _TENSOR = (
    struct.Struct("<" + "".join(formats.values())) for formats in (_HEAD_FORMATS, _TENSOR_FORMATS)
)
_TOMBSTONE, _CHECKSUM, _MEMORY_PRESSURE = 1, 2, 4


def _positions(formats: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """The offset of each field in a struct without gaps."""
    sizes = (struct.calcsize(f"<{each}") for each in formats.values())
    return zip(formats, accumulate(sizes, initial=0), strict=False)


#: Offset of each field; those of a tensor within its own entry.
FIELDS: Mapping[str, int] = dict(_positions({**_HEAD_FORMATS, **_TENSOR_FORMATS}))


@dataclass(frozen=True)
class Header:
    """The description of one packet.

    Args:
        clip: index of the clip.
        next_step: number of steps done, which is the step the receiver does next.
        sequence: number of packets sent on this link before this one.
        begun_at: unix time in seconds at which the clip's encode began.
        tensors: name, shape and dtype of each tensor, in the order of the payload.
        tombstone: the clip is lost: no payload follows.
        memory_pressure: see `Packet`.
        crc: crc32 of the payload; None where none was taken.
        compute_seconds: that ranks have computed for this clip so far.
    """

    clip: int
    next_step: int
    sequence: int
    begun_at: float
    tensors: tuple[tuple[str, TensorSpec], ...]
    tombstone: bool = False
    memory_pressure: bool = False
    crc: int | None = None
    compute_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload that follows."""
        return sum(spec.num_bytes for _, spec in self.tensors)

    @property
    def _flags(self) -> int:
        return (
            _TOMBSTONE * self.tombstone
            | _CHECKSUM * (self.crc is not None)
            | _MEMORY_PRESSURE * self.memory_pressure
        )

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes, little-endian, padded with zeros."""
        if len(self.tensors) > MAX_TENSORS:
            raise ValueError(f"a packet holds at most {MAX_TENSORS} tensors")
        head = _HEAD.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self._flags,
            self.clip,
            self.next_step,
            self.sequence,
            self.begun_at,
            self.compute_seconds,
            self.num_bytes,
            self.crc or 0,
            len(self.tensors),
        )
        parts = [head, *(_pack_tensor(name, spec) for name, spec in self.tensors)]
        return b"".join(parts).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> Header:
        """The header that `pack` wrote.

        Raises:
            TransportError: the bytes are no header of this protocol version.
        """
        if len(data) != HEADER_BYTES:
            raise TransportError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, version, flags, *fields = _HEAD.unpack_from(data)
        clip, next_step, sequence, begun_at, compute, num_bytes, crc, num_tensors = fields
        if magic != _MAGIC:
            raise TransportError("the header does not begin as a packet's does")
        if version != PROTOCOL_VERSION:
            raise TransportError(
                f"the sender speaks packet protocol {version}, this rank {PROTOCOL_VERSION}",
                "install the same svdpp version for every rank",
            )
        if not (math.isfinite(begun_at) and math.isfinite(compute)):
            raise TransportError(f"the header's times are not finite: {begun_at}, {compute}")
        if flags & ~(_TOMBSTONE | _CHECKSUM | _MEMORY_PRESSURE):
            raise TransportError(f"the header carries unknown flags {flags:#06x}")
        if num_tensors > MAX_TENSORS:
            raise TransportError(f"the header announces {num_tensors} tensors")
        offsets = range(_HEAD.size, _HEAD.size + num_tensors * _TENSOR.size, _TENSOR.size)
        tensors = tuple(_unpack_tensor(data, offset) for offset in offsets)
        header = Header(
            *(clip, next_step, sequence, begun_at, tensors),
            tombstone=bool(flags & _TOMBSTONE),
            memory_pressure=bool(flags & _MEMORY_PRESSURE),
            crc=crc if flags & _CHECKSUM else None,
            compute_seconds=compute,
        )
        if header.num_bytes != num_bytes:
            raise TransportError(
                f"the header announces {num_bytes} bytes, its tensors have {header.num_bytes}"
            )
        return header

    def check(
        self,
        *,
        clip: int,
        next_step: int,
        sequence: int,
        tensors: Mapping[str, TensorSpec],
        checksum: bool = False,
    ) -> None:
        """Compares the header with what the receiver's action list expects.

        A tombstone carries no tensors, whatever the list expects of the clip.

        Raises:
            TransportError: naming the first field that differs, with both sides' values.
        """
        expected_names = [] if self.tombstone else list(tensors)
        pairs: list[tuple[str, object, object]] = [
            ("sequence number", self.sequence, sequence),
            ("clip", self.clip, clip),
            ("next step", self.next_step, next_step),
            ("tensors", [name for name, _ in self.tensors], expected_names),
            ("checksum", self.crc is not None, checksum and not self.tombstone),
        ]
        pairs += [(name, str(spec), str(tensors.get(name))) for name, spec in self.tensors]
        for what, sent, expected in pairs:
            if sent != expected:
                raise TransportError(
                    f"{what}: sent {sent}, expected {expected}",
                    details={"what": what, "got": sent, "expected": expected},
                )


def _pack_tensor(name: str, spec: TensorSpec) -> bytes:
    if len(spec.shape) > MAX_DIMS:
        raise ValueError(f"{name}: at most {MAX_DIMS} dimensions, got {len(spec.shape)}")
    encoded = name.encode("ascii")
    if len(encoded) > 32:
        raise ValueError(f"{name}: at most 32 characters")
    dims = spec.shape + (0,) * (MAX_DIMS - len(spec.shape))
    return _TENSOR.pack(encoded, _DTYPE_CODES[spec.dtype], len(spec.shape), *dims)


def _unpack_tensor(data: bytes, offset: int) -> tuple[str, TensorSpec]:
    name, dtype, num_dims, *dims = _TENSOR.unpack_from(data, offset)
    if dtype not in _DTYPE_NAMES or num_dims > MAX_DIMS:
        raise TransportError(f"the header announces dtype code {dtype} with {num_dims} dimensions")
    try:
        text = name.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise TransportError(f"the header announces a tensor named {name!r}") from None
    return text, TensorSpec(tuple(dims[:num_dims]), _DTYPE_NAMES[dtype])
