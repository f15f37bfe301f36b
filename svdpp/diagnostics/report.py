"""The report on a run: its clips, its times, what limits it, and a layout that is faster."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.diagnostics.figures import RunFigures, figures_of
from svdpp.diagnostics.findings import Finding, find_limits
from svdpp.driver.run_manifest import NAME, read_manifest
from svdpp.errors import InputError, RequestError
from svdpp.plan.choose import choose_layout
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout

SCHEMA_VERSION = 3
_NOTHING: Mapping[str, Any] = {"headline": "the run has left no figures", "findings": []}
# A smaller gain is within the noise of a forecast.
_WORTH_A_CHANGE = 1.05
# A forecast of more clips takes longer, and says no more.
_CLIPS_PER_RANK = 16


class Advice(NamedTuple):
    """The layout that finishes the same clips first on the same ranks, by forecast."""

    text: str
    options: str
    """To add to the command."""
    times_as_fast: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the figures of a run, or of one round of a bench, say."""

    figures: RunFigures
    findings: tuple[Finding, ...]
    advice: Advice | None
    """None if no layout is faster by more than noise."""

    @property
    def headline(self) -> str:
        """The costliest finding."""
        return self.findings[0].text

    @property
    def lines(self) -> list[str]:
        """What limits the ranks and what to try, for the end of a run; none for few clips."""
        if not self._is_measured:
            return []
        lines = [f"limited by: {self.headline}"]
        if self.advice is not None:
            lines += [f"try: {self.advice.text}", f"  {self.advice.options}"]
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
    def forecast_error(self) -> float | None:
        """0.1 if the run took a tenth longer than forecast by all measured costs.

        None for so few clips that the first one, which warms up, decides.
        """
        seconds = self.figures.forecast_seconds
        return self.figures.makespan / seconds - 1 if seconds and self._is_measured else None

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as plain values."""
        return {
            "headline": self.headline,
            "findings": [finding._asdict() for finding in self.findings],
            "advice": self.advice and self.advice._asdict(),
            "forecast_error": self.forecast_error,
            "measured": self.figures.to_json(),
        }


def diagnose(figures: RunFigures, costs: Path, prefix: str = "--", equals: str = " ") -> Diagnosis:
    """The diagnosis of `figures`.

    Args:
        costs: a file that has the measured costs.
        prefix: of an option of the layout, such as `--pipeline.` in a bench.
        equals: between such an option and its value.
    """

    def options(layout: Layout) -> str:
        given = {name: str(getattr(layout, name)) for name in ("split", "replicas", "decoders")}
        if layout.split != "uniform":
            given["costs"] = shlex.quote(str(costs))
        return " ".join(f"{prefix}{name}{equals}{value}" for name, value in given.items())

    findings = tuple(find_limits(figures))
    return Diagnosis(figures=figures, findings=findings, advice=_best_layout(figures, options))


def _best_layout(figures: RunFigures, options: Callable[[Layout], str]) -> Advice | None:
    """Both sides are forecasts, so that what no forecast knows of is in neither."""
    if not figures.forecast_seconds:
        return None
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
        return None
    if times < _WORTH_A_CHANGE:
        return None
    text = f"{layout}, {times:.2f} times as fast"
    if layout.replica_size == 1:
        text += ", if each device holds the whole model"
    return Advice(text, options(layout), times)


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
        return {
            "schema_version": SCHEMA_VERSION,
            "manifest": str(self.path),
            "clips": dict(self.states),
            "lost": list(self.lost),
            **(_NOTHING if self.diagnosis is None else self.diagnosis.to_json()),
        }


def read_report(path: Path) -> RunReport:
    """The report on the run whose manifest is at `path`, or in that folder."""
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
    diagnosis = None if figures is None else diagnose(figures, manifest)
    return RunReport(path=manifest, states=states, lost=lost, diagnosis=diagnosis)


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
        "name the folder that svdpp run wrote with --out; a bench prints what limits it",
    )
