"""Owns the report on a finished run: its clips, its times, what limits it, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from svdpp.diagnostics.advice import WORTH_A_CHANGE, Advice, advise
from svdpp.diagnostics.bottleneck import Finding, find_limits
from svdpp.diagnostics.figures import RunFigures, figures_of
from svdpp.diagnostics.head_room import HeadRoom, head_rooms
from svdpp.diagnostics.utilisation import Speeds, speeds_of
from svdpp.driver.run_manifest import NAME, read_manifest
from svdpp.errors import InputError

SCHEMA_VERSION = 1
_TEMPLATE = Path(__file__).with_name("run_report.html.j2")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A clip that failed."""

    output: str
    """Name of its file; empty if the photograph could not be read."""
    why: str

    @staticmethod
    def of(clip: Mapping[str, Any]) -> Lost:
        """The clip of a manifest's entry."""
        return Lost(output=str(clip.get("output") or ""), why=str(clip["error"]["message"]))


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What one page says of a run."""

    path: Path
    """The run's manifest."""
    about: Mapping[str, Any]
    """The manifest's fields about the run."""
    states: Mapping[str, int]
    """Number of clips in each state."""
    lost: tuple[Lost, ...]
    """The clips that failed."""
    figures: RunFigures | None
    """None if the run was killed, or all its clips existed."""
    findings: tuple[Finding, ...] = ()
    advice: tuple[Advice, ...] = ()
    head_rooms: tuple[HeadRoom, ...] = ()
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def headline(self) -> str:
        """The most useful line: the costliest finding, and the best advice for it."""
        if not self.findings:
            return "the run has left no figures"
        first = self.findings[0]
        answers = [advice for advice in self.advice if first.kind in advice.kinds]
        faster = [advice for advice in self.advice if (advice.times_as_fast or 0) >= WORTH_A_CHANGE]
        best = next(iter([*faster, *answers]), None)
        return first.text if best is None else f"{first.text}. What helps: {best.text}"

    @property
    def times(self) -> str:
        """Start, first clip and rate in one line."""
        figures = self.figures
        if figures is None:
            return "times: none, because the run was killed, made no clip, or left no figures"
        clips = f"{figures.clips} clip{'s' if figures.clips > 1 else ''}"
        return (
            f"times: {figures.start_seconds:.1f} s to start, then {clips} in "
            f"{figures.makespan:.1f} s, the first after {figures.first_clip:.1f} s, then one every "
            f"{figures.seconds_per_clip:.2f} s; bubble {figures.bubble:.0%}"
        )

    @property
    def gpu_lines(self) -> list[str]:
        """One line for each GPU that was sampled, the energy, or why there is nothing."""
        figures = self.figures
        if figures is None or figures.device == "cpu":
            return []
        sampled = [rank for rank in figures.ranks if rank.gpu is not None]
        if not sampled:
            return ["no figures of the GPUs: NVML gave none"]
        lines = [f"GPU of rank {rank.rank}: {rank.gpu}" for rank in sampled]
        if figures.joules_per_clip is not None:
            lines.append(f"energy: {figures.joules_per_clip:.0f} J a clip, all GPUs together")
        return lines

    @property
    def eta_errors(self) -> dict[str, float]:
        """By how much each forecast was off: 0.1 if the run took a tenth longer than forecast."""
        if self.figures is None:
            return {}
        forecasts = asdict(self.figures.forecast)
        return {
            name: self.figures.makespan / seconds - 1
            for name, seconds in forecasts.items()
            if seconds
        }

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "manifest": str(self.path),
            "clips": dict(self.states),
            "lost": [asdict(each) for each in self.lost],
            "headline": self.headline,
            "findings": [asdict(each) for each in self.findings],
            "advice": [asdict(each) for each in self.advice],
            "memory": [{**asdict(room), "free_share": room.free_share} for room in self.head_rooms],
            "utilisation": asdict(self.speeds),
            "joules_per_clip": None if self.figures is None else self.figures.joules_per_clip,
            "forecast_errors": self.eta_errors,
            "measured": None if self.figures is None else self.figures.to_json(),
        }


def read_report(path: Path) -> RunReport:
    """The report on the run whose manifest is at `path`, or in that folder.

    Raises:
        InputError: there is no manifest, or it is damaged.
    """
    manifest = find_manifest(path)
    content = read_manifest(manifest)
    try:
        clips = [dict(clip) for clip in content["clips"]]
        states = Counter(str(clip["state"]) for clip in clips)
        lost = tuple(Lost.of(clip) for clip in clips if clip["state"] == "failed")
        options = dict(content.get("options") or {})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(manifest)!r} does not say what became of its clips") from error
    figures = figures_of(content, repr(str(manifest)))
    findings = () if figures is None else tuple(find_limits(figures))
    return RunReport(
        path=manifest,
        about={name: content.get(name) for name in ("started_at", "model", "device")},
        states=states,
        lost=lost,
        figures=figures,
        findings=findings,
        advice=() if figures is None else tuple(advise(figures, findings, options, str(manifest))),
        head_rooms=() if figures is None else tuple(head_rooms(figures)),
    )


def with_speeds(report: RunReport) -> RunReport:
    """The report with each rank's TFLOP/s; takes seconds to build the model without weights."""
    return replace(report, speeds=speeds_of(report.figures))


def find_manifest(path: Path) -> Path:
    """The manifest at `path`, or in the folder at `path`.

    Raises:
        InputError: there is none, or several.
    """
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{str(path)!r} does not exist", "svdpp report FOLDER of a run")
        return path
    if (path / NAME).exists():
        return path / NAME
    found = sorted(path.glob(f"*.{NAME}"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(each.name for each in found[:3])
        raise InputError(
            f"{str(path)!r} holds {len(found)} runs: {names}", f"svdpp report {found[0]}"
        )
    raise InputError(
        f"{str(path)!r} is not the folder of a run: it has no {NAME}",
        "name the folder that svdpp run wrote with --out",
    )


def write_page(report: RunReport, path: Path) -> None:
    """Writes the report as one self-contained HTML page.

    Raises:
        OutputError: the page cannot be written.
    """
    from svdpp.media.html_page import write_html_page

    name = report.path.absolute().parent.name
    write_html_page(_TEMPLATE, path, report=report, name=name, times=report.times)
