"""Owns the diagnosis of measured figures: what limits the ranks, and what would help."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from svdpp.diagnostics.advice import WORTH_A_CHANGE, Advice, Again, advise
from svdpp.diagnostics.bottleneck import Finding, FindingKind, find_limits
from svdpp.diagnostics.figures import HeadRoom, RunFigures, head_rooms
from svdpp.diagnostics.utilisation import Speeds


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
        first = self.findings[0]
        answers = [advice for advice in self.advice if first.kind in advice.kinds]
        faster = [advice for advice in self.advice if (advice.times_as_fast or 0) >= WORTH_A_CHANGE]
        best = next(iter([*faster, *answers]), None)
        return first.text if best is None else f"{first.text}. What helps: {best.text}"

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
        """By how much each forecast was off: 0.1 if the run took a tenth longer than forecast."""
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
