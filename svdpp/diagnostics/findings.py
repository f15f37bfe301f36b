"""The rules that say what limits a run: plain figures in, findings out."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from svdpp.config.limits import MAX_CLIPS
from svdpp.diagnostics.figures import RankFigures, RunFigures, WorkFigures, head_rooms

#: What limits a run, by kind, in a few words; braces name the rank.
KINDS: Mapping[str, str] = {
    "balanced": "nothing: all ranks are busy",
    "slow_device": "rank {rank}, whose device is slower",
    "shared_cores": "other processes, which use the cores",
    "throttled": "rank {rank}, whose GPU lowers its clock",
    "too_many_threads": "more threads than cores",
    "decode": "rank {rank}, which decodes",
    "encode": "rank {rank}, which encodes",
    "steps": "rank {rank}, which has more steps than the others",
    "transfers": "rank {rank}, which waits for packets",
    "images": "rank {rank}, which waits for images to be read",
    "disk": "rank {rank}, which waits for clips to be written",
    "few_clips": "few clips, so that ranks wait at the start and the end",
    "start_up": "the start of the ranks",
    "memory": "the memory of rank {rank}",
}

# A cause that costs less than this share of the run is left out.
_WORTH_NAMING = 0.05
# Starting the ranks always takes a while: it counts only if it takes this share of everything.
_LONG_START = 0.25
# A step is slow if it takes this many times the usual time of the other ranks.
_SLOW = 1.15
# A rank shares its cores if it gets less than this part of a core, or of another rank's CPU time.
_FEWER_CORES = 0.8
_LOW_MEMORY = 0.1
_OTHER_BITS = "the clips get other bits"


class Remedy(NamedTuple):
    """What answers a finding. For most kinds it is another layout, which is forecast instead."""

    text: str
    note: str = ""
    changes: Mapping[str, object] = {}
    """Settings with which to do the same work again."""
    command: str = ""
    """To type instead; `{costs}` stands for the measured costs. Empty if no command does it."""


_END_OTHERS = Remedy(
    "end the other processes, or run at another time",
    "the forecasts here assume that the ranks stay as slow as they were",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that makes a run longer than its work needs, or that threatens it."""

    kind: str
    """One of `KINDS`."""
    rank: int | None = None
    """The rank that limits the others; None if it is not one rank."""
    lost_seconds: float = 0.0
    """What it costs: an estimate of how much shorter the run would be without it."""
    text: str
    remedy: Remedy | None = None

    @property
    def short(self) -> str:
        """What limits the run, in a few words."""
        lost = f" ({self.lost_seconds:.1f} s)" if self.lost_seconds else ""
        return KINDS[self.kind].format(rank=self.rank) + lost

    def to_json(self) -> dict[str, Any]:
        """The finding as plain values; its remedy is among the advice."""
        return {name: value for name, value in vars(self).items() if name != "remedy"}


def find_limits(figures: RunFigures, without: Collection[str] = ()) -> list[Finding]:
    """What limits the run, the costliest first; `balanced` if no rank does.

    The busiest rank sets the pace of a full pipeline. The rules ask why it is busier than the mean
    of all ranks, and what keeps it from working.
    """
    whole = figures.makespan + figures.write_tail
    causes = [
        *_imbalance(figures),
        *_waits(figures),
        *_cores(figures),
        *_throttled(figures),
    ]
    worth = [cause for cause in causes if cause.lost_seconds >= _WORTH_NAMING * whole]
    worth.sort(key=lambda cause: -cause.lost_seconds)
    limits = [cause for cause in worth if cause.kind not in without]
    beside = [*_start_up(figures, whole), *_memory(figures)]
    return [
        *(limits or [Finding(kind="balanced", text=_balanced(figures))]),
        *(finding for finding in beside if finding.kind not in without),
    ]


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
    usual = _usual_step(others)
    slowness = limit.step.mean_seconds / usual if usual and limit.step.count else 1.0
    slowness = slowness if slowness >= _SLOW else 1.0

    def more(work: WorkFigures, theirs: list[WorkFigures]) -> float:
        return work.seconds / slowness - statistics.fmean(each.seconds for each in theirs)

    more_steps = limit.step.count - statistics.fmean(rank.step.count for rank in others)
    slow: str = "shared_cores" if _gets_fewer_cores(figures, limit) else "slow_device"
    # Seconds of the excess, each cause alone.
    causes: dict[str, float] = {
        "decode": more(limit.decode, [rank.decode for rank in others]),
        "encode": more(limit.encode, [rank.encode for rank in others]),
        "steps": more_steps * limit.step.mean_seconds / slowness,
        slow: limit.compute * (1 - 1 / slowness),
    }
    kind = max(causes, key=lambda cause: causes[cause])
    text = f"rank {limit.rank} limits the others: {_why_busy(kind, figures, limit, others)}"
    remedy = _END_OTHERS if kind == "shared_cores" else None
    lost = min(excess, causes[kind])
    yield Finding(kind=kind, rank=limit.rank, lost_seconds=lost, text=text, remedy=remedy)


def _why_busy(
    kind: str, figures: RunFigures, limit: RankFigures, others: Sequence[RankFigures]
) -> str:
    if kind in ("decode", "encode"):
        part = (limit.decode if kind == "decode" else limit.encode).seconds / limit.compute
        share = statistics.fmean(rank.compute for rank in figures.ranks) / figures.clips
        return (
            f"its {kind}s take {part:.0%} of its work, so it works "
            f"{limit.compute / figures.clips:.3g} s a clip, where an equal share would be "
            f"{share:.3g} s"
        )
    if kind == "steps":
        usual = statistics.fmean(rank.step.count for rank in others)
        return f"it does {limit.step.count} steps, the others {usual:.0f} on average"
    slow = (
        f"a step takes {limit.step.mean_seconds:.3g} s on it, and {_usual_step(others):.3g} s on "
        "the others"
    )
    if kind == "slow_device":
        return f"{slow}: its device is slower"
    return (
        f"{slow}, because it gets {_cpu_share(limit):.0%} of a core's time while it computes, and "
        f"they up to {max(map(_cpu_share, others)):.0%}: something else uses its cores"
    )


def _usual_step(ranks: Sequence[RankFigures]) -> float:
    """The median of their mean seconds of a step; 0 if none did a step."""
    return statistics.median([rank.step.mean_seconds for rank in ranks if rank.step.count] or [0.0])


def _cpu_share(rank: RankFigures) -> float:
    """CPU seconds for each second of computing; 0 if they are unknown."""
    return (rank.cpu_seconds or 0.0) / rank.compute if rank.compute else 0.0


def _gets_fewer_cores(figures: RunFigures, limit: RankFigures) -> bool:
    most = max(_cpu_share(rank) for rank in figures.ranks)
    return figures.device == "cpu" and 0 < _cpu_share(limit) < _FEWER_CORES * most


def _waits(figures: RunFigures) -> Iterator[Finding]:
    reader = max(figures.ranks, key=lambda rank: rank.photograph_wait)
    yield Finding(
        kind="images",
        rank=reader.rank,
        lost_seconds=reader.photograph_wait,
        text=f"rank {reader.rank} waits {reader.photograph_wait:.1f} s for images: they are read "
        "more slowly than the ranks make clips",
        remedy=Remedy(
            "copy the images to a local disk, or make them smaller", "a rank reads one ahead"
        ),
    )
    writer = max(figures.ranks, key=lambda rank: rank.writer_wait + rank.write.seconds)
    yield Finding(
        kind="disk",
        rank=writer.rank,
        lost_seconds=writer.writer_wait + figures.write_tail,
        text=f"writing a clip takes rank {writer.rank} {writer.write.mean_seconds:.3g} s, and "
        f"there is a clip every {figures.seconds_per_clip:.3g} s: it waited "
        f"{writer.writer_wait:.1f} s for its writer, and the last clip was written "
        f"{figures.write_tail:.1f} s after the last decode",
        remedy=Remedy("write to a faster disk: name a folder on it with --out"),
    )
    receiver = max(figures.ranks, key=lambda rank: rank.transfer)
    yield Finding(
        kind="transfers",
        rank=receiver.rank,
        lost_seconds=receiver.transfer,
        text=f"rank {receiver.rank} waits {receiver.transfer:.1f} s while packets arrive, "
        f"{figures.transfer_seconds:.3g} s each: the link to it is too slow for the layout",
    )
    limit = _busiest(figures)
    filling = max(0.0, min(limit.idle + limit.packet_wait - limit.transfer, figures.first_clip))
    few = "1 clip is not enough" if figures.clips == 1 else f"{figures.clips} clips are few"
    yield Finding(
        kind="few_clips",
        lost_seconds=filling,
        text=f"even the busiest rank, {limit.rank}, has no work for {filling:.1f} s, while the "
        f"first clip comes through and the last one leaves: {few} for {figures.world_size} ranks",
        remedy=Remedy(
            "make more clips in one run",
            "all ranks work only between the first clip and the last",
            command=f"svdpp plan --compare --clips {min(10 * figures.clips, MAX_CLIPS)} "
            f"--steps {figures.num_steps} --world {figures.world_size} --costs {{costs}}",
        ),
    )


def _cores(figures: RunFigures) -> Iterator[Finding]:
    """CPU ranks that want more cores than there are, or do not get those that there are."""
    if figures.device != "cpu":
        return
    wanted, cores = figures.world_size * figures.num_threads, figures.usable_cores
    compute = max(rank.compute for rank in figures.ranks)
    best = max(_cpu_share(rank) for rank in figures.ranks)
    if wanted > cores:
        threads = "thread" if figures.num_threads == 1 else "threads"
        there = "is 1" if cores == 1 else f"are {cores}"
        yield Finding(
            kind="too_many_threads",
            lost_seconds=compute * (1 - cores / wanted),
            text=f"{figures.world_size} ranks of {figures.num_threads} {threads} want {wanted} "
            f"cores, and there {there}",
            remedy=_fewer_threads(figures),
        )
    elif figures.num_threads == 1 and 0 < best < _FEWER_CORES:
        yield Finding(
            kind="shared_cores",
            lost_seconds=compute * (1 - best),
            text=f"no rank gets more than {best:.0%} of a core's time while it computes: "
            "something else uses this machine",
            remedy=_END_OTHERS,
        )


def _fewer_threads(figures: RunFigures) -> Remedy:
    threads = max(1, figures.usable_cores // figures.world_size)
    if threads >= figures.num_threads:
        return Remedy("fewer ranks, or another machine")
    return Remedy("as many threads as cores", _OTHER_BITS, {"threads": threads})


def _throttled(figures: RunFigures) -> Iterator[Finding]:
    """GPUs that lower their clock, because of heat or power."""
    for rank in figures.ranks:
        gpu = rank.gpu
        if gpu is not None and gpu.throttled and gpu.mean_sm_mhz and gpu.peak_sm_mhz:
            reason, part = max(gpu.throttled.items(), key=lambda item: item[1])
            yield Finding(
                kind="throttled",
                rank=rank.rank,
                lost_seconds=rank.compute * (1 - gpu.mean_sm_mhz / gpu.peak_sm_mhz),
                text=f"the GPU of rank {rank.rank} lowers its clock in {part:.0%} of the samples "
                f"({reason}): {gpu.mean_sm_mhz:.0f} MHz on average, {gpu.peak_sm_mhz:.0f} at most",
                remedy=Remedy("cool the GPU or raise its power limit: svdpp cannot do either"),
            )


def _start_up(figures: RunFigures, whole: float) -> Iterator[Finding]:
    share = figures.start_seconds / (figures.start_seconds + whole)
    if share >= _LONG_START:
        load = max(rank.load_seconds for rank in figures.ranks)
        model = figures.model.get("name")
        named = f" --model {shlex.quote(model)}" if isinstance(model, str) else ""
        yield Finding(
            kind="start_up",
            lost_seconds=figures.start_seconds,
            text=f"starting the ranks takes {figures.start_seconds:.1f} s, {share:.0%} of the "
            f"whole run, {load:.1f} s of it to load the model",
            remedy=Remedy(
                "keep the ranks between runs: a service loads the model once",
                command=f"svdpp serve --gpus {figures.world_size} --device {figures.device}{named}",
            ),
        )


def _memory(figures: RunFigures) -> Iterator[Finding]:
    tightest = min(head_rooms(figures), key=lambda room: room.free_share, default=None)
    if tightest is not None and tightest.free_share < _LOW_MEMORY:
        chunk = {"decode_chunk_size": figures.decode_chunk_size // 2}
        smaller = Remedy("decode fewer frames at a time", _OTHER_BITS, chunk)
        yield Finding(
            kind="memory",
            rank=tightest.ranks[0],
            text=f"memory is short: rank {', '.join(map(str, tightest.ranks))} used "
            f"{tightest.peak_bytes / 2**30:.1f} of {tightest.total_bytes / 2**30:.1f} GiB",
            remedy=smaller if figures.decode_chunk_size > 1 else None,
        )


def _balanced(figures: RunFigures) -> str:
    shares = [rank.compute / rank.wall if rank.wall else 0.0 for rank in figures.ranks]
    if len(shares) == 1:
        return f"the only rank computes {shares[0]:.0%} of the time: nothing holds it up"
    return (
        f"no rank limits the others: each computes {min(shares):.0%} to {max(shares):.0%} of the "
        "time"
    )
