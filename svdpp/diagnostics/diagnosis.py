"""The diagnosis of measured figures: what limits the ranks, and what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from svdpp.diagnostics.advice import WORTH_A_CHANGE, Advice, Again, advise
from svdpp.diagnostics.bottleneck import Finding, FindingKind, find_limits
from svdpp.diagnostics.figures import HeadRoom, RunFigures, head_rooms
from svdpp.diagnostics.utilisation import Speeds

# What limits a run, in a few words; braces name the rank.
_SHORT: Mapping[FindingKind, str] = {
    "balanced": "nothing: all ranks are busy",
    "slow_device": "rank {rank}, whose device is slower",
    "shared_cores": "rank {rank}, which gets less of the cores",
    "throttled": "rank {rank}, whose GPU lowers its clock",
    "busy_machine": "other processes on this machine",
    "too_many_threads": "more threads than cores",
    "decode": "rank {rank}, which decodes",
    "encode": "rank {rank}, which encodes",
    "steps": "rank {rank}, which has more steps than the others",
    "transfers": "rank {rank}, which waits for packets",
    "photographs": "rank {rank}, which waits for images to be read",
    "disk": "rank {rank}, which waits for clips to be written",
    "few_clips": "few clips, so that ranks wait at the start and the end",
    "uneven_steps": "steps that take unequal time",
    "start_up": "the start of the ranks",
    "memory": "the memory of rank {rank}",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the figures of a run, or of one round of a bench, say."""

    figures: RunFigures
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def headline(self) -> str:
        """The most useful line: the costliest finding, and the best advice for it."""
        first, best = self.findings[0], self.best_advice
        return first.text if best is None else f"{first.text}. What helps: {best.text}"

    @property
    def best_advice(self) -> Advice | None:
        """What gains most by forecast, or else answers the costliest finding."""
        first = self.findings[0]
        answers = [advice for advice in self.advice if first.kind in advice.kinds]
        faster = [advice for advice in self.advice if (advice.times_as_fast or 0) >= WORTH_A_CHANGE]
        return next(iter([*faster, *answers]), None)

    @property
    def lines(self) -> list[str]:
        """What limits the ranks and what to try, for a terminal; commands have their own lines.

        None for fewer clips than fill the ranks once and leave one to compare.
        """
        if not self._is_measured:
            return []
        first, best = self.findings[0], self.best_advice
        lost = f" ({first.lost_seconds:.1f} s)" if first.lost_seconds else ""
        lines = [f"limited by: {_SHORT[first.kind].format(rank=first.rank)}{lost}"]
        if best is not None:
            lines.append(textwrap.shorten(f"try: {best.short or best.text}", 80, placeholder="..."))
            lines += [f"  {best.command}"] if best.command else []
        return lines

    @property
    def _is_measured(self) -> bool:
        """Whether there are clips beyond those that only fill the ranks."""
        return self.figures.clips > self.figures.world_size

    @property
    def times(self) -> str:
        """Start, first clip and rate in one line."""
        figures = self.figures
        clips = f"{figures.clips} clip{'s' if figures.clips > 1 else ''}"
        return (
            f"times: {figures.start_seconds:.1f} s to start, then {clips} in "
            f"{figures.makespan:.1f} s, the first after {figures.first_clip:.1f} s, then one every "
            f"{figures.seconds_per_clip:.2f} s; bubble {figures.bubble:.0%}"
        )

    @property
    def head_rooms(self) -> list[HeadRoom]:
        """The head-room of each memory."""
        return head_rooms(self.figures)

    @property
    def gpu_lines(self) -> list[str]:
        """One line for each GPU that was sampled, the energy, or why there is nothing."""
        figures = self.figures
        if figures.device == "cpu":
            return []
        sampled = [rank for rank in figures.ranks if rank.gpu is not None]
        if not sampled:
            return ["no figures of the GPUs: NVML gave none"]
        lines = [f"GPU of rank {rank.rank}: {rank.gpu}" for rank in sampled]
        if figures.joules_per_clip is not None:
            lines.append(f"energy: {figures.joules_per_clip:.0f} J a clip, all GPUs together")
        return lines

    @property
    def forecast_errors(self) -> dict[str, float]:
        """By how much each forecast was off: 0.1 if the run took a tenth longer than forecast.

        Empty for so few clips that the first one, which warms up, decides.
        """
        if not self._is_measured:
            return {}
        return {
            name: self.figures.makespan / seconds - 1
            for name, seconds in asdict(self.figures.forecast).items()
            if seconds
        }

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as plain values."""
        return {
            "headline": self.headline,
            "findings": [asdict(each) for each in self.findings],
            "advice": [asdict(each) for each in self.advice],
            "memory": [{**asdict(room), "free_share": room.free_share} for room in self.head_rooms],
            "utilisation": asdict(self.speeds),
            "joules_per_clip": self.figures.joules_per_clip,
            "forecast_errors": self.forecast_errors,
            "measured": self.figures.to_json(),
        }


def diagnose(figures: RunFigures, again: Again, without: Collection[FindingKind] = ()) -> Diagnosis:
    """The diagnosis of `figures`, without utilisation."""
    findings = find_limits(figures, without)
    advice = advise(figures, findings, again)
    return Diagnosis(figures=figures, findings=tuple(findings), advice=tuple(advice))
