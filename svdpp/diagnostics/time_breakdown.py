"""Owns where each rank's time went: compute, wait, transfer and idle, held against the wall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from svdpp.driver.trace import Trace

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Account:
    """One rank's seconds between the first and the last moment of any rank's work.

    The parts are measured each for itself, so that their sum need not be `wall`: what is missing,
    `unaccounted`, is the engine's own bookkeeping between actions, or a fault of the measuring.
    """

    rank: int
    wall: float
    compute: float
    """In ENCODE, DENOISE and DECODE."""
    wait: float
    """Blocked with nothing on the wire: the neighbour is not ready, or a photograph or file."""
    transfer: float
    """Blocked while a packet was arriving; hops beneath the denoising cost nothing."""
    idle: float
    """Before the rank's first wait or work, and after its last."""

    @property
    def unaccounted(self) -> float:
        """What the four parts leave of the wall, in seconds."""
        return self.wall - self.compute - self.wait - self.transfer - self.idle


def accounts(trace: Trace) -> list[Account]:
    """Each rank's account, by rank.

    Raises:
        ValueError: no rank has done anything.
    """
    if not trace.spans:
        raise ValueError("nothing was done: there is nothing to account for")
    begin = min([span.start for span in trace.spans] + [wait.start for wait in trace.waits])
    end = max(span.end for span in trace.spans)
    return [_account(trace, rank, begin, end) for rank in range(trace.world_size)]


def _account(trace: Trace, rank: int, begin: float, end: float) -> Account:
    work = [(span.start, span.end) for span in trace.spans if span.rank == rank]
    waits = [(wait.start, wait.end) for wait in trace.waits if wait.rank == rank]
    arriving = [
        (hop.start, hop.end) for hop in trace.hops if hop.rank == rank and hop.direction == "recv"
    ]
    busy = work + waits
    head = min((start for start, _ in busy), default=end) - begin
    tail = end - max((last for _, last in busy), default=end)
    transfer = _overlap(waits, arriving)
    return Account(
        rank=rank,
        wall=end - begin,
        compute=_length(work),
        wait=_length(waits) - transfer,
        transfer=transfer,
        idle=head + tail,
    )


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(waits: Iterable[Interval], hops: Iterable[Interval]) -> float:
    """Seconds of `waits` in which one of `hops` was under way; two at once count once."""
    total, reached = 0.0, float("-inf")
    joined = []
    for start, end in sorted(hops):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    for start, end in waits:
        total += sum(max(0.0, min(end, b) - max(start, a)) for a, b in joined)
    return total
