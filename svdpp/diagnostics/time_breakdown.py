"""The breakdown of each rank's time, and the comparison of a run with its forecast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from svdpp.driver.trace import Trace
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast

Interval = tuple[float, float]

#: A run that takes this many times its forecast, and a second longer, gets an explanation.
OVERRUN = 1.2
_OVERRUN_SECONDS = 1.0

_NAMES = {Kind.ENCODE: "an encode", Kind.DENOISE: "a step", Kind.DECODE: "a decode"}


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """One rank's seconds, from the first start to the last end of any rank's work.

    Each part is measured on its own, so their sum may differ from `wall`. The difference,
    `unaccounted`, is the engine's bookkeeping between actions, or a measurement error.
    """

    rank: int
    wall: float
    compute: float
    """In ENCODE, DENOISE and DECODE."""
    wait: float
    """Blocked without a transfer: by a neighbour, a photograph or a file that is not ready."""
    transfer: float
    """Blocked while a packet was arriving; transfers during the denoising do not count."""
    idle: float
    """Before the rank's first wait or work, and after its last."""

    @property
    def unaccounted(self) -> float:
        """The wall time that is in none of the four parts, in seconds."""
        return self.wall - self.compute - self.wait - self.transfer - self.idle


def time_breakdown(trace: Trace) -> list[TimeBreakdown]:
    """The time breakdown of each rank, by rank.

    Raises:
        ValueError: no rank has done an action.
    """
    if not trace.spans:
        raise ValueError("the trace has no actions")
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


def overrun(trace: Trace, forecast: Forecast, costs: Costs) -> str:
    """A sentence why a run took longer than its forecast; empty if it is within `OVERRUN`."""
    makespan = trace.summary().makespan
    if makespan <= max(OVERRUN * forecast.makespan, forecast.makespan + _OVERRUN_SECONDS):
        return ""
    reason = _slowest_work(trace, costs, enough=(makespan - forecast.makespan) / 2)
    return (
        f"the run took {makespan:.2f} s, {makespan / forecast.makespan:.1f} times the forecast: "
        + (reason or "the ranks waited for each other, or for this machine's cores")
    )


def _slowest_work(trace: Trace, costs: Costs, *, enough: float) -> str:
    """The work of one rank that took `enough` seconds longer than its costs; empty if none did."""
    measured: defaultdict[tuple[int, Kind], float] = defaultdict(float)
    expected: defaultdict[tuple[int, Kind], float] = defaultdict(float)
    units: defaultdict[tuple[int, Kind], int] = defaultdict(int)
    for span in trace.spans:
        which = span.rank, span.action.kind
        measured[which] += span.end - span.start
        expected[which] += costs.of(span.action, span.rank)
        units[which] += max(1, span.action.end - span.action.start)
    which = max(measured, key=lambda each: measured[each] - expected[each])
    if measured[which] - expected[which] < enough:
        return ""
    rank, kind = which
    took, counted = measured[which] / units[which], expected[which] / units[which]
    return (
        f"{_NAMES[kind]} takes {took:.3g} s on rank {rank}, "
        f"and the forecast assumes {counted:.3g} s"
    )


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(waits: Iterable[Interval], transfers: Iterable[Interval]) -> float:
    """Seconds of `waits` that overlap with any of `transfers`; two at once count once."""
    total, reached = 0.0, float("-inf")
    joined = []
    for start, end in sorted(transfers):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    for start, end in waits:
        total += sum(max(0.0, min(end, b) - max(start, a)) for a, b in joined)
    return total
