"""The rules that say what limits a run: plain figures in, findings out."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from svdpp.diagnostics.figures import RankFigures, RunFigures, WorkFigures

# A cause that costs less than this share of the run is left out.
_WORTH_NAMING = 0.05
# A step is slow if it takes this many times the usual time of the other ranks.
_SLOW = 1.15
# A run that takes this many times its forecast, and a second longer, gets an explanation.
_OVERRUN, _OVERRUN_SECONDS = 1.2, 1.0

#: What limits a run, by kind, in a few words; braces name the rank.
KINDS: Mapping[str, str] = {
    "balanced": "nothing: all ranks are busy",
    "slow_device": "rank {rank}, whose steps are slower",
    "decode": "rank {rank}, which decodes",
    "encode": "rank {rank}, which encodes",
    "steps": "rank {rank}, which has more steps than the others",
    "transfers": "rank {rank}, which waits for packets",
    "images": "rank {rank}, which waits for images to be read",
    "disk": "rank {rank}, which waits for clips to be written",
    "few_clips": "few clips, so that ranks wait at the start and the end",
}


class Finding(NamedTuple):
    """One cause that makes a run longer than its work needs."""

    kind: str
    """One of `KINDS`."""
    text: str
    rank: int | None = None
    """The rank that limits the others; None if it is not one rank."""
    lost_seconds: float = 0.0
    """What it costs: an estimate of how much shorter the run would be without it."""

    @property
    def short(self) -> str:
        """What limits the run, in a few words."""
        lost = f" ({self.lost_seconds:.1f} s)" if self.lost_seconds else ""
        return KINDS[self.kind].format(rank=self.rank) + lost


def find_limits(figures: RunFigures, without: Collection[str] = ()) -> list[Finding]:
    """What limits the run, the costliest first; `balanced` if no rank does.

    The busiest rank sets the pace of a full pipeline. The rules ask why it is busier than the mean
    of all ranks, and what keeps it from working.
    """
    least = _WORTH_NAMING * (figures.makespan + figures.write_tail)
    causes = [*_imbalance(figures), *_waits(figures)]
    worth = [each for each in causes if each.lost_seconds >= least and each.kind not in without]
    if not worth:
        return [Finding("balanced", _balanced(figures))]
    return sorted(worth, key=lambda cause: -cause.lost_seconds)


def overrun(figures: RunFigures, forecast_seconds: float) -> str:
    """Why a run took much longer than its forecast; empty if it did not."""
    took = figures.makespan
    if took <= max(_OVERRUN * forecast_seconds, forecast_seconds + _OVERRUN_SECONDS):
        return ""
    return (
        f"the run took {took:.2f} s, {took / forecast_seconds:.1f} times the forecast: "
        + find_limits(figures)[0].text
    )


def _busiest(figures: RunFigures) -> RankFigures:
    """The rank that works longest, or waits for something that is no other rank's fault."""
    return max(figures.ranks, key=lambda rank: rank.compute + rank.photograph_wait
               + rank.writer_wait)  # fmt: skip


def _imbalance(figures: RunFigures) -> Iterator[Finding]:
    """Why the busiest rank is busier than the others."""
    limit = _busiest(figures)
    others = [rank for rank in figures.ranks if rank is not limit]
    share = statistics.fmean(rank.compute for rank in figures.ranks)
    excess = limit.compute - share
    if not others or excess <= 0:
        return
    stepped = [rank.step.mean_seconds for rank in others if rank.step.count]
    usual, own = statistics.median(stepped or [0.0]), limit.step
    slowness = own.mean_seconds / usual if usual and own.count else 1.0
    slowness = slowness if slowness >= _SLOW else 1.0
    steps = statistics.fmean(rank.step.count for rank in others)

    def more(work: WorkFigures, theirs: list[WorkFigures]) -> float:
        return work.seconds / slowness - statistics.fmean(each.seconds for each in theirs)

    def part(work: WorkFigures, name: str) -> str:
        return (
            f"its {name} take {work.seconds / limit.compute:.0%} of its work, so it works "
            f"{limit.compute / figures.clips:.3g} s a clip, where an equal share would be "
            f"{share / figures.clips:.3g} s"
        )

    # Seconds of the excess by each cause alone, and what is said of it.
    lost, kind, why = max(
        (more(limit.decode, [rank.decode for rank in others]), "decode",
         part(limit.decode, "decodes")),
        (more(limit.encode, [rank.encode for rank in others]), "encode",
         part(limit.encode, "encodes")),
        ((own.count - steps) * own.mean_seconds / slowness, "steps",
         f"it does {own.count} steps, the others {steps:.0f} on average"),
        (limit.compute * (1 - 1 / slowness), "slow_device",
         f"a step takes {own.mean_seconds:.3g} s on it, and {usual:.3g} s on the others: its "
         "device is slower, or has other work"),
    )  # fmt: skip
    text = f"rank {limit.rank} limits the others: {why}"
    yield Finding(kind, text, limit.rank, min(excess, lost))


def _waits(figures: RunFigures) -> Iterator[Finding]:
    """What keeps ranks from working."""
    rank = max(figures.ranks, key=lambda rank: rank.photograph_wait)
    text = (
        f"rank {rank.rank} waits {rank.photograph_wait:.1f} s for images: they are read more "
        "slowly than the ranks make clips"
    )
    yield Finding("images", text, rank.rank, rank.photograph_wait)
    rank = max(figures.ranks, key=lambda rank: rank.writer_wait + rank.write.seconds)
    text = (
        f"writing a clip takes rank {rank.rank} {rank.write.mean_seconds:.3g} s, and there is a "
        f"clip every {figures.seconds_per_clip:.3g} s: it waited {rank.writer_wait:.1f} s for its "
        f"writer, and the last clip was written {figures.write_tail:.1f} s after the last decode"
    )
    yield Finding("disk", text, rank.rank, rank.writer_wait + figures.write_tail)
    rank = max(figures.ranks, key=lambda rank: rank.transfer)
    text = (
        f"rank {rank.rank} waits {rank.transfer:.1f} s while packets arrive, "
        f"{figures.transfer_seconds:.3g} s each: the link to it is too slow for the layout"
    )
    yield Finding("transfers", text, rank.rank, rank.transfer)
    rank = _busiest(figures)
    filling = max(0.0, min(rank.idle + rank.packet_wait - rank.transfer, figures.first_clip))
    few = "1 clip is not enough" if figures.clips == 1 else f"{figures.clips} clips are few"
    text = (
        f"even the busiest rank, {rank.rank}, has no work for {filling:.1f} s, while the first "
        f"clip comes through and the last one leaves: {few} for {figures.world_size} ranks"
    )
    yield Finding("few_clips", text, None, filling)


def _balanced(figures: RunFigures) -> str:
    shares = [rank.compute / rank.wall if rank.wall else 0.0 for rank in figures.ranks]
    if len(shares) == 1:
        return f"the only rank computes {shares[0]:.0%} of the time: nothing holds it up"
    return (
        f"no rank limits the others: each computes {min(shares):.0%} to {max(shares):.0%} of the "
        "time"
    )
