"""Point-to-point transport of packets between ranks, by links with background threads.

Each rank has one link for each neighbour, direction and channel. Each link has a thread, so that
transfers overlap with denoising. Header and metadata are messages between CPUs. With NCCL, the
payload is sent from device to device. gloo does not send CUDA tensors point to point, so with gloo
the payload is sent through pinned host memory.

The receiver knows the expected tensors before the packet arrives, and checks the metadata before it
reads the payload. A difference raises a `MismatchError`, which names the sender.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from svdpp.comm import streams
from svdpp.comm.packet import (
    HEADER_BYTES,
    Header,
    Packet,
    PacketMetadata,
    Specs,
    check_tensors,
    flatten,
    mismatch,
    pack_metadata,
)
from svdpp.errors import (
    BrokenLinkError,
    DeviceError,
    OutOfMemoryError,
    RankError,
    TransportError,
    first_line,
    is_out_of_memory,
    memory_details,
)

_Result = TypeVar("_Result")

#: Timeout of the process group, which is longer than any run. Heartbeats detect stalled ranks: they
#: name the stalled rank, while a timeout would name the rank that waits for it. With a shorter
#: timeout, gloo would also close the connection to a rank that computes for longer.
GROUP_TIMEOUT = timedelta(days=7)

# Clip index in the packets that open links; no real clip has this index.
_HELLO_CLIP = 2**64 - 1

# Pattern for messages of NCCL such as "Cuda failure 2 'out of memory'"
_NCCL_CUDA = re.compile(r"Cuda failure(?: \d+)? '([^']*)'", re.IGNORECASE)

#: Kind of the packets on a link: states of clips (`clips`), predictions that the two ranks of a
#: pair exchange in each step (`predictions`), or final latents and frames of clips that several
#: ranks decode (`decode`).
Channel = Literal["clips", "predictions", "decode"]
Direction = Literal["recv", "send"]
# Identity of a transfer: direction, clip, number of finished steps, and peer rank.
_Ends = tuple[Direction, int, int, int]


class Transfer(NamedTuple):
    """Measurement of the transfer of one packet, by the sender or by the receiver."""

    direction: Direction
    clip: int
    next_step: int
    """Number of finished steps of the clip."""
    peer: int
    """Rank at the other end of the link."""
    num_bytes: int
    """Number of bytes of the packet's payload."""
    seconds: float
    """Seconds from the end of the header to the last byte of the payload."""
    waited: float
    """Seconds that the sender waited until the receiver took the header; 0 if measured by the
    receiver."""
    end: float
    """End of the transfer, in seconds on the host's monotonic clock."""


@dataclass(eq=False)
class Transport:
    """All links of one rank, over which the rank sends packets to other ranks and receives packets.

    Args:
        rank: Number of the rank.
        device: Device on which received tensors are put.
        backend: Backend of the process group that the rank has joined, `gloo` or `nccl`.
        on_transfer: Callback for each finished transfer of a clip. It is called in the threads of
            the links.
        checksum: Whether the sender computes a CRC-32 of each payload, and the receiver checks it.
        monotonic_ahead: Seconds by which this host's monotonic clock is ahead of the clock of rank
            0. Times in packets are times of rank 0's clock.
    """

    rank: int
    device: torch.device
    backend: str
    on_transfer: Callable[[Transfer], None]
    checksum: bool = False
    monotonic_ahead: float = 0.0

    def __post_init__(self) -> None:
        self._direct = self.backend == "nccl"
        self._links: dict[tuple[str, int, Channel], _Link] = {}
        # Process groups of all channels except `clips`, by channel and direction (True: packets go
        # to a higher rank).
        self._groups: dict[tuple[Channel, bool], Any] = {}
        self.sent: dict[tuple[int, Channel], list[tuple[int, int]]] = defaultdict(list)
        """Clip and number of finished steps of each packet that `send` got, by receiver and
        channel. Predictions and the packets that open links are not listed. The caller clears the
        lists."""
        self.bytes_sent = self.bytes_received = 0
        """Number of bytes of all payloads sent so far, on all channels. `bytes_received` is the
        same for received payloads."""
        # A lock is needed, because ProcessGroupNCCL is not documented as thread-safe.
        self._enqueue = threading.Lock()
        self._counting = threading.Lock()

    def connect(
        self,
        links: Mapping[Channel, Iterable[Iterable[tuple[int, int]]]],
        on_connecting: Callable[[int], None] | None = None,
    ) -> None:
        """Open this rank's links by sending a small packet on each link.

        The first NCCL message between two ranks creates a communicator, and blocks until both ranks
        have called NCCL (pytorch/pytorch#108378). All ranks therefore follow the same rounds of
        disjoint pairs of ranks. If packets are sent in both directions between two ranks, each
        direction has its own process group, because sends that cross in one communicator would wait
        for each other.

        Args:
            links: Rounds of pairs (from, to), by channel, which must be the same on all ranks; see
                `plan.actions.connect_rounds`.
            on_connecting: Callback that gets the rank at the other end of each link, before the
                link opens; None: no callback.

        Raises:
            TransportError: A link could not be opened.
        """
        in_order = [
            (channel, *ends) for channel, rounds in links.items() for ends in chain(*rounds)
        ]
        for channel in dict.fromkeys(channel for channel, *_ in in_order):
            for is_up in (True, False) if channel != "clips" else ():
                self._groups[channel, is_up] = dist.new_group(timeout=GROUP_TIMEOUT)
        for channel, source, target in in_order:
            if self.rank not in (source, target):
                continue
            if on_connecting is not None:
                on_connecting(target if source == self.rank else source)
            if source == self.rank:
                hello = torch.zeros(1, device=self.device)
                self.send(Packet(_HELLO_CLIP, 0, 0.0, {"hello": hello}), target, channel)
                self._link("to", target, channel).wait()
            else:
                self.post_receive(_HELLO_CLIP, 0, source, channel).wait()
        self.sent.clear()
        self.bytes_sent = self.bytes_received = 0

    def post_receive(
        self,
        clip: int,
        next_step: int,
        peer: int,
        channel: Channel = "clips",
        known: Specs | None = None,
    ) -> PendingPacket:
        """Begin to receive a packet in the background.

        Args:
            clip: Index of the clip that the packet must have.
            next_step: Number of finished steps that the packet must have.
            peer: Rank that sends the packet.
            channel: Channel of the link.
            known: Specs of some tensors that the packet must have. They are compared before the
                payload is read. None: only `PendingPacket.wait` compares tensors.
        """
        link = self._link("from", peer, channel)
        ends: _Ends = "recv", clip, next_step, peer
        future = link.start(lambda: self._receive(link, ends, known or {}))
        return PendingPacket(future, self.monotonic_ahead, ends, self.rank)

    def send(self, packet: Packet, peer: int, channel: Channel = "clips") -> None:
        """Send a packet in the background, after waiting for the previous packet on this link.

        Args:
            packet: Packet, whose tensors must not change after the call.
            peer: Rank that receives the packet.
            channel: Channel of the link.

        Raises:
            TransportError: The previous packet could not be sent.
        """
        if channel != "predictions":
            self.sent[peer, channel].append((packet.clip, packet.next_step))
        link = self._link("to", peer, channel)
        link.wait()
        payload = flatten(packet.tensors, self.device)
        after = streams.record_event(self.device)
        link.start(lambda: self._send(link, packet, payload, after))

    def drain(self) -> None:
        """Wait until the memory of all sent packets may be reused.

        Even then the process must not end yet, because bytes may still be in NCCL's buffers.

        Raises:
            TransportError: A packet could not be sent.
        """
        for (direction, *_), link in self._links.items():
            if direction == "to":
                link.wait()

    def close(self) -> None:
        """End the threads of the links. Call `drain` first."""
        for link in self._links.values():
            link.close()

    def _link(self, direction: Literal["from", "to"], peer: int, channel: Channel) -> _Link:
        key = direction, peer, channel
        if key not in self._links:
            is_up = (peer > self.rank) == (direction == "to")
            group = self._groups.get((channel, is_up))
            self._links[key] = _Link(peer, f"{direction}-{peer}", self.device, channel, group)
        return self._links[key]

    def _send(
        self, link: _Link, packet: Packet, payload: torch.Tensor, after: streams.Event
    ) -> None:
        clip, step = packet.clip, packet.next_step
        ends: _Ends = "send", clip, step, link.peer
        with translated_errors(*_attempt(ends, self.rank)):
            if self._direct:
                # NCCL's receive is a kernel that occupies multiprocessors of the receiver until the
                # bytes arrive, and would slow down the receiver's computation. The receiver starts
                # this kernel when it has the header, so the header is sent only when the bytes
                # exist.
                streams.wait_for_event(after)
            staged = payload if self._direct else link.stream.to_host(payload, after)
            checked = self.checksum and not packet.tombstone
            crc = zlib.crc32(link.stream.to_host(staged, after).numpy().data) if checked else None
            packet = replace(packet, begun_at=packet.begun_at - self.monotonic_ahead)
            metadata = pack_metadata(packet, self.device, crc)
            header = Header(len(metadata), zlib.crc32(metadata), payload.numel()).pack()
            begun = time.monotonic()
            for message in (header, metadata):
                content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                dist.send(content, link.peer, group=link.group)
            reached = time.monotonic()
            if payload.numel() and self._direct:
                with link.stream.stream_context(after):
                    self._run_nccl(lambda: dist.isend(staged, link.peer, group=link.group))
            elif payload.numel():
                dist.send(staged, link.peer, group=link.group)
        self._report(link, ends, payload.numel(), reached, reached - begun)

    def _receive(
        self, link: _Link, ends: _Ends, known: Specs
    ) -> tuple[PacketMetadata, torch.Tensor]:
        _, clip, next_step, _ = ends
        with translated_errors(*_attempt(ends, self.rank)):
            data = _receive_bytes(HEADER_BYTES, link)
            begun = time.monotonic()
            header = Header.unpack(data)
            data = _receive_bytes(header.metadata_bytes, link)
            if zlib.crc32(data) != header.crc:
                raise TransportError("a packet's metadata is damaged")
            metadata = PacketMetadata(data)
            metadata.check(clip, next_step, header.num_bytes, known)
            payload = self._receive_payload(link, header.num_bytes)
            if (sent := metadata.crc) is not None:
                crc = zlib.crc32(link.stream.to_host(payload).numpy().data)
                if crc != sent:
                    found = f"{sent:08x}", f"{crc:08x}"
                    raise mismatch("crc32 of the payload", "crc32", *found)
        self._report(link, ends, payload.numel(), begun, 0.0)
        return metadata, payload

    def _receive_payload(self, link: _Link, num_bytes: int) -> torch.Tensor:
        stream = link.stream
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if self._direct:
            with stream.stream_context():
                payload = stream.empty(num_bytes)
                self._run_nccl(lambda: dist.irecv(payload, link.peer, group=link.group))
            return payload
        host = stream.host_buffer((num_bytes,), torch.uint8)
        dist.recv(host, link.peer, group=link.group)
        return stream.to_device(host)

    def _run_nccl(self, enqueue: Callable[[], dist.Work | None]) -> None:
        """Enqueue an NCCL operation, and make the current stream wait for its end."""
        with self._enqueue:
            work = enqueue()
        if work is not None:
            work.wait()

    def _report(self, link: _Link, ends: _Ends, size: int, begun: float, waited: float) -> None:
        """Count the bytes of a finished transfer, and report a transfer of a clip's state."""
        with self._counting:
            if ends[0] == "send":
                self.bytes_sent += size
            else:
                self.bytes_received += size
        # Transfers on other channels are not reported, because steps and decodes include their
        # time.
        if ends[1] != _HELLO_CLIP and link.channel == "clips":
            end = time.monotonic()
            self.on_transfer(Transfer(*ends, size, end - begun, waited, end))


@dataclass(frozen=True)
class PendingPacket:
    """Packet whose receive has been posted, and that may not have arrived yet."""

    _future: Future[tuple[PacketMetadata, torch.Tensor]]
    _monotonic_ahead: float
    _ends: _Ends
    _rank: int

    def wait(self, whole: Callable[[Mapping[str, torch.Tensor]], Specs] | None = None) -> Packet:
        """Wait for the packet, and return it. This method can be called only once.

        Args:
            whole: Function that gets the packet's tensors (including the structure, which lists all
                tensors) and returns the specs that all tensors must have. It is not called for a
                tombstone. None: only the `known` tensors of `post_receive` are compared.

        Returns:
            Packet, whose tensors the current stream may use.

        Raises:
            MismatchError: The packet is not the expected packet.
            TransportError: The packet could not be received.
        """
        metadata, payload = self._future.result()
        streams.record_stream(payload)
        packet = metadata.packet(payload)
        packet.begun_at += self._monotonic_ahead
        if whole is not None and not packet.tombstone:
            with translated_errors(*_attempt(self._ends, self._rank)):
                check_tensors(metadata.specs, whole(packet.tensors))
        return packet


class _Link:
    """Link to one neighbour for one direction and channel, with its own thread and stream.

    A link cannot be used after a failure, because the next message could be the rest of the failed
    packet, and gloo aborts a process that receives a payload instead of a header.
    """

    def __init__(
        self, peer: int, name: str, device: torch.device, channel: Channel, group: Any
    ) -> None:
        self.peer, self.channel, self.group = peer, channel, group
        self.stream = streams.SideStream(device)
        self._thread = streams.single_thread_executor(name, device)
        self._last: Future[Any] | None = None
        self._failure: Exception | None = None

    def start(self, work: Callable[[], _Result]) -> Future[_Result]:
        self._last = future = self._thread.submit(self._unless_failed, work)
        return future

    def _unless_failed(self, work: Callable[[], _Result]) -> _Result:
        """Call a function, unless an earlier call on this link has failed."""
        if self._failure is not None:
            kind: type[RankError] = BrokenLinkError
            if isinstance(self._failure, TransportError):
                kind = type(self._failure)
            details = getattr(self._failure, "details", {})
            raise kind(f"the link failed before: {self._failure}", details=details)
        try:
            return work()
        except Exception as error:
            self._failure = error
            raise

    def wait(self) -> None:
        """Wait for the last call of `start`, and raise its exception if it failed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _receive_bytes(number: int, link: _Link) -> bytes:
    buffer = torch.zeros(number, dtype=torch.uint8)
    dist.recv(buffer, link.peer, group=link.group)
    return buffer.numpy().tobytes()


def _attempt(ends: _Ends, rank: int) -> tuple[str, dict[str, Any]]:
    """Return a transfer in words, such as `send clip 3`, and the details of its error."""
    direction, clip, step, peer = ends
    is_send, is_hello = direction == "send", clip == _HELLO_CLIP
    details = {"clip": clip, "step": step}
    if is_send:
        details |= {"from_rank": rank, "to_rank": peer}
        what = "open the link" if is_hello else f"send clip {clip} at step {step}"
        return f"{what} to rank {peer}", details
    details |= {"from_rank": peer, "to_rank": rank}
    what = "open the link" if is_hello else f"receive clip {clip} at step {step}"
    return f"{what} from rank {peer}", details


@contextlib.contextmanager
def translated_errors(attempt: str, details: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn RuntimeErrors of gloo or NCCL in the `with` block into errors that name the transfer.

    An out-of-memory error or a GPU error is a failure of this rank. A `BrokenLinkError` is often
    caused by another rank, which the parent then finds.

    Args:
        attempt: Description of the transfer, as the end of a sentence that begins with "could not".
        details: Details of the transfer, which are added to the details of the error; None: no
            details are added.

    Raises:
        OutOfMemoryError: The backend reports that memory ran out.
        DeviceError: The GPU failed.
        BrokenLinkError: The backend raised any other RuntimeError.
        TransportError: The block raised a TransportError. The raised error has the same type.
    """
    try:
        yield
    except TransportError as error:
        message = f"could not {attempt}: {error.message}"
        known = {**(details or {}), **error.details}
        raise type(error)(message, error.hint, details=known) from error
    except RuntimeError as error:
        raise _translated(error, attempt, dict(details or {})) from error


def _translated(error: RuntimeError, attempt: str, details: dict[str, Any]) -> Exception:
    text = str(error).strip()
    details["cause"] = first_line(error)
    cuda = _NCCL_CUDA.search(text)
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"out of memory{' in NCCL' if cuda else ''}: could not {attempt}",
            "fewer frames, a smaller `height` and `width`, or `memory_opt` need less memory",
            details={**details, **memory_details(error)},
        )
    if cuda is not None or isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"could not {attempt}: CUDA error: {cuda[1] if cuda else first_line(error)}",
            "the GPU or its driver failed: see `nvidia-smi -q` and `dmesg | grep Xid`",
            details=details,
        )
    # a message of NCCL ends with "Last error:" and the cause
    _, _, last = text.partition("Last error:")
    cause = f" (last error: {first_line(last)})" if last else ""
    details["cause"] += cause
    message = f"could not {attempt}: {first_line(error)}{cause}"
    return BrokenLinkError(message, details=details)
