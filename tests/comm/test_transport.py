"""Transport of packets between ranks: complete, in order, with back-pressure; invalid packets are
refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from svdpp.comm.packet import (
    HEADER_BYTES,
    Header,
    Packet,
    PacketMetadata,
    TensorSpec,
    check_tensors,
    pack_metadata,
)
from svdpp.comm.transport import Transfer, Transport, translated_errors
from svdpp.errors import (
    BrokenLinkError,
    DeviceError,
    MismatchError,
    OutOfMemoryError,
    TransportError,
)
from svdpp.launch.worker_group import LaunchContext, start_ranks
from svdpp.plan.actions import connect_rounds
from tests.support.dummies import HANG_SECONDS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RankFunction = Callable[..., Any]


def run_ranks(
    function: RankFunction, world_size: int, *arguments: Any, timeout: float = HANG_SECONDS
) -> list[Any]:
    """Start ranks that call `function(context, *arguments)`; return the results by rank.

    If a rank fails, the test fails with that rank's output.
    """
    group = start_ranks(
        _call,
        (function, arguments),
        world_size=world_size,
        backend="gloo",
        preload=["svdpp.worker.rank"],
    )
    results: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + timeout
        while len(results) < world_size:
            for rank, message in group.poll(0.2):
                results[rank] = json.loads(message)
            failed = [rank for rank, code in group.exited().items() if code]
            if failed:
                raise AssertionError(f"rank {failed[0]}:\n{group.output_tail(failed[0])}")
            assert time.monotonic() < deadline, f"only {sorted(results)} of {world_size} answered"
        assert group.end(60), f"ranks did not end: {group.exited()}"
    finally:
        group.kill()
    return [results[rank] for rank in range(world_size)]


def _call(context: LaunchContext, argument: tuple[RankFunction, tuple[Any, ...]]) -> None:
    function, arguments = argument
    context.channel.send(json.dumps(function(context, *arguments)).encode())


def _random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return a tensor of random bits, also NaN, for each dtype. One tensor is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (3, 5, 7), dtype=torch.int16, generator=generator)
    tensors = {str(dtype).removeprefix("torch."): bits.view(dtype) for dtype in DTYPES[1:]}
    tensors["float32"] = bits.repeat(1, 1, 2).view(torch.float32).transpose(0, 2)
    return tensors


def _transport(context: LaunchContext, transfers: list[Transfer]) -> Transport:
    context.join()
    transport = Transport(
        context.world.rank, torch.device("cpu"), context.backend, transfers.append
    )
    rounds = connect_rounds((r, r + 1) for r in range(context.world.size - 1))
    transport.connect({"clips": rounds})
    return transport


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _relay(context: LaunchContext, clips: int) -> dict[str, Any]:
    """Forward packets from rank to rank, and check the bits on every rank.

    Return the number of packets with the expected bits, and all transfers.
    """
    transfers: list[Transfer] = []
    transport = _transport(context, transfers)
    rank, last = context.world.rank, context.world.size - 1
    equal = 0
    for clip in range(clips):
        expected = _random_tensors(clip)
        if rank == 0:
            packet = Packet(clip, 4, 100.0 + clip, expected, compute_seconds=0.5)
        else:
            packet = transport.post_receive(clip, 4, rank - 1).wait()
            assert (packet.clip, packet.next_step, packet.begun_at) == (clip, 4, 100.0 + clip)
            assert packet.compute_seconds == rank - 0.5
            packet.compute_seconds += 1
        if rank < last:
            transport.send(packet, rank + 1)
        equal += all(
            torch.equal(_bits(packet.tensors[name]), _bits(tensor))
            for name, tensor in expected.items()
        )
    transport.drain()
    transport.close()
    return {
        "equal": equal,
        "transfers": [(t.direction, t.clip, t.peer, t.num_bytes) for t in transfers],
    }


@pytest.mark.slow
def test_packets_arrive_bit_for_bit_through_three_ranks() -> None:
    first, middle, last = run_ranks(_relay, 3, 5)
    assert [r["equal"] for r in (first, middle, last)] == [5, 5, 5]
    num_bytes = 3 * 5 * 7 * (2 + 2 + 4)
    assert first["transfers"] == [["send", clip, 1, num_bytes] for clip in range(5)]
    assert last["transfers"] == [["recv", clip, 1, num_bytes] for clip in range(5)]


def _send_to_slow_receiver(context: LaunchContext) -> list[float]:
    """Send three packets to rank 1, which receives nothing for 2 s; return the times.

    Rank 0 returns the time after each send; rank 1 returns the time when it begins to receive.
    """
    transport = _transport(context, [])
    tensors = _random_tensors(0)
    if context.world.rank == 0:
        sent_after = []
        for clip in range(3):
            transport.send(Packet(clip, 1, 0.0, tensors), 1)
            sent_after.append(time.monotonic())
        transport.drain()
        return sent_after
    time.sleep(2)
    begin = time.monotonic()
    for clip in range(3):
        transport.post_receive(clip, 1, 0).wait()
    return [begin]


@pytest.mark.slow
@pytest.mark.timing
def test_a_slow_rank_holds_back_the_one_before_it() -> None:
    sent_after, (begin,) = run_ranks(_send_to_slow_receiver, 2)
    # The first packet is sent at once. The second waits until the first has been received.
    assert sent_after[0] < begin <= sent_after[1]


def _send_wrong_step(context: LaunchContext, num_sent: int) -> str:
    """Send packets of step 4 to rank 1, which expects step 5; return this rank's error."""
    transport = _transport(context, [])
    try:
        if context.world.rank == 1:
            transport.post_receive(7, 5, 0).wait()
        for _ in range(num_sent if context.world.rank == 0 else 0):
            transport.send(Packet(7, 4, 0.0, {"latents": torch.zeros(2, 3)}), 1)
            transport.drain()
    except TransportError as error:
        return error.message
    return "no error"


@pytest.mark.slow
def test_a_packet_that_is_not_the_expected_one_is_refused() -> None:
    # Without a check of the step, gloo would accept the packet silently, or abort the process.
    sender, receiver = run_ranks(_send_wrong_step, 2, 1)
    assert "next step: sent 4, expected 5" in receiver
    assert sender.startswith("could not send clip 7 at step 4 to rank 1: ")


@pytest.mark.slow
def test_a_neighbour_that_leaves_is_an_error_at_once() -> None:
    sender, receiver = run_ranks(_send_wrong_step, 2, 0, timeout=30)
    assert sender == "no error"
    assert receiver.startswith("could not receive clip 7 at step 5 from rank 0: ")


# --- exceptions of gloo, NCCL and CUDA ------------------------------------------------------------

# Error messages of torch 2.13 and NCCL 2.27 (ProcessGroupNCCL.cpp, NCCLUtils.cpp).
NCCL_UNHANDLED = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, \
unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
NCCL_XID = NCCL_UNHANDLED.replace("2 'out of memory'", "719 'unspecified launch failure'")
NCCL_REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, \
remote process exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer host0<51234>"""
XID = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in the documentation for more information.
CUDA kernel errors might be asynchronously reported at some other API call."""
NO_MEMORY = XID.replace("an illegal memory access was encountered", "out of memory")
ALLOCATOR = "CUDA out of memory. Tried to allocate 2.00 GiB"
TRANSFER = "send clip 3 to rank 1", {"clip": 3, "from_rank": 0, "to_rank": 1}
BOTH = {"sent_clip": 7, "expected_clip": 8}
GLOO = "[../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (RuntimeError(GLOO), BrokenLinkError, "Connection closed by peer"),
        (
            dist.DistBackendError(NCCL_REMOTE),
            BrokenLinkError,
            "last error: socketProgress: Connection closed by remote peer host0",
        ),
        (dist.DistBackendError(NCCL_XID), DeviceError, "CUDA error: unspecified launch failure"),
        (dist.DistBackendError(NCCL_UNHANDLED), OutOfMemoryError, "out of memory in NCCL"),
        (torch.OutOfMemoryError(ALLOCATOR), OutOfMemoryError, "out of memory: "),
        (torch.AcceleratorError(NO_MEMORY), OutOfMemoryError, "out of memory: "),
        (torch.AcceleratorError(XID), DeviceError, "an illegal memory access was encountered"),
        (
            BrokenLinkError("clip: sent 7, expected 8", details=BOTH),
            BrokenLinkError,
            "clip: sent 7, expected 8",
        ),
    ],
)
def test_errors_are_told_apart(raised: Exception, kind: type[Exception], words: str) -> None:
    """Errors of libraries become svdpp's own types.

    The types matter, because the parent treats a `BrokenLinkError` as a consequence of another
    rank's failure.
    """
    with pytest.raises(kind) as caught, translated_errors(*TRANSFER):
        raise raised
    assert type(caught.value) is kind
    assert "could not send clip 3 to rank 1" in str(caught.value)
    assert words in str(caught.value)


# --- headers and metadata ---------------------------------------------------------------------

HEADERS = st.builds(Header, st.integers(0, 2**31), st.integers(0, 2**32 - 1), st.integers(0, 2**63))
CPU, NOTHING = torch.device("cpu"), torch.empty(0, dtype=torch.uint8)


@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_header_survives_the_wire_and_changed_bytes_are_noticed(
    header: Header, position: int, change: int
) -> None:
    data = bytearray(header.pack())
    assert Header.unpack(bytes(data)) == header
    data[position] ^= change
    with pytest.raises(TransportError):
        Header.unpack(bytes(data))


def test_check_names_the_field_and_both_sides() -> None:
    metadata = PacketMetadata(pack_metadata(Packet(3, 8, 1.5, {}), CPU))
    metadata.check(3, 8, 0, {})
    with pytest.raises(MismatchError, match="clip: sent 3, expected 4"):
        metadata.check(4, 8, 0, {})
    with pytest.raises(MismatchError, match="next step: sent 8, expected 12"):
        metadata.check(3, 12, 0, {})
    with pytest.raises(MismatchError, match="bytes of the payload: sent 8, expected 0"):
        metadata.check(3, 8, 8, {})
    known = {"latents": TensorSpec((1, 4), torch.float16)}
    missing = "tensors: sent 0, expected at least 1: latents is missing"
    with pytest.raises(MismatchError, match=missing):
        metadata.check(3, 8, 0, known)


def test_tensors_that_differ_are_named_with_both_sides() -> None:
    half, whole = TensorSpec((1, 4), torch.float16), TensorSpec((1, 4), torch.float32)
    with pytest.raises(MismatchError, match="latents: sent 1x4 fp16, expected 1x4 fp32") as caught:
        check_tensors({"latents": half}, {"latents": whole})
    details = caught.value.details
    assert (details["sent_bytes"], details["expected_bytes"]) == (8, 16)
    with pytest.raises(MismatchError, match="sent 3, expected 1: a, b are not expected"):
        check_tensors({"latents": half, "a": half, "b": half}, {"latents": half})
    check_tensors({"latents": half, "a": half}, {"latents": half}, others=True)


def test_a_lost_clip_has_no_tensors() -> None:
    lost = Packet(3, 8, 1.5, {}, tombstone=True)
    known = {"latents": TensorSpec((1, 4), torch.float16)}
    PacketMetadata(pack_metadata(lost, CPU)).check(3, 8, 0, known)
    lost.tensors = {"latents": torch.zeros(1, 4).half()}
    with pytest.raises(MismatchError, match="latents is not expected"):
        PacketMetadata(pack_metadata(lost, CPU)).check(3, 8, 8, known)


def test_what_is_said_of_a_packet_and_tensors_in_host_memory_survive_the_wire() -> None:
    tensors = {"step": torch.tensor(7), "state": torch.arange(5).byte()}
    packet = Packet(3, 1, 2.5, tensors, True, True, 0.25)
    back = PacketMetadata(pack_metadata(packet, torch.device("cuda"))).packet(NOTHING)
    assert list(back.tensors) == ["step", "state"]
    assert all(torch.equal(back.tensors[name], each) for name, each in packet.tensors.items())
    assert replace(back, tensors={}) == replace(packet, tensors={})


@pytest.mark.parametrize(
    ("entries", "more", "words"),
    [
        (b"?", b"", "cannot be read"),
        (b'[["latents", "float33", [1], false]]', b"", "cannot be read"),
        (b'[["latents", "float32", [2], false]]', b"", "of the payload: sent 4, expected 8"),
        (b'[["latents", "float32", [1], false]]', b"more", "in host memory: sent 4, expected 0"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    entries: bytes, more: bytes, words: str
) -> None:
    whole = pack_metadata(Packet(0, 1, 0.0, {}), CPU).replace(
        b'"tensors": []', b'"tensors": ' + entries
    )
    assert entries in whole
    with pytest.raises(TransportError, match=words):
        PacketMetadata(whole + more).check(0, 1, 4, {})
