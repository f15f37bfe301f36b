"""Point-to-point transport of packets between ranks, by links with background threads.

Each rank has one link for each neighbour, direction and channel. Each link has a thread, so that
transfers overlap with denoising. A packet's header and metadata are always sent from host memory.
With NCCL, the payload is sent from device to device. gloo cannot send CUDA tensors point to point,
so with gloo the payload is copied to pinned host memory and sent from there.

The receiver knows which tensors to expect before the packet arrives, and checks the metadata before
it reads the payload. A difference raises a `MismatchError`, which names the sender.
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

#: Timeout of the process group, which is longer than any run. Stalled ranks are detected by missing
#: heartbeats: a timeout would name the rank that waits, and not the stalled rank. And with a
#: shorter timeout, gloo would close the connection to a rank that computes for that long.
GROUP_TIMEOUT = timedelta(days=7)

# Clip index in the small packets by which `Transport.connect` opens links. No real clip has it.
_HELLO_CLIP = 2**64 - 1

# Pattern for NCCL's messages about CUDA errors, such as "Cuda failure 2 'out of memory'".
_NCCL_CUDA = re.compile(r"Cuda failure(?: \d+)? '([^']*)'", re.IGNORECASE)

#: Kind of the packets on a link. `clips`: states of clips. `predictions`: results of the denoiser,
#: which two ranks that share a step exchange. `decode`: final latents and frames of clips that
#: several ranks decode together.
Channel = Literal["clips", "predictions", "decode"]
Direction = Literal["recv", "send"]
# Identity of a transfer: direction, clip, number of finished steps, and peer rank.
_Ends = tuple[Direction, int, int, int]


class Transfer(NamedTuple):
    """Measured transfer of one packet. The sender and the receiver each measure it."""

    direction: Direction
    clip: int
    next_step: int
    """Index of the clip's next step, which is the number of its finished steps."""
    peer: int
    """Rank at the other end of the link."""
    num_bytes: int
    """Number of bytes of the packet's payload."""
    seconds: float
    """Seconds of the transfer. It begins when the header has arrived, so that the time in which one
    rank waits for the other is left out."""
    waited: float
    """Seconds that the sender waited before the transfer, until the receiver took the header. 0 if
    the receiver measured the transfer."""
    end: float
    """End of the transfer, in seconds on the host's monotonic clock."""


@dataclass(eq=False)
class Transport:
    """All links of one rank, by which it sends packets to other ranks and receives their packets.

    Args:
        rank: Number of the rank.
        device: Device on which received tensors are put.
        backend: Backend of the process group that the rank has joined, `gloo` or `nccl`.
        on_transfer: Callback for each finished transfer on the channel `clips`. It is called in the
            threads of the links.
        checksum: Whether packets that this rank sends contain a CRC-32 of their payload, which the
            receiver checks.
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
        # Process groups by channel and direction (True: packets go to a higher rank). The channel
        # `clips` has no entries, because it uses the default group.
        self._groups: dict[tuple[Channel, bool], Any] = {}
        self.sent: dict[tuple[int, Channel], list[tuple[int, int]]] = defaultdict(list)
        """Packets that were given to `send`, by receiver and channel: a tuple (clip, number of
        finished steps) for each. Predictions and the packets that open links are left out. The
        caller clears the lists."""
        self.bytes_sent = self.bytes_received = 0
        """Number of bytes of the payloads that were sent and received so far, on all channels."""
        # A lock is needed, because ProcessGroupNCCL is not documented as thread-safe.
        self._enqueue = threading.Lock()
        self._counting = threading.Lock()

    def connect(
        self,
        links: Mapping[Channel, Iterable[Iterable[tuple[int, int]]]],
        on_connecting: Callable[[int], None] | None = None,
    ) -> None:
        """Open this rank's links to other ranks, by sending a small packet over each link.

        The first NCCL message between two ranks creates a communicator, and blocks until both ranks
        have called NCCL (pytorch/pytorch#108378). To avoid a deadlock, all ranks open the links in
        the same order, in rounds in which no rank has two links. If two ranks send packets to each
        other, each direction has its own process group: in one communicator, two sends that cross
        would wait for each other.

        Args:
            links: Rounds of links by channel. A link is a tuple (from, to) of ranks. All ranks must
                pass the same rounds; see `plan.actions.connect_rounds`.
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
        """Begin to receive a packet from another rank in the background.

        Args:
            clip: Index of the clip that the packet must have.
            next_step: Number of finished steps that the packet must have. It is also the index of
                the step that comes next.
            peer: Rank that sends the packet.
            channel: Channel of the link.
            known: Specs of some tensors that the packet must have, which are compared with the
                metadata before the payload is read. None: only `PendingPacket.wait` compares
                tensors.
        """
        link = self._link("from", peer, channel)
        ends: _Ends = "recv", clip, next_step, peer
        future = link.start(lambda: self._receive(link, ends, known or {}))
        return PendingPacket(future, self.monotonic_ahead, ends, self.rank)

    def send(self, packet: Packet, peer: int, channel: Channel = "clips") -> None:
        """Wait until the link has sent its previous packet, then send this one in the background.

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

        The process must not end right after this call, because NCCL's buffers may still hold bytes
        that have not been sent.

        Raises:
            TransportError: A packet could not be sent.
        """
        for (direction, *_), link in self._links.items():
            if direction == "to":
                link.wait()

    def close(self) -> None:
        """End the threads of a rank's links. Call `drain` first."""
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
                # payload arrives, which slows down the receiver's denoising. The receiver starts
                # the kernel when it has the header. So the header is sent only when the payload has
                # been computed.
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
                raise TransportError("the packet's metadata is damaged (wrong checksum)")
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
        """Enqueue an NCCL operation, and let the current CUDA stream wait for the operation."""
        with self._enqueue:
            work = enqueue()
        if work is not None:
            work.wait()

    def _report(self, link: _Link, ends: _Ends, size: int, begun: float, waited: float) -> None:
        """Count the bytes of a finished transfer; call `on_transfer` if its channel is `clips`."""
        with self._counting:
            if ends[0] == "send":
                self.bytes_sent += size
            else:
                self.bytes_received += size
        # Transfers on other channels are not reported, because their time is already counted as a
        # part of steps and decodes.
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
        """Wait for a posted packet, check its tensors, and return it; can be called only once.

        Args:
            whole: Function that gets the packet's tensors and returns the specs that they must
                have. (The tensor `structure` is a JSON text that lists all tensors.) The function
                is not called for a tombstone, which is the packet of a failed or cancelled clip.
                None: only the `known` tensors of `post_receive` are compared.

        Returns:
            Packet. The current stream may use its tensors.

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
        """Run one transfer's work, or raise an error if an earlier transfer on this link failed."""
        if self._failure is not None:
            kind: type[RankError] = BrokenLinkError
            if isinstance(self._failure, TransportError):
                kind = type(self._failure)
            details = getattr(self._failure, "details", {})
            raise kind(f"an earlier transfer on this link failed: {self._failure}", details=details)
        try:
            return work()
        except Exception as error:
            self._failure = error
            raise

    def wait(self) -> None:
        """Wait for a link's last transfer (see `start`), and raise its exception if it failed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _receive_bytes(number: int, link: _Link) -> bytes:
    buffer = torch.zeros(number, dtype=torch.uint8)
    dist.recv(buffer, link.peer, group=link.group)
    return buffer.numpy().tobytes()


def _attempt(ends: _Ends, rank: int) -> tuple[str, dict[str, Any]]:
    """Return a description of a transfer, and the `details` of errors about it.

    Descriptions can follow "could not", such as "send clip 3 at step 14 to rank 1".
    """
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

    If memory ran out or the GPU failed, this rank is the cause. A `BrokenLinkError` is often caused
    by the failure of another rank; the parent process finds out which rank failed first.

    Args:
        attempt: Description of the transfer that can follow "could not", such as "send clip 3 at
            step 14 to rank 1".
        details: Details of the transfer, which are added to the details of the error; None: no
            details are added.

    Raises:
        OutOfMemoryError: The backend reports that memory ran out.
        DeviceError: The GPU failed.
        BrokenLinkError: The backend raised any other RuntimeError.
        TransportError: The block raised a TransportError; the new error has the same type.
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
            "use fewer frames, or use a smaller `height` and `width`, or use `memory_opt`",
            details={**details, **memory_details(error)},
        )
    if cuda is not None or isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"could not {attempt}: CUDA error: {cuda[1] if cuda else first_line(error)}",
            "the GPU or its driver failed: see `nvidia-smi -q` and `dmesg | grep Xid`",
            details=details,
        )
    # NCCL's messages end with "Last error:" and the cause.
    _, _, last = text.partition("Last error:")
    cause = f" (last error: {first_line(last)})" if last else ""
    details["cause"] += cause
    message = f"could not {attempt}: {first_line(error)}{cause}"
    return BrokenLinkError(message, details=details)
