"""Packets, which carry the state of a clip between ranks: header, metadata and payload.

    header     sizes of metadata and payload, with checksums; fixed size
    metadata   JSON (clip, finished steps, and name, dtype and shape of each tensor), then the
               bytes of tensors in host memory, such as the state of a random generator
    payload    bytes of the tensors on the rank's device, concatenated

gloo and NCCL do not report an error if the size or type of a received message differs from what the
receiver expects. The receiver therefore checks the header before it reads on. It then compares the
metadata with the clip, the number of finished steps, and the `TensorSpec`s that it expects.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from svdpp.errors import MismatchError, TransportError

# The header needs no version, because all ranks have the same version of svdpp. If a launcher such
# as torchrun starts the ranks, `driver.ranks.shared_settings` compares the versions.
_HEADER = struct.Struct("<IIQI")
HEADER_BYTES = _HEADER.size
#: Offset in bytes of each field of the header. `crc` is the CRC-32 of the metadata, `check` is the
#: CRC-32 of the header's fields before it.
FIELDS = {"metadata": 0, "crc": 4, "bytes": 8, "check": 16}

# Names that messages and command-line options use for dtypes; other dtypes keep torch's names.
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Largest number of missing or unexpected tensors that a message names.
_MAX_NAMES = 5


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a packet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Return the shape and dtype of an existing tensor as a `TensorSpec`."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """Name of a tensor's dtype: `fp32`, `fp16`, `bf16`, or torch's name, such as `int64`."""
        return _DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype_name}"


#: Specs of a packet's tensors, by name.
Specs = Mapping[str, TensorSpec]


@dataclass
class Packet:
    """Tensors that one rank sends to another, usually the state of a clip after some steps.

    Args:
        clip: Index of the clip.
        next_step: Index of the step that comes next, which is the number of finished steps.
        begun_at: Time at which the clip's encode began, in seconds on the monotonic clock of the
            machine that holds the packet. A wall clock is not used, because it may be set back
            while a clip is made.
        tensors: Tensors by name, contiguous or not, on the rank's device or in host memory.
        tombstone: Whether the clip has failed or was cancelled. The packet then has no tensors, but
            is still sent, because later ranks wait for it.
        memory_pressure: Whether a rank that worked on the clip has run short of GPU memory, during
            this clip or earlier. cuDNN may then have chosen a kernel that needs less memory, so the
            clip may not be bitwise reproducible.
        compute_seconds: Seconds of encode, steps and decode so far, summed over all ranks. If the
            clip was resumed, the seconds of the earlier run are included.
    """

    clip: int
    next_step: int
    begun_at: float
    tensors: dict[str, torch.Tensor]
    tombstone: bool = False
    memory_pressure: bool = False
    compute_seconds: float = 0.0

    def make_tombstone(self) -> None:
        """Mark a packet's clip as failed or cancelled, and drop the packet's tensors."""
        self.tensors, self.tombstone = {}, True


class Header(NamedTuple):
    """Header of a packet, of fixed size: sizes of metadata and payload, and checksums."""

    metadata_bytes: int
    """Number of bytes of the metadata."""
    crc: int
    """CRC-32 of the metadata."""
    num_bytes: int
    """Number of bytes of the payload; 0: no payload follows."""

    def pack(self) -> bytes:
        """Return a packet's header as `HEADER_BYTES` bytes, little-endian."""
        data = _HEADER.pack(*self, 0)
        return data[: FIELDS["check"]] + struct.pack("<I", _check_of(data))

    @staticmethod
    def unpack(data: bytes) -> Header:
        """Parse a packet's header from the bytes that `pack` returns, and check its checksum.

        Raises:
            TransportError: The checksum of the header does not match.
        """
        *sizes, check = _HEADER.unpack(data)
        if check != _check_of(data):
            raise TransportError("the packet's header is damaged (wrong checksum)")
        return Header(*sizes)


def _check_of(header: bytes) -> int:
    return zlib.crc32(header[: FIELDS["check"]])


def pack_metadata(packet: Packet, device: torch.device, crc: int | None = None) -> bytes:
    """Return the metadata of a packet: JSON, a line break, and the tensors in host memory.

    Args:
        packet: Packet. Its tensors on `device` are the payload, which is not part of the result;
            all other tensors are in host memory.
        device: Device of the rank.
        crc: CRC-32 of the payload; None: the receiver does not check the payload.
    """
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
    """Return the payload of a packet: bytes of the tensors on `device`, as uint8 of shape (n,)."""
    parts = [_bytes_of(tensor) for tensor in tensors.values() if tensor.device.type == device.type]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


class _Entry(NamedTuple):
    spec: TensorSpec
    is_host: bool


class PacketMetadata:
    """Received metadata of a packet whose payload has not been read yet.

    Args:
        data: Bytes that `pack_metadata` has returned.

    Raises:
        TransportError: `data` cannot be parsed.
    """

    def __init__(self, data: bytes) -> None:
        text, _, self._in_host_memory = data.partition(b"\n")
        try:
            content = json.loads(text)
            self.crc: int | None = content["crc"]
            self._packet = Packet(**content["packet"])
            self._entries = {
                name: _Entry(TensorSpec(tuple(map(int, shape)), getattr(torch, dtype)), is_host)
                for name, dtype, shape, is_host in content["tensors"]
            }
            self._num_bytes = {False: 0, True: 0}
            for spec, is_host in self._entries.values():
                self._num_bytes[is_host] += spec.num_bytes
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise TransportError("a packet's metadata cannot be read") from error

    @property
    def specs(self) -> Specs:
        """Shape and dtype of each tensor of a received packet, according to the sender."""
        return {name: entry.spec for name, entry in self._entries.items()}

    @property
    def tombstone(self) -> bool:
        """Whether a received packet's clip has failed or was cancelled, so it has no tensors."""
        return self._packet.tombstone

    def check(self, clip: int, next_step: int, num_bytes: int, known: Specs) -> None:
        """Raise a `MismatchError` unless a received packet is the one that the receiver expects.

        Args:
            clip: Index of the clip that the receiver expects.
            next_step: Number of finished steps that the receiver expects. It is also the index of
                the step that comes next.
            num_bytes: Number of bytes of the payload, according to the header.
            known: Specs of some tensors that the packet must have, unless it is a tombstone (a
                packet without tensors, of a failed or cancelled clip).

        Raises:
            MismatchError: The packet differs. The error has both values of the first difference.
        """
        sent = {"clip": self._packet.clip, "next_step": self._packet.next_step}
        for name, expected in (("clip", clip), ("next_step", next_step)):
            if sent[name] != expected:
                raise mismatch(name.replace("_", " "), name, sent[name], expected)
        if self.tombstone:
            check_tensors(self.specs, {})
        else:
            check_tensors(self.specs, known, others=True)
        for part, found in ((False, num_bytes), (True, len(self._in_host_memory))):
            declared = self._num_bytes[part]
            if found != declared:
                where = "in host memory" if part else "of the payload"
                raise mismatch(f"bytes {where}", "bytes", found, declared)

    def packet(self, payload: torch.Tensor) -> Packet:
        """Build the received packet from its payload.

        The tensors are copied from the payload, because views of the payload could be misaligned.

        Args:
            payload: Payload as uint8 of shape (n,), where n is the `num_bytes` that was passed to
                `check`.
        """
        rest = self._in_host_memory
        host = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else payload[:0]
        tensors: dict[str, torch.Tensor] = {}
        taken = {False: 0, True: 0}
        for name, ((shape, dtype), is_host) in self._entries.items():
            start = taken[is_host]
            taken[is_host] += self._entries[name].spec.num_bytes
            part = (host if is_host else payload)[start : taken[is_host]].clone()
            tensors[name] = part.view(dtype).view(shape)
        return replace(self._packet, tensors=tensors)


def mismatch(name: str, field: str, sent: Any, expected: Any, **details: Any) -> MismatchError:
    """Return the error for one difference between a received and an expected packet.

    Args:
        name: Name of the value in the error message.
        field: Name of the value in the error's details, which get the keys `sent_<field>` and
            `expected_<field>`.
        sent: Value in the received packet.
        expected: Value that the receiver expects.
        details: Further details.
    """
    both = {f"sent_{field}": sent, f"expected_{field}": expected}
    return MismatchError(f"{name}: sent {sent}, expected {expected}", details={**both, **details})


def check_tensors(sent: Specs, expected: Specs, *, others: bool = False) -> None:
    """Raise a `MismatchError` unless a packet's tensors have the expected names, shapes and dtypes.

    Args:
        sent: Specs of the tensors in the packet.
        expected: Specs that the receiver expects.
        others: Whether the packet may have further tensors besides the expected ones.

    Raises:
        MismatchError: A tensor differs, or tensors are missing or unexpected.
    """
    for name, spec in expected.items():
        if name in sent and sent[name] != spec:
            raise MismatchError(
                f"{name}: sent {sent[name]}, expected {spec}", details=_both(name, sent[name], spec)
            )
    missing = [name for name in expected if name not in sent]
    extra = [] if others else [name for name in sent if name not in expected]
    if not missing and not extra:
        return
    count = f"{'at least ' if others else ''}{len(expected)}"
    counts = f"tensors: sent {len(sent)}, expected {count}"
    parts = [("missing", missing), ("not expected", extra)]
    named = [f"{_listed(names)} {word}" for word, names in parts if names]
    raise MismatchError(
        f"{counts}: {', '.join(named)}",
        details={
            "sent_tensors": len(sent),
            "expected_tensors": len(expected),
            "missing": missing,
            "extra": extra,
            "sent_bytes": sum(spec.num_bytes for spec in sent.values()),
            "expected_bytes": sum(spec.num_bytes for spec in expected.values()),
        },
    )


def _both(name: str, sent: TensorSpec, expected: TensorSpec) -> dict[str, Any]:
    """Return an error's `details` about a tensor: shape, dtype, bytes, as sent and as expected."""
    details: dict[str, Any] = {"tensor": name}
    for side, spec in (("sent", sent), ("expected", expected)):
        details |= {
            f"{side}_shape": list(spec.shape),
            f"{side}_dtype": spec.dtype_name,
            f"{side}_bytes": spec.num_bytes,
        }
    return details


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
