"""Owns one packet's way from one rank to the next: header, check, payload. Point to point only.

Each neighbour has a link with one thread for what comes and one for what goes, so that a transfer
runs beneath the denoising. The header is a message of its own, always between CPUs; the payload is
the packet's tensors laid end to end, on the device for NCCL, through pinned host memory for gloo,
which does not carry CUDA tensors point to point.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from svdpp.comm.header import HEADER_BYTES, Header
from svdpp.config import TensorSpec
from svdpp.errors import TransportError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_Result = TypeVar("_Result")

# Clip index of the packet that opens a link; no clip has it.
_HELLO_CLIP = 2**64 - 1
_HELLO = {"hello": TensorSpec((1,), "fp32")}


@dataclass
class Packet:
    """One clip on its way: what later ranks need, and nothing else.

    Args:
        clip: index of the clip.
        next_step: number of steps done.
        begun_at: unix time in seconds at which the clip's encode began.
        tensors: by name, contiguous or not, all on the rank's device; none where it is tombstone.
        tombstone: the clip has failed at an earlier rank. It still travels, since every list after
        that
            rank's expects it, but nobody works on it.
    """

    clip: int
    next_step: int
    begun_at: float
    tensors: dict[str, torch.Tensor]
    tombstone: bool = False


class Transfer(NamedTuple):
    """One transfer, as one of its two ends saw it.

    `seconds` counts from the header to the last byte; a sender's includes the wait for a receiver,
    which is `waited`. `end` is of the machine's monotonic clock.
    """

    kind: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    seconds: float
    end: float
    waited: float = 0.0


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of `tensor`, in the words of the header.

    Raises:
        ValueError: a dtype that packets do not carry.
    """
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"packets do not carry {tensor.dtype}")
    return TensorSpec(tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype])


class Transport:
    """All links of one rank.

    Args:
        rank: this rank.
        device: where received tensors end up.
        backend: `gloo` or `nccl`, of the payload.
        on_transfer: called from the links' threads when a transfer is over.
        checksum: whether payloads carry a crc32, taken before the wire and compared behind it.
        tamper: changes headers on their way out, to see that it is noticed.
        wall_ahead: seconds by which this host's clock is ahead of rank 0's; what headers say of
            times is by rank 0's.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        backend: str,
        on_transfer: Callable[[Transfer], None],
        *,
        checksum: bool = False,
        tamper: Callable[[int, bytes], bytes] | None = None,
        wall_ahead: float = 0.0,
    ) -> None:
        self._wall_ahead = wall_ahead
        self._rank = rank
        self._on_transfer = on_transfer
        self._checksum = checksum
        self._tamper = tamper
        self._wire = _Wire(device, backend)
        self._inboxes: dict[int, _Link] = {}
        self._outboxes: dict[int, _Link] = {}

    def connect(self, transfers: Iterable[tuple[int, int]]) -> None:
        """Opens this rank's links: each of `transfers` is (from, to), in an order all ranks share.

        The first NCCL message of a pair creates its communicator and blocks
        (pytorch/pytorch#108378), so every pair says hello once, in the same order everywhere.

        Raises:
            TransportError: the other end is gone, or speaks another protocol version.
        """
        for source, target in transfers:
            hello = torch.zeros(1, device=self._wire.device)
            if source == self._rank:
                packet = Packet(_HELLO_CLIP, 0, 0.0, {"hello": hello})
                self._send_now(target, packet)
            elif target == self._rank:
                self._receive_now(source, _HELLO_CLIP, 0, _HELLO)

    def post_receive(
        self, clip: int, next_step: int, peer: int, expected: Mapping[str, TensorSpec]
    ) -> PendingPacket:
        """Begins to receive `clip` from `peer` in the background."""
        link = self._inboxes.setdefault(peer, _Link(f"from-{peer}"))
        future = link.start(lambda: self._receive_now(peer, clip, next_step, expected))
        return PendingPacket(future, self._wire, self._wall_ahead)

    def send(self, packet: Packet, peer: int) -> None:
        """Sends in the background; first waits until the packet before it on this link is gone.

        The tensors must not be changed afterwards.

        Raises:
            TransportError: the packet before could not be sent.
        """
        link = self._outboxes.setdefault(peer, _Link(f"to-{peer}"))
        link.wait()
        payload = self._wire.pack(packet.tensors.values())
        link.start(lambda: self._send_now(peer, packet, payload))

    def drain(self) -> None:
        """Waits until every packet sent has been received.

        Raises:
            TransportError: one of them could not be sent.
        """
        for link in self._outboxes.values():
            link.wait()

    def close(self) -> None:
        """Ends the threads; call after `drain`."""
        for link in (*self._inboxes.values(), *self._outboxes.values()):
            link.close()

    def _send_now(self, peer: int, packet: Packet, payload: torch.Tensor | None = None) -> None:
        begun = time.monotonic()
        link = self._outboxes.setdefault(peer, _Link(f"to-{peer}"))
        if payload is None:
            payload = self._wire.pack(packet.tensors.values())
        with _wire_errors(f"send clip {packet.clip} at step {packet.next_step} to rank {peer}"):
            staged = self._wire.stage(payload)
            header = Header(
                packet.clip,
                packet.next_step,
                link.next_sequence(),
                packet.begun_at - self._wall_ahead,
                tuple((name, tensor_spec(tensor)) for name, tensor in packet.tensors.items()),
                tombstone=packet.tombstone,
                crc=_crc32(staged) if self._checksum and not packet.tombstone else None,
            )
            data = header.pack()
            if self._tamper is not None:
                data = self._tamper(packet.clip, data)
            dist.send(_header_tensor(data), peer)
            taken = time.monotonic()
            if not packet.tombstone:
                self._wire.send(staged, peer)
        self._report("send", header, peer, begun, waited=taken - begun)

    def _receive_now(
        self, peer: int, clip: int, next_step: int, expected: Mapping[str, TensorSpec]
    ) -> tuple[Header, torch.Tensor]:
        link = self._inboxes.setdefault(peer, _Link(f"from-{peer}"))
        what = f"receive clip {clip} at step {next_step} from rank {peer}"
        with _wire_errors(what):
            buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            dist.recv(buffer, peer)
            begun = time.monotonic()
            header = Header.unpack(bytes(buffer.tolist()))
            header.check(
                clip=clip,
                next_step=next_step,
                sequence=link.next_sequence(),
                tensors=expected,
                checksum=self._checksum,
            )
            payload = self._wire.receive(header.num_bytes, peer)
            if header.crc is not None and header.crc != (crc := _crc32(payload)):
                raise TransportError(f"crc32 of the payload: sent {header.crc:08x}, got {crc:08x}")
        self._report("recv", header, peer, begun)
        return header, payload

    def _report(
        self,
        kind: Literal["recv", "send"],
        header: Header,
        peer: int,
        begun: float,
        *,
        waited: float = 0.0,
    ) -> None:
        if header.clip != _HELLO_CLIP:
            end = time.monotonic()
            what = header.clip, header.next_step, peer, header.num_bytes
            seconds = end - begun
            self._on_transfer(Transfer(kind, *what, seconds=seconds, end=end, waited=waited))


class PendingPacket:
    """A packet that is on its way, or there.

    Args:
        future: of its header and payload.
        wire: that brings it.
        wall_ahead: as for `Transport`.
    """

    def __init__(
        self, future: Future[tuple[Header, torch.Tensor]], wire: _Wire, wall_ahead: float = 0.0
    ) -> None:
        self._future = future
        self._wire = wire
        self._wall_ahead = wall_ahead

    def wait(self) -> Packet:
        """Waits for the packet and hands it over; once.

        Raises:
            TransportError: the packet is not the expected one, or the wire broke.
        """
        header, payload = self._future.result()
        self._wire.hand_over(payload)
        tensors = dict(_unpack(payload, header.tensors))
        begun_at = header.begun_at + self._wall_ahead
        return Packet(header.clip, header.next_step, begun_at, tensors, header.tombstone)


class _Link:
    """One direction to one neighbour: a thread, and the number of packets so far.

    What follows a message that went wrong is not what it should be either, and gloo aborts the
    process that receives a payload where it expects a header: so a link that failed is given up.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future[Any] | None = None
        self._sequence = 0
        self._failure: TransportError | None = None

    def start(self, work: Callable[[], _Result]) -> Future[_Result]:
        future = self._pool.submit(self._unless_given_up, work)
        self._last = future
        return future

    def _unless_given_up(self, work: Callable[[], _Result]) -> _Result:
        if self._failure is not None:
            raise TransportError(f"the link was given up before: {self._failure.message}")
        try:
            return work()
        except TransportError as error:
            self._failure = error
            raise

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Wire:
    """How payload bytes travel: device to device under NCCL, through the host under gloo."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self._direct = backend == "nccl"
        # ProcessGroupNCCL is not documented as safe for calls from two threads at once.
        self._enqueue = threading.Lock()

    def pack(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """All bytes end to end, on the rank's device; complete when this returns."""
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        if not parts:
            return torch.empty(0, dtype=torch.uint8)
        flat = torch.cat(parts)
        self._synchronize()
        return flat

    def stage(self, payload: torch.Tensor) -> torch.Tensor:
        """`payload` where the backend takes it from: the device under NCCL, the host under gloo."""
        if self._direct or payload.is_cpu:
            return payload
        return self._copy(payload, self._host_buffer(payload.numel()))

    def send(self, staged: torch.Tensor, peer: int) -> None:
        if self._direct:
            self._wait_direct(lambda: dist.isend(staged, peer))
            return
        assert staged.is_cpu
        dist.send(staged, peer)

    def receive(self, num_bytes: int, peer: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._direct:
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._wait_direct(lambda: dist.irecv(payload, peer))
            return payload
        host = self._host_buffer(num_bytes)
        assert host.is_cpu
        dist.recv(host, peer)
        if self.device.type == "cpu":
            return host
        return self._copy(host, torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    def hand_over(self, payload: torch.Tensor) -> None:
        """Tells CUDA's allocator that memory filled on a link's stream is used on this one."""
        if payload.is_cuda:
            payload.record_stream(torch.cuda.current_stream(self.device))

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Copies between host and device on a stream of its own: behind the denoising's kernels on
        the default stream it would wait for them."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
        return target

    def _wait_direct(self, enqueue: Callable[[], dist.Work | None]) -> None:
        """Runs one NCCL message on a stream of its own, so that the denoising does not wait."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            with self._enqueue:
                work = enqueue()
            if work is not None:
                work.wait()
            torch.cuda.current_stream(self.device).synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _crc32(payload: torch.Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data)


def _header_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(
    payload: torch.Tensor, specs: Iterable[tuple[str, TensorSpec]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in memory of its own: a view into the payload could be misaligned."""
    offset = 0
    for name, spec in specs:
        part = payload[offset : offset + spec.num_bytes].clone()
        offset += spec.num_bytes
        yield name, part.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


@contextmanager
def _wire_errors(what: str) -> Iterator[None]:
    """Turns the backend's RuntimeErrors into ours, which say what was under way."""
    try:
        yield
    except TransportError as error:
        message = f"could not {what}: {error.message}"
        raise TransportError(message, error.hint, details=error.details) from error
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise TransportError(f"could not {what}: {reason}") from error
