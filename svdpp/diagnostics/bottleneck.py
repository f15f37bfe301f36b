"""The rules that say what limits a run: plain figures in, findings out."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from svdpp.diagnostics.figures import RankFigures, RunFigures, head_rooms

FindingKind = Literal[
    "balanced",
    "slow_device",
    "shared_cores",
    "throttled",
    "busy_machine",
    "too_many_threads",
    "decode",
    "encode",
    "steps",
    "transfers",
    "photographs",
    "disk",
    "few_clips",
    "uneven_steps",
    "start_up",
    "memory",
]

# A cause that costs less than this share of the run is left out.
_WORTH_NAMING = 0.05
# Starting the ranks always takes a while: it counts only if it takes this share of everything.
_LONG_START = 0.25
# A step is slow if it takes this many times the usual time of the other ranks.
_SLOW = 1.15
# A rank shares its cores if it gets less than this part of the CPU time that another rank gets.
_FEWER_CORES = 0.8
_UNEVEN = 1.3
_LOW_MEMORY = 0.1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that makes a run longer than its work needs, or that threatens it."""

    kind: FindingKind
    rank: int | None = None
    """The rank that limits the others; None if it is not one rank."""
    lost_seconds: float = 0.0
    """What it costs: an estimate of how much shorter the run would be without it."""
    text: str


def find_limits(figures: RunFigures, without: Collection[FindingKind] = ()) -> list[Finding]:
    """What limits the run, the costliest first; `balanced` if no rank does.

    A busy machine comes last: it slows all ranks alike, and what limits one of them says more.

    The busiest rank sets the pace of a full pipeline. The rules ask why it is busier than the mean
    of all ranks, and what keeps it from working.

    Args:
        figures: of the run.
        without: kinds of findings to leave out.
    """
    whole = figures.makespan + figures.write_tail
    found = [
        finding
        for finding in _all_causes(figures)
        if finding.lost_seconds >= _WORTH_NAMING * whole and finding.kind not in without
    ]
    found.sort(key=lambda finding: (finding.kind == "busy_machine", -finding.lost_seconds))
    if all(finding.kind == "busy_machine" for finding in found):
        found.append(Finding(kind="balanced", text=_balanced(figures)))
    beside = [*_start_up(figures, whole), *_memory(figures)]
    return [*found, *(finding for finding in beside if finding.kind not in without)]


def _all_causes(figures: RunFigures) -> Iterator[Finding]:
    yield from _imbalance(figures)
    yield from _late_photographs(figures)
    yield from _slow_disk(figures)
    yield from _transfers(figures)
    yield from _gaps(figures)
    yield from _cores(figures)
    yield from _throttled(figures)


def busiest(figures: RunFigures) -> RankFigures:
    """The rank with the least time for more work."""
    return max(figures.ranks, key=_busy)


def _busy(rank: RankFigures) -> float:
    """Seconds in which a rank works, or waits for something that is no other rank's fault."""
    return rank.compute + rank.photograph_wait + rank.writer_wait


# 1. Why the busiest rank is busier than the others.


def _imbalance(figures: RunFigures) -> Iterator[Finding]:
    limit = busiest(figures)
    others = [rank for rank in figures.ranks if rank is not limit]
    excess = limit.compute - _mean(rank.compute for rank in figures.ranks)
    if not others or excess <= 0:
        return
    slowness = _slowness(limit, others)
    more_steps = limit.step.count - _mean(rank.step.count for rank in others)
    shares_cores = figures.device == "cpu" and _gets_fewer_cores(limit, others)
    slow: FindingKind = "shared_cores" if shares_cores else "slow_device"
    # Seconds of the excess, each cause alone.
    causes: dict[FindingKind, float] = {
        "decode": limit.decode.seconds / slowness - _mean(rank.decode.seconds for rank in others),
        "encode": limit.encode.seconds / slowness - _mean(rank.encode.seconds for rank in others),
        "steps": more_steps * limit.step.mean_seconds / slowness,
        slow: limit.compute * (1 - 1 / slowness),
    }
    kind = max(causes, key=lambda each: causes[each])
    text = f"rank {limit.rank} limits the others: {_why_busy(kind, figures, limit, others)}"
    yield Finding(kind=kind, rank=limit.rank, lost_seconds=min(excess, causes[kind]), text=text)


def _why_busy(
    kind: FindingKind, figures: RunFigures, limit: RankFigures, others: Sequence[RankFigures]
) -> str:
    if kind in ("decode", "encode"):
        part = (limit.decode if kind == "decode" else limit.encode).seconds / limit.compute
        share = _mean(rank.compute for rank in figures.ranks) / figures.clips
        return (
            f"its {kind}s take {part:.0%} of its work, so it works "
            f"{limit.compute / figures.clips:.3g} s a clip, where an equal share would be "
            f"{share:.3g} s"
        )
    if kind == "steps":
        usual = _mean(rank.step.count for rank in others)
        return f"it does {limit.step.count} steps, the others {usual:.0f} on average"
    slow = (
        f"a step takes {limit.step.mean_seconds:.3g} s on it, and {_usual_step(others):.3g} s on "
        "the others"
    )
    if kind == "slow_device":
        return f"{slow}: its device is slower"
    mine, best = _cpu_share(limit), max(map(_cpu_share, others))
    return (
        f"{slow}, because it gets {mine:.0%} of a core's time while it computes, and they up to "
        f"{best:.0%}: something else uses its cores"
    )


def _slowness(limit: RankFigures, others: Sequence[RankFigures]) -> float:
    """How many times as long as usual a step takes on `limit`; 1 if that is not noticeable."""
    usual = _usual_step(others)
    slowness = limit.step.mean_seconds / usual if usual and limit.step.count else 1.0
    return slowness if slowness >= _SLOW else 1.0


def _usual_step(ranks: Sequence[RankFigures]) -> float:
    """The median of their mean seconds of a step; 0 if none did a step."""
    steps = [rank.step.mean_seconds for rank in ranks if rank.step.count]
    return statistics.median(steps) if steps else 0.0


def _cpu_share(rank: RankFigures) -> float:
    """CPU seconds for each second of computing; 0 if they are unknown."""
    if rank.cpu_seconds is None or not rank.compute:
        return 0.0
    return rank.cpu_seconds / rank.compute


def _gets_fewer_cores(limit: RankFigures, others: Sequence[RankFigures]) -> bool:
    return 0 < _cpu_share(limit) < _FEWER_CORES * max(map(_cpu_share, others))


# 2. What keeps a rank from working.


def _late_photographs(figures: RunFigures) -> Iterator[Finding]:
    rank = max(figures.ranks, key=lambda each: each.photograph_wait)
    text = (
        f"rank {rank.rank} waits {rank.photograph_wait:.1f} s for photographs: they are read more "
        "slowly than the ranks make clips"
    )
    lost = rank.photograph_wait
    yield Finding(kind="photographs", rank=rank.rank, lost_seconds=lost, text=text)


def _slow_disk(figures: RunFigures) -> Iterator[Finding]:
    rank = max(figures.ranks, key=lambda each: each.writer_wait + each.write.seconds)
    lost = rank.writer_wait + figures.write_tail
    text = (
        f"writing a clip takes rank {rank.rank} {rank.write.mean_seconds:.3g} s, and there is a "
        f"clip every {figures.seconds_per_clip:.3g} s: it waited {rank.writer_wait:.1f} s for its "
        f"writer, and the last clip was written {figures.write_tail:.1f} s after the last decode"
    )
    yield Finding(kind="disk", rank=rank.rank, lost_seconds=lost, text=text)


def _transfers(figures: RunFigures) -> Iterator[Finding]:
    rank = max(figures.ranks, key=lambda each: each.transfer)
    text = (
        f"rank {rank.rank} waits {rank.transfer:.1f} s while packets arrive, "
        f"{figures.transfer_seconds:.3g} s each: the link to it is too slow for the layout"
    )
    yield Finding(kind="transfers", rank=rank.rank, lost_seconds=rank.transfer, text=text)


def _gaps(figures: RunFigures) -> Iterator[Finding]:
    """Time in which even the busiest rank has nothing to do."""
    limit = busiest(figures)
    gap = limit.idle + limit.packet_wait - limit.transfer
    filling = min(gap, max(0.0, figures.first_clip))
    few = "1 clip is not enough" if figures.clips == 1 else f"{figures.clips} clips are few"
    yield Finding(
        kind="few_clips",
        lost_seconds=filling,
        text=f"even the busiest rank, {limit.rank}, has no work for {filling:.1f} s, while the "
        f"first clip comes through and the last one leaves: {few} for "
        f"{figures.world_size} ranks",
    )
    uneven = max((_unevenness(rank) for rank in figures.ranks), default=1.0)
    if uneven >= _UNEVEN:
        yield Finding(
            kind="uneven_steps",
            lost_seconds=gap - filling,
            text=f"steps take unequal time, the 95th percentile {uneven:.1f} times the mean, so "
            "the ranks wait for each other by turns",
        )


def _unevenness(rank: RankFigures) -> float:
    mean = rank.step.mean_seconds
    return rank.p95_step_seconds / mean if mean else 1.0


# 3. The machine.


def _cores(figures: RunFigures) -> Iterator[Finding]:
    """CPU ranks that want more cores than there are, or do not get those that there are."""
    if figures.device != "cpu":
        return
    wanted, cores = figures.world_size * figures.num_threads, figures.usable_cores
    compute = max(rank.compute for rank in figures.ranks)
    if wanted > cores:
        yield Finding(
            kind="too_many_threads",
            lost_seconds=compute * (1 - cores / wanted),
            text=f"{figures.world_size} ranks of {figures.num_threads} "
            f"thread{'s' if figures.num_threads > 1 else ''} want {wanted} cores, and there "
            f"{'are' if cores > 1 else 'is'} {cores}",
        )
        return
    shares = [_cpu_share(rank) for rank in figures.ranks if _cpu_share(rank)]
    if figures.num_threads == 1 and shares and max(shares) < _FEWER_CORES:
        yield Finding(
            kind="busy_machine",
            lost_seconds=compute * (1 - max(shares)),
            text=f"no rank gets more than {max(shares):.0%} of a core's time while it computes: "
            "something else uses this machine",
        )


def _throttled(figures: RunFigures) -> Iterator[Finding]:
    """GPUs that lower their clock, because of heat or power."""
    for rank in figures.ranks:
        gpu = rank.gpu
        if gpu is None or not gpu.throttled or not gpu.mean_sm_mhz or not gpu.peak_sm_mhz:
            continue
        reason = max(gpu.throttled, key=lambda each: gpu.throttled[each])
        yield Finding(
            kind="throttled",
            rank=rank.rank,
            lost_seconds=rank.compute * (1 - gpu.mean_sm_mhz / gpu.peak_sm_mhz),
            text=f"the GPU of rank {rank.rank} lowers its clock in {gpu.throttled[reason]:.0%} of "
            f"the samples ({reason}): {gpu.mean_sm_mhz:.0f} MHz on average, "
            f"{gpu.peak_sm_mhz:.0f} at most",
        )


def _start_up(figures: RunFigures, whole: float) -> list[Finding]:
    share = figures.start_seconds / (figures.start_seconds + whole)
    if share < _LONG_START:
        return []
    load = max(rank.load_seconds for rank in figures.ranks)
    text = (
        f"starting the ranks takes {figures.start_seconds:.1f} s, {share:.0%} of the whole run, "
        f"{load:.1f} s of it to load the model"
    )
    return [Finding(kind="start_up", lost_seconds=figures.start_seconds, text=text)]


def _memory(figures: RunFigures) -> list[Finding]:
    rooms = head_rooms(figures)
    tightest = min(rooms, key=lambda room: room.free_share, default=None)
    if tightest is None or tightest.free_share >= _LOW_MEMORY:
        return []
    text = (
        f"memory is short: {_names(tightest.ranks)} used {tightest.peak_bytes / 2**30:.1f} of "
        f"{tightest.total_bytes / 2**30:.1f} GiB"
    )
    return [Finding(kind="memory", rank=tightest.ranks[0], text=text)]


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _balanced(figures: RunFigures) -> str:
    shares = [rank.compute / rank.wall if rank.wall else 0.0 for rank in figures.ranks]
    if len(shares) == 1:
        return f"the only rank computes {shares[0]:.0%} of the time: nothing holds it up"
    return (
        f"no rank limits the others: each computes {min(shares):.0%} to {max(shares):.0%} of the "
        "time"
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0
