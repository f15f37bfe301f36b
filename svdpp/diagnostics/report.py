"""The report on a run: its clips, its times, what limits it, and what would help."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.diagnostics.figures import RunFigures, figures_of, head_rooms
from svdpp.diagnostics.findings import Finding, find_limits
from svdpp.diagnostics.utilisation import Speeds, speeds_of
from svdpp.driver.run_manifest import NAME, read_manifest
from svdpp.errors import InputError, RequestError
from svdpp.plan.choose import choose_layout
from svdpp.plan.large_forecast import forecast_layout

SCHEMA_VERSION = 1
# A smaller gain is within the noise of a forecast.
_WORTH_A_CHANGE = 1.05
# A forecast of more clips takes longer, and says no more.
_CLIPS_PER_RANK = 16
# A run that takes this many times its forecast, and a second longer, gets an explanation.
_OVERRUN, _OVERRUN_SECONDS = 1.2, 1.0


class Again(NamedTuple):
    """How to do the same work again with other settings."""

    costs: Path
    """The measured costs."""
    command: Callable[[Mapping[str, object]], str]
    """Makes the command, from settings by name."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing that would help."""

    text: str
    note: str = ""
    """What else to know of it."""
    command: str = ""
    """To type; empty if no command of svdpp does it."""
    times_as_fast: float | None = None
    """By forecast or measurement; None if there is none."""
    answers: str | None = None
    """The finding that it answers; None: any."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the figures of a run, or of one round of a bench, say."""

    figures: RunFigures
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    """The layout that a forecast prefers comes first, then what answers the findings, in order."""
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def best(self) -> Advice | None:
        """The layout that a forecast prefers, or else what answers the costliest finding."""
        answers = (None, self.findings[0].kind)
        return next((advice for advice in self.advice if advice.answers in answers), None)

    @property
    def headline(self) -> str:
        """The most useful line: the costliest finding, and the best advice."""
        helps = [f"What helps: {self.best.text}"] if self.best else []
        return ". ".join([self.findings[0].text, *helps])

    @property
    def lines(self) -> list[str]:
        """What limits the ranks and what to try, for a terminal; commands have their own lines.

        None for fewer clips than fill the ranks once and leave one to compare.
        """
        if not self._is_measured:
            return []
        lines = [f"limited by: {self.findings[0].short}"]
        if (best := self.best) is not None:
            lines.append(textwrap.shorten(f"try: {best.text}", 80, placeholder="..."))
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
    def device_lines(self) -> list[str]:
        """One line for each GPU that was sampled, the energy, and the head-room of each memory."""
        figures = self.figures
        sampled = [rank for rank in figures.ranks if rank.gpu is not None]
        lines = [f"GPU of rank {rank.rank}: {rank.gpu}" for rank in sampled]
        if figures.device != "cpu" and not sampled:
            lines.append("no figures of the GPUs: NVML gave none")
        if figures.joules_per_clip is not None:
            lines.append(f"energy: {figures.joules_per_clip:.0f} J a clip, all GPUs together")
        return lines + [
            f"memory of rank {', '.join(map(str, room.ranks))}: peak "
            f"{room.peak_bytes / 2**30:.1f} of {room.total_bytes / 2**30:.1f} GiB, "
            f"{room.free_share:.0%} left"
            for room in head_rooms(figures)
        ]

    @property
    def forecast_error(self) -> float | None:
        """0.1 if the run took a tenth longer than forecast by all measured costs.

        None for so few clips that the first one, which warms up, decides.
        """
        seconds = self.figures.forecast_seconds
        return self.figures.makespan / seconds - 1 if seconds and self._is_measured else None

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as plain values."""
        rooms = head_rooms(self.figures)
        return {
            "headline": self.headline,
            "findings": [finding.to_json() for finding in self.findings],
            "advice": [asdict(advice) for advice in self.advice],
            "memory": [{**asdict(room), "free_share": room.free_share} for room in rooms],
            "utilisation": asdict(self.speeds),
            "joules_per_clip": self.figures.joules_per_clip,
            "forecast_error": self.forecast_error,
            "measured": self.figures.to_json(),
        }


def diagnose(figures: RunFigures, again: Again, without: Collection[str] = ()) -> Diagnosis:
    """The diagnosis of `figures`, without utilisation."""
    findings = find_limits(figures, without)
    advice = list(_best_layout(figures, again))
    for finding in findings:
        if (remedy := finding.remedy) is not None:
            command = remedy.command.format(costs=shlex.quote(str(again.costs)))
            if remedy.changes:
                command = again.command(remedy.changes)
            text, note, kind = remedy.text, remedy.note, finding.kind
            advice.append(Advice(text=text, note=note, command=command, answers=kind))
    return Diagnosis(figures=figures, findings=tuple(findings), advice=tuple(advice))


def overrun(figures: RunFigures, forecast_seconds: float) -> str:
    """Why a run took much longer than its forecast; empty if it did not."""
    took = figures.makespan
    if took <= max(_OVERRUN * forecast_seconds, forecast_seconds + _OVERRUN_SECONDS):
        return ""
    return (
        f"the run took {took:.2f} s, {took / forecast_seconds:.1f} times the forecast: "
        + find_limits(figures)[0].text
    )


def _best_layout(figures: RunFigures, again: Again) -> Iterator[Advice]:
    """The layout that finishes the same clips first on the same ranks.

    Both sides are forecasts, so that what no forecast knows of is in neither.
    """
    if not figures.forecast_seconds:
        return
    clips = min(figures.clips, _CLIPS_PER_RANK * figures.world_size)
    try:
        layout = choose_layout(
            num_steps=figures.num_steps,
            world_size=figures.world_size,
            num_clips=clips,
            costs=figures.costs,
            decodes=figures.decodes,
            cfg_parallel=figures.cfg_parallel,
        ).layout
        now = figures.forecast_seconds * clips / figures.clips
        times = now / forecast_layout(layout, clips).makespan
    except (RequestError, ZeroDivisionError):
        return
    if times < _WORTH_A_CHANGE:
        return
    changes: dict[str, object] = {
        "split": layout.split,
        "replicas": layout.replicas,
        "decoders": layout.decoders,
    }
    if layout.split != "uniform":
        changes["costs"] = again.costs
    yield Advice(
        text=f"{layout}, {times:.2f} times as fast at the measured costs",
        note="each device needs room for the whole model" if layout.replica_size == 1 else "",
        command=again.command(changes),
        times_as_fast=times,
    )


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What is said of a run."""

    path: Path
    """The run's manifest."""
    states: Mapping[str, int]
    """Number of clips in each state."""
    lost: tuple[dict[str, str], ...]
    """The `output` of each failed clip, empty if its image could not be read, and `why`."""
    diagnosis: Diagnosis | None
    """None if the run was killed, made no clip, or is of an earlier version."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        nothing = {"headline": "the run has left no figures", "findings": [], "advice": []}
        return {
            "schema_version": SCHEMA_VERSION,
            "manifest": str(self.path),
            "clips": dict(self.states),
            "lost": list(self.lost),
            **(nothing if self.diagnosis is None else self.diagnosis.to_json()),
        }


def read_report(path: Path, *, counts_flops: bool = False) -> RunReport:
    """The report on the run whose manifest is at `path`, or in that folder.

    Args:
        counts_flops: whether to build the model without weights, for TFLOP/s; takes seconds.
    """
    manifest = _find_manifest(path)
    content = read_manifest(manifest)
    try:
        clips = [dict(clip) for clip in content["clips"]]
        states = Counter(str(clip["state"]) for clip in clips)
        lost = tuple(
            {"output": str(clip.get("output") or ""), "why": str(clip["error"]["message"])}
            for clip in clips
            if clip["state"] == "failed"
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(manifest)!r} does not say what became of its clips") from error
    figures = figures_of(content, repr(str(manifest)))
    diagnosis = None if figures is None else diagnose(figures, run_again(manifest))
    if diagnosis is not None and counts_flops:
        diagnosis = replace(diagnosis, speeds=speeds_of(diagnosis.figures))
    return RunReport(path=manifest, states=states, lost=lost, diagnosis=diagnosis)


def run_again(manifest: Path) -> Again:
    """How to do the run again that left `manifest`."""

    def command(changes: Mapping[str, object]) -> str:
        words = {"layout": "pipeline", **changes} if "split" in changes else changes
        options = (f"--{name.replace('_', '-')} {shlex.quote(str(words[name]))}" for name in words)
        source = shlex.quote(str(manifest))
        return f"svdpp run --from {source} {' '.join(options)} --out out-again"

    return Again(manifest, command)


def _find_manifest(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{str(path)!r} does not exist", "svdpp report FOLDER of a run")
        return path
    if (path / NAME).exists():
        return path / NAME
    manifests = sorted(path.glob(f"*.{NAME}"))
    if len(manifests) == 1:
        return manifests[0]
    if manifests:
        names = ", ".join(manifest.name for manifest in manifests[:3])
        raise InputError(
            f"{str(path)!r} holds {len(manifests)} runs: {names}", f"svdpp report {manifests[0]}"
        )
    raise InputError(
        f"{str(path)!r} is not the folder of a run: it has no {NAME}",
        "name the folder that svdpp run wrote with --out, or results/EXPERIMENT/RUN of a bench",
    )
