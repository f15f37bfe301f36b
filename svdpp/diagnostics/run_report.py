"""The report on a finished run: its clips, its times, what limits it, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.diagnostics.advice import RunAgain
from svdpp.diagnostics.diagnosis import Diagnosis, diagnose
from svdpp.diagnostics.figures import figures_of
from svdpp.diagnostics.utilisation import Speeds, speeds_of
from svdpp.driver.run_manifest import NAME, read_manifest
from svdpp.errors import InputError

SCHEMA_VERSION = 1
_NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("findings", "advice", "memory"), ()),
    "utilisation": asdict(Speeds()),
    "joules_per_clip": None,
    "forecast_errors": {},
    "measured": None,
}
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
    diagnosis: Diagnosis | None
    """None if the run was killed, made no clip, or is of an earlier version."""

    @property
    def headline(self) -> str:
        """The most useful line."""
        return self.diagnosis.headline if self.diagnosis else "the run has left no figures"

    @property
    def times(self) -> str:
        """Start, first clip and rate in one line."""
        if self.diagnosis is None:
            return "times: none, because the run was killed, made no clip, or left no figures"
        return self.diagnosis.times

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        diagnosis = _NOTHING if self.diagnosis is None else self.diagnosis.to_json()
        return {
            "schema_version": SCHEMA_VERSION,
            "manifest": str(self.path),
            "clips": dict(self.states),
            "lost": [asdict(each) for each in self.lost],
            **diagnosis,
            "headline": self.headline,
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
    again = RunAgain(str(manifest), options)
    return RunReport(
        path=manifest,
        about={name: content.get(name) for name in ("started_at", "model", "device")},
        states=states,
        lost=lost,
        diagnosis=None if figures is None else diagnose(figures, again),
    )


def with_speeds(report: RunReport) -> RunReport:
    """The report with each rank's TFLOP/s; takes seconds to build the model without weights."""
    if report.diagnosis is None:
        return report
    speeds = speeds_of(report.diagnosis.figures)
    return replace(report, diagnosis=replace(report.diagnosis, speeds=speeds))


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
        "name the folder that svdpp run wrote with --out, or results/EXPERIMENT/RUN of a bench",
    )


def write_page(report: RunReport, path: Path) -> None:
    """Writes the report as one self-contained HTML page.

    Raises:
        OutputError: the page cannot be written.
    """
    from svdpp.media.html_page import write_html_page

    name = report.path.absolute().parent.name
    write_html_page(_TEMPLATE, path, report=report, name=name)
