"""No packet lands in memory that queued kernels still use; each test shows the wrong way fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from svdpp.comm import streams
from tests.gpu.machine import Report

pytestmark = pytest.mark.no_rehearsal

SIZE = 8 * 2**20
# Some tenths of a second at 1 to 2 GHz: longer than a copy of 8 MB takes.
SLEEP_CYCLES = 500_000_000
DEVICE = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _device() -> None:
    streams.use_device(DEVICE)
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()


def _leave_a_block_in_use() -> None:
    """Queues a long wait, then a write into a block, and frees the block before either ran."""
    block = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(SLEEP_CYCLES)
    block.fill_(7)
    del block


def _received_safely(host: torch.Tensor) -> torch.Tensor:
    return streams.SideStream(DEVICE).to_device(host)


def _received_wrongly(host: torch.Tensor) -> torch.Tensor:
    """Allocates before the side stream is entered, which is what the rule forbids."""
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
            streams.lend(payload)
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
    assert not all(kept), "without lend() nothing went wrong: this test shows nothing"


def test_copies_to_the_host_wait_for_what_they_copy() -> None:
    side = streams.SideStream(DEVICE)
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.fill_(5)
    host = side.to_host(tensor, streams.mark(DEVICE))
    assert bool((host == 5).all())
    assert host.is_pinned()


def test_a_flag_and_a_step_are_read_without_a_stop() -> None:
    before = streams.Readback(DEVICE)
    torch.cuda._sleep(SLEEP_CYCLES)
    after = streams.Readback(DEVICE, torch.isfinite(torch.ones(4, device=DEVICE)).all())
    assert after.wait()
    assert after.seconds_since(before) > 0.05
