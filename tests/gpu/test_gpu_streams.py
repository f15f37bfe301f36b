"""Streams never read or write memory too early. Each test also shows that the wrong way fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.transport import Transport
from svdpp.config import ClipRequest
from svdpp.models.base import LATENTS
from svdpp.worker.background import ClipWriter, LatentCheckpointWriter
from svdpp.worker.messages import ClipJob
from svdpp.worker.tensor_files import LatentCheckpoints, TensorStore
from tests.gpu.machine import Report

pytestmark = pytest.mark.no_rehearsal

SIZE = 8 * 2**20
FRAMES = (8, 512, 512, 3)
# The sleep lasts a few tenths of a second at 1 to 2 GHz, which is longer than a copy of 8 MB takes.
SLEEP_CYCLES = 500_000_000
DEVICE = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _device() -> None:
    streams.use_device(DEVICE)
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()


def _leave_a_block_in_use() -> None:
    """Free a block of GPU memory to which queued kernels still write after a long wait."""
    block = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(SLEEP_CYCLES)
    block.fill_(7)
    del block


def _received_safely(host: torch.Tensor) -> torch.Tensor:
    return streams.SideStream(DEVICE).to_device(host)


def _received_wrongly(host: torch.Tensor) -> torch.Tensor:
    """Receive a packet in the wrong way: allocate memory before entering the side stream."""
    payload = torch.empty_like(host, device=DEVICE)
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        payload.copy_(host, non_blocking=True)
        side.synchronize()
    return payload


def _is_whole_after(receive: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    host = torch.full((SIZE,), 3, dtype=torch.uint8).pin_memory()
    _leave_a_block_in_use()
    payload = receive(host)
    torch.cuda.synchronize()
    return bool((payload == 3).all())


def test_a_received_packet_is_not_overwritten_by_queued_kernels(report: Report) -> None:
    safe = [_is_whole_after(_received_safely) for _ in range(20)]
    torch.cuda.empty_cache()
    wrong = [_is_whole_after(_received_wrongly) for _ in range(5)]
    report.add("stream race", safe_ways_whole=sum(safe), of=20, wrong_ways_whole=sum(wrong))
    assert all(safe)
    assert not all(wrong), "the wrong way did no harm: this test shows nothing"


def test_a_freed_packet_is_not_reused_while_it_is_read(report: Report) -> None:
    side = streams.SideStream(DEVICE)
    threes = torch.full((SIZE,), 3, dtype=torch.uint8).pin_memory()
    nines = torch.full((SIZE,), 9, dtype=torch.uint8).pin_memory()

    def copied(*, lent: bool) -> torch.Tensor:
        payload = side.to_device(threes)
        if lent:
            streams.record_stream(payload)
        torch.cuda._sleep(SLEEP_CYCLES)
        copy = payload.clone()
        del payload
        side.to_device(nines)
        torch.cuda.synchronize()
        return copy

    lent = [bool((copied(lent=True) == 3).all()) for _ in range(10)]
    torch.cuda.empty_cache()
    kept = [bool((copied(lent=False) == 3).all()) for _ in range(5)]
    report.add("memory lent to another stream", lent_whole=sum(lent), of=10, not_lent=sum(kept))
    assert all(lent)
    assert not all(kept), "without record_stream() nothing went wrong: this test shows nothing"


class Wire:
    """Stand-in for the other rank's end of a link: it returns sent tensors to receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: deque[torch.Tensor] = deque()
        for name in ("send", "isend"):
            monkeypatch.setattr(dist, name, self._send)
        for name in ("recv", "irecv"):
            monkeypatch.setattr(dist, name, self._receive)

    def _send(self, tensor: torch.Tensor, _: int, group: None) -> None:  # noqa: ARG002
        self.sent.append(tensor.clone())

    def _receive(self, memory: torch.Tensor, _: int, group: None) -> None:  # noqa: ARG002
        memory.copy_(self.sent.popleft(), non_blocking=True)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def _transport(backend: str) -> Transport:
    return Transport(0, DEVICE, backend, lambda _: None)


def _send(tensor: torch.Tensor, backend: str) -> None:
    transport = _transport(backend)
    transport.send(Packet(0, 1, 0.0, {LATENTS: tensor}), 1)
    transport.drain()
    transport.close()


def _over_nccl(tensor: torch.Tensor, wire: Wire, _: Path) -> torch.Tensor:
    _send(tensor, "nccl")
    return wire.sent[-1].cpu()


def _over_gloo(tensor: torch.Tensor, wire: Wire, _: Path) -> torch.Tensor:
    _send(tensor, "gloo")
    return wire.sent[-1]


def _in_latent_checkpoint(tensor: torch.Tensor, _: Wire, folder: Path) -> torch.Tensor:
    reporter, checkpoints = Mock(), LatentCheckpoints(folder, {})
    writer = LatentCheckpointWriter(checkpoints, DEVICE, reporter)
    writer.put("0" * 64, Packet(0, 1, 0.0, {LATENTS: tensor}))
    writer.finish()
    assert [name for name, *_ in reporter.method_calls] == ["writers.append"]
    return checkpoints.load("0" * 64, 0, 1, torch.device("cpu")).tensors[LATENTS]


def _in_frames(tensor: torch.Tensor, _: Wire, folder: Path) -> torch.Tensor:
    kept, reporter = TensorStore(folder), Mock()
    writer = ClipWriter(reporter, {}, DEVICE, kept)
    writer.put(
        ClipJob(clip=0, request=ClipRequest(seed=0)),
        Packet(0, 1, 0.0, {LATENTS: torch.zeros(1)}),
        tensor,
    )
    writer.finish()
    assert [name for name, *_ in reporter.method_calls] == ["writers.append", "send"]
    return kept.load(0, "frames")["frames"]


def _on_host(tensor: torch.Tensor, _: Wire, __: Path) -> torch.Tensor:
    host = streams.SideStream(DEVICE).to_host(tensor, streams.record_event(DEVICE))
    assert host.is_pinned()
    return host


@pytest.mark.parametrize(
    "leave", [_on_host, _over_nccl, _over_gloo, _in_latent_checkpoint, _in_frames]
)
def test_what_leaves_the_device_waits_for_the_kernel_that_writes_it(
    leave: Callable[[torch.Tensor, Wire, Path], torch.Tensor],
    wire: Wire,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_whole_after(value: int) -> bool:
        tensor = torch.zeros(FRAMES, dtype=torch.uint8, device=DEVICE)
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor.fill_(value)
        return bool((leave(tensor, wire, tmp_path) == value).all())

    assert is_whole_after(5)
    stream_context = streams.SideStream.stream_context
    monkeypatch.setattr(
        streams.SideStream,
        "stream_context",
        lambda self, after=None: stream_context(self),  # noqa: ARG005
    )
    # Over NCCL, the host waits for the event too, so that no kernel of the receiver spins. That
    # wait is removed as well.
    monkeypatch.setattr(streams, "wait_for_event", lambda event: None)  # noqa: ARG005
    assert not is_whole_after(6), "without its event the copy did no harm: this test shows nothing"


def _receive(transport: Transport, clip: int) -> torch.Tensor:
    return transport.post_receive(clip, 1, 1).wait().tensors[LATENTS]


def _sent_packets(wire: Wire, values: Sequence[int]) -> Transport:
    """Return a transport that can receive a packet for each of `values`, filled with that value."""
    sender = _transport("nccl")
    for clip, value in enumerate(values):
        packet = torch.full(FRAMES, value, dtype=torch.uint8, device=DEVICE)
        sender.send(Packet(clip, 1, 0.0, {LATENTS: packet}), 1)
    sender.drain()
    sender.close()
    torch.cuda.synchronize()
    wire.sent = deque(tensor.cpu().pin_memory() for tensor in wire.sent)
    torch.cuda.empty_cache()
    return _transport("nccl")


def test_a_packet_is_received_into_memory_that_no_queued_kernel_uses(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_whole() -> bool:
        transport = _sent_packets(wire, [3])
        _leave_a_block_in_use()
        received = _receive(transport, 0)
        torch.cuda.synchronize()
        return bool((received == 3).all())

    def empty(_: streams.SideStream, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream(DEVICE)):
            return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)

    assert is_whole()
    monkeypatch.setattr(streams.SideStream, "empty", empty)
    assert not is_whole(), "memory of another stream did no harm: this test shows nothing"


def test_a_received_packet_keeps_its_memory_until_queued_kernels_have_read_it(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_whole() -> bool:
        transport = _sent_packets(wire, [3, 9, 9])
        torch.cuda._sleep(SLEEP_CYCLES)
        received = _receive(transport, 0)
        for clip in (1, 2):  # a link keeps its last packet
            _receive(transport, clip)
        torch.cuda.synchronize()
        return bool((received == 3).all())

    assert is_whole()
    monkeypatch.setattr(streams, "record_stream", lambda _: None)
    assert not is_whole(), "without record_stream() nothing went wrong: this test shows nothing"


def test_a_flag_and_a_step_are_read_without_a_stop() -> None:
    before = streams.AsyncFlag(DEVICE)
    torch.cuda._sleep(SLEEP_CYCLES)
    after = streams.AsyncFlag(DEVICE, torch.isfinite(torch.ones(4, device=DEVICE)).all())
    assert after.wait()
    assert after.seconds_since(before) > 0.05
