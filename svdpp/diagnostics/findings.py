"""The rules that say what limits a run: plain figures in, findings out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from svdpp.diagnostics.figures import RankFigures, RunFigures, WorkFigures

# A cause that costs less than this share of the run is left out.
_WORTH_NAMING = 0.05
# A step is slow if it takes this many times the usual time of the other ranks.
_SLOW = 1.15


class Finding(NamedTuple):
    """One cause that makes a run longer than its work needs."""

    kind: str
    text: str
    """At most 68 characters, for a line of a terminal."""
    rank: int | None = None
    """The rank that limits the others; None if it is not one rank."""
    lost_seconds: float = 0.0
    """What it costs: an estimate of how much shorter the run would be without it."""


def find_limits(figures: RunFigures) -> list[Finding]:
    """What limits the run, the costliest first; `balanced` if no rank does.

    The busiest rank sets the pace of a full pipeline. The rules ask why it is busier than the mean
    of all ranks, and what keeps it from working.
    """
    least = _WORTH_NAMING * (figures.makespan + figures.write_tail)
    causes = [*_imbalance(figures), *_waits(figures)]
    worth = [each for each in causes if each.lost_seconds >= least]
    if not worth:
        shares = [rank.compute / rank.wall if rank.wall else 0.0 for rank in figures.ranks]
        text = f"no rank: each computes {min(shares):.0%} to {max(shares):.0%} of the time"
        if figures.world_size == 1:
            text = f"its one rank, which computes {shares[0]:.0%} of the time"
        return [Finding("balanced", text)]
    return sorted(worth, key=lambda cause: -cause.lost_seconds)


def _busiest(figures: RunFigures) -> RankFigures:
    """The rank that works longest, or waits for something that is no other rank's fault."""
    return max(figures.ranks, key=lambda rank: rank.compute + rank.photograph_wait
               + rank.writer_wait)  # fmt: skip


def _imbalance(figures: RunFigures) -> Iterator[Finding]:
    """Why the busiest rank is busier than the others."""
    limit = _busiest(figures)
    others = [rank for rank in figures.ranks if rank is not limit]
    excess = limit.compute - statistics.fmean(rank.compute for rank in figures.ranks)
    if not others or excess <= 0:
        return
    stepped = [rank.step.mean_seconds for rank in others if rank.step.count]
    usual, own = statistics.median(stepped or [0.0]), limit.step
    slowness = own.mean_seconds / usual if usual and own.count else 1.0
    slowness = slowness if slowness >= _SLOW else 1.0
    steps = statistics.fmean(rank.step.count for rank in others)

    def more(work: WorkFigures, theirs: list[WorkFigures]) -> float:
        return work.seconds / slowness - statistics.fmean(each.seconds for each in theirs)

    # Seconds of the excess by each cause alone, and what is said of it.
    lost, kind, why = max(
        (more(limit.decode, [rank.decode for rank in others]), "decode",
         f"its decodes take {limit.decode.seconds / limit.compute:.0%} of its work"),
        (more(limit.encode, [rank.encode for rank in others]), "encode",
         f"its encodes take {limit.encode.seconds / limit.compute:.0%} of its work"),
        ((own.count - steps) * own.mean_seconds / slowness, "steps",
         f"it does {own.count} steps, the others {steps:.0f} on average"),
        (limit.compute * (1 - 1 / slowness), "slow_device",
         f"a step takes {own.mean_seconds:.3g} s, on the others {usual:.3g} s"),
    )  # fmt: skip
    text = f"rank {limit.rank}: {why}"
    yield Finding(kind, text, limit.rank, min(excess, lost))


def _waits(figures: RunFigures) -> Iterator[Finding]:
    """What keeps ranks from working."""
    rank = max(figures.ranks, key=lambda rank: rank.photograph_wait)
    text = f"rank {rank.rank} waits {rank.photograph_wait:.1f} s for images to be read"
    yield Finding("images", text, rank.rank, rank.photograph_wait)
    rank = max(figures.ranks, key=lambda rank: rank.writer_wait + rank.write.seconds)
    text = (
        f"rank {rank.rank} writes a clip in {rank.write.mean_seconds:.3g} s, and one comes every "
        f"{figures.seconds_per_clip:.3g} s"
    )
    yield Finding("disk", text, rank.rank, rank.writer_wait + figures.write_tail)
    rank = max(figures.ranks, key=lambda rank: rank.transfer)
    text = (
        f"rank {rank.rank} waits {rank.transfer:.1f} s while packets arrive, "
        f"{figures.transfer_seconds:.3g} s each"
    )
    yield Finding("transfers", text, rank.rank, rank.transfer)
    rank = _busiest(figures)
    filling = max(0.0, min(rank.idle + rank.packet_wait - rank.transfer, figures.first_clip))
    clips = f"{figures.clips} clip{'s' if figures.clips > 1 else ''}"
    text = (
        f"{clips} cannot fill {figures.world_size} ranks: at start and end rank {rank.rank} has no "
        "work"
    )
    yield Finding("few_clips", text, None, filling)
