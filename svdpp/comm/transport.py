"""Transport of packets between ranks, point to point, by links with background threads.

Each rank has a link for each neighbour and direction. Each link has a thread, so that transfers
overlap with denoising. Header and metadata are separate messages between CPUs. Under NCCL the
payload goes from device to device. Under gloo, which does not send CUDA tensors point to point, the
payload goes through pinned host memory.

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

#: Timeout of the process group, longer than any run. Stalls are detected by heartbeats, which name
#: the stalled rank instead of the one that waits for it. A shorter timeout would also make gloo
#: close the connection to a rank that computes for longer.
GROUP_TIMEOUT = timedelta(days=7)

# Clip index in the packet that opens a link. No real clip has this index.
_HELLO_CLIP = 2**64 - 1

# Matches, for example: Cuda failure 2 'out of memory'
_NCCL_CUDA = re.compile(r"Cuda failure(?: \d+)? '([^']*)'", re.IGNORECASE)

#: Content of a link: packets of clips, predictions that a pair exchanges at each step, or final
#: latents and frames of clips that several ranks decode.
Channel = Literal["clips", "predictions", "decode"]
Direction = Literal["recv", "send"]
# Direction, clip, number of steps done, and peer of a transfer.
_Ends = tuple[Direction, int, int, int]


class Transfer(NamedTuple):
    """Transfer of one packet, as its sender or its receiver measured it."""

    direction: Direction
    clip: int
    next_step: int
    """Number of steps done."""
    peer: int
    """Rank at the other end."""
    num_bytes: int
    """Number of bytes of the payload."""
    seconds: float
    """Seconds from the end of the header to the last byte of the payload."""
    waited: float
    """Seconds until the receiver took the header; 0 at the receiver."""
    end: float
    """Time of the end, in seconds on the host's monotonic clock."""


@dataclass(eq=False)
class Transport:
    """All links of one rank.

    Args:
        rank: Number of the rank.
        device: Device on which received tensors are put.
        backend: Backend of the process group that the rank has joined, `gloo` or `nccl`.
        on_transfer: Callback for each finished transfer of a clip; called from the links' threads.
        checksum: Whether the sender computes a CRC-32 of each payload, and the receiver checks it.
        monotonic_ahead: Seconds by which this host's monotonic clock is ahead of rank 0's. Times in
            packets are on rank 0's clock.
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
        # Process groups of the channels other than `clips`, by channel and direction (True: to a
        # higher rank).
        self._groups: dict[tuple[Channel, bool], Any] = {}
        self.sent: dict[tuple[int, Channel], list[tuple[int, int]]] = defaultdict(list)
        """Clip and steps done of each packet given to `send`, by receiver and channel, until the
        caller clears it. Predictions and the packets that open links are left out."""
        self.bytes_sent = self.bytes_received = 0
        """Number of bytes of payloads so far, on all channels."""
        # ProcessGroupNCCL is not documented as thread-safe.
        self._enqueue = threading.Lock()
        self._counting = threading.Lock()

    def connect(
        self,
        links: Mapping[Channel, Iterable[Iterable[tuple[int, int]]]],
        on_connecting: Callable[[int], None] | None = None,
    ) -> None:
        """Open this rank's links by sending a small packet on each.

        The first NCCL message of a pair creates its communicator and blocks until both ranks have
        called it (pytorch/pytorch#108378). All ranks therefore follow the same rounds of disjoint
        pairs. If packets go both ways between two ranks, each direction has a process group,
        because sends that cross would wait for each other in one communicator.

        Args:
            links: Rounds of pairs (from, to) by channel, the same on all ranks; see
                `plan.actions.connect_rounds`.
            on_connecting: Callback that gets the other rank of each link before it opens; None:
                none.

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
            clip: Clip that the packet must have.
            next_step: Number of steps done that the packet must have.
            peer: Rank that sends the packet.
            channel: Channel of the link.
            known: Specs of some tensors that the packet must have, which are compared before the
                payload is read. None: only `PendingPacket.wait` compares tensors.
        """
        link = self._link("from", peer, channel)
        ends: _Ends = "recv", clip, next_step, peer
        future = link.start(lambda: self._receive(link, ends, known or {}))
        return PendingPacket(future, self.monotonic_ahead, ends, self.rank)

    def send(self, packet: Packet, peer: int, channel: Channel = "clips") -> None:
        """Send a packet in the background, after waiting for the previous one on this link.

        Args:
            packet: Packet, whose tensors must not change afterwards.
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

        Bytes may still be in NCCL's buffers, so the process must live until they are received.

        Raises:
            TransportError: A packet could not be sent.
        """
        for (direction, *_), link in self._links.items():
            if direction == "to":
                link.wait()

    def close(self) -> None:
        """End the threads of the links, after `drain`."""
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
                # A receive that NCCL has enqueued spins on the receiver's multiprocessors until the
                # bytes come, and the partner of a pair would compute beside that kernel. The
                # header, at which the receiver enqueues it, is therefore sent only once the bytes
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
        with self._enqueue:
            work = enqueue()
        if work is not None:
            work.wait()

    def _report(self, link: _Link, ends: _Ends, size: int, begun: float, waited: float) -> None:
        with self._counting:
            if ends[0] == "send":
                self.bytes_sent += size
            else:
                self.bytes_received += size
        # Transfers of other channels are part of the times of steps and decodes.
        if ends[1] != _HELLO_CLIP and link.channel == "clips":
            end = time.monotonic()
            self.on_transfer(Transfer(*ends, size, end - begun, waited, end))


@dataclass(frozen=True)
class PendingPacket:
    """Packet that is being received."""

    _future: Future[tuple[PacketMetadata, torch.Tensor]]
    _monotonic_ahead: float
    _ends: _Ends
    _rank: int

    def wait(self, whole: Callable[[Mapping[str, torch.Tensor]], Specs] | None = None) -> Packet:
        """Wait for the packet. May be called once.

        Args:
            whole: Function that gets the packet's tensors, one of which names the others, and
                returns the specs that all tensors must have. It is not called for a tombstone.
                None: only the `known` tensors of `post_receive` are compared.

        Returns:
            Packet, whose tensors the current stream may use.

        Raises:
            MismatchError: The packet is not the expected one.
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
    """Link to one neighbour, in one direction and channel, with a thread and a stream.

    A link stays closed after a failure: the next message would not be the expected one either, and
    gloo aborts a process that receives a payload instead of a header.
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
    """Return description and details of a transfer, for its errors."""
    direction, clip, step, peer = ends
    details = {"clip": clip, "step": step}
    if direction == "send":
        details |= {"from_rank": rank, "to_rank": peer}
        return f"send clip {clip} at step {step} to rank {peer}", details
    details |= {"from_rank": peer, "to_rank": rank}
    return f"receive clip {clip} at step {step} from rank {peer}", details


@contextlib.contextmanager
def translated_errors(attempt: str, details: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn a RuntimeError of the backend into an error that names the failed transfer.

    A lack of memory or an error of the GPU is a failure of this rank. For a `BrokenLinkError`, the
    parent may find the cause in another rank.

    Args:
        attempt: Description of the transfer, after "could not".
        details: Details of the transfer, which are added to those of the error; None: none.

    Raises:
        OutOfMemoryError: The backend reports that memory ran out.
        DeviceError: The GPU failed.
        BrokenLinkError: The backend raised any other RuntimeError.
        TransportError: The block raised a TransportError, whose type is kept.
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
            "fewer frames, a smaller `height` and `width`, or `memory_opt` need less",
            details={**details, **memory_details(error)},
        )
    if cuda is not None or isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"could not {attempt}: CUDA error: {cuda[1] if cuda else first_line(error)}",
            "the GPU or its driver failed: see `nvidia-smi -q` and `dmesg | grep Xid`",
            details=details,
        )
    _, _, last = text.partition("Last error:")  # part of NCCL's messages
    cause = f" (last error: {first_line(last)})" if last else ""
    details["cause"] += cause
    message = f"could not {attempt}: {first_line(error)}{cause}"
    return BrokenLinkError(message, details=details)
