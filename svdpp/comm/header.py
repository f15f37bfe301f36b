"""The fixed-size header that precedes each packet, and the checks on it.

gloo and NCCL accept a message of another size or type without an error, so the header says how many
bytes follow, and the receiver checks it before it reads them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

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
