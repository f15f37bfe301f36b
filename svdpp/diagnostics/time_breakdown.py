"""Owns where each rank's time went: compute, wait, transfer and idle, held against the wall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from svdpp.driver.trace import Trace

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
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
    """Blocked while a packet was arriving; transfers beneath the denoising cost nothing."""
    idle: float
    """Before the rank's first wait or work, and after its last."""

    @property
    def unaccounted(self) -> float:
        """What the four parts leave of the wall, in seconds."""
        return self.wall - self.compute - self.wait - self.transfer - self.idle


def time_breakdown(trace: Trace) -> list[TimeBreakdown]:
    """Each rank's account, by rank.

    Raises:
        ValueError: no rank has done anything.
    """
    if not trace.spans:
        raise ValueError("nothing was done: there is nothing to account for")
    begin = min([span.start for span in trace.spans] + [wait.start for wait in trace.waits])
    end = max(span.end for span in trace.spans)
    return [_breakdown_of(trace, rank, begin, end) for rank in range(trace.world_size)]


def _breakdown_of(trace: Trace, rank: int, begin: float, end: float) -> TimeBreakdown:
    work = [(span.start, span.end) for span in trace.spans if span.rank == rank]
    waits = [(wait.start, wait.end) for wait in trace.waits if wait.rank == rank]
    arriving = [
        (transfer.start, transfer.end)
        for transfer in trace.transfers
        if transfer.rank == rank and transfer.direction == "recv"
    ]
    busy = work + waits
    head = min((start for start, _ in busy), default=end) - begin
    tail = end - max((last for _, last in busy), default=end)
    transfer = _overlap(waits, arriving)
    return TimeBreakdown(
        rank=rank,
        wall=end - begin,
        compute=_length(work),
        wait=_length(waits) - transfer,
        transfer=transfer,
        idle=head + tail,
    )


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(waits: Iterable[Interval], transfers: Iterable[Interval]) -> float:
    """Seconds of `waits` in which one of `transfers` was under way; two at once count once."""
    total, reached = 0.0, float("-inf")
    joined = []
    for start, end in sorted(transfers):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    for start, end in waits:
        total += sum(max(0.0, min(end, b) - max(start, a)) for a, b in joined)
    return total
