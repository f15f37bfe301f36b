"""Report on a finished run: clips, times, causes that limit the speed, and a faster layout."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.diagnostics.run_metrics import RankRunMetrics, RunMetrics, WorkMetrics, parse_run_metrics
from svdpp.driver.manifest import read_manifest
from svdpp.driver.output_policy import MANIFEST
from svdpp.errors import InputError, RequestError, pluralize
from svdpp.plan.choose import choose_layout
from svdpp.plan.forecast import forecast_layout
from svdpp.plan.parallel import layout_options

SCHEMA_VERSION = 3
_NOTHING: Mapping[str, Any] = {"headline": "the run has recorded no measurements", "findings": []}
# Minimum fraction of the run's time that a cause must cost; smaller causes are not reported.
_WORTH_NAMING = 0.05
# A rank counts as slow if its step takes this many times as long as the other ranks' median step.
_SLOW = 1.15
# Minimum speed-up for which another layout is advised. Smaller speed-ups are within the forecast's
# error.
_WORTH_A_CHANGE = 1.05
# Maximum number of clips for each rank in a forecast. More clips would hardly change the result.
_CLIPS_PER_RANK = 16


class Finding(NamedTuple):
    """Cause that makes a run take longer than necessary."""

    kind: str
    """Identifier, such as `decode`, `disk` or `few_clips`."""
    text: str
    """Sentence of at most 68 characters, for a line of a terminal."""
    rank: int | None = None
    """Rank that limits the other ranks; None if no single rank does."""
    lost_seconds: float = 0.0
    """Estimated seconds by which the run would be shorter without this cause."""


# Format string of a command-line option: it takes the name and the value of the option.
_OPTION_FORMAT = "--{} {}"


class Advice(NamedTuple):
    """Advice to use the layout that is forecast to be the fastest for the same clips and ranks."""

    text: str
    """Sentence for the user, with the advised layout and its speed-up."""
    options: str
    """Options that select the advised layout, to be added to the command."""
    times_as_fast: float
    """Forecast speed of the advised layout, divided by the forecast speed of the run's layout."""


@dataclass(frozen=True, kw_only=True)
class RunAnalysis:
    """Analysis of the metrics of a run, or of one round of a benchmark."""

    metrics: RunMetrics
    findings: tuple[Finding, ...]
    """Causes that limit the run, the costliest first; at least one."""
    advice: Advice | None
    """Advice to use another layout; None if no layout is clearly faster."""

    @property
    def lines(self) -> list[str]:
        """Lines that are printed at the end of a run: what limits the ranks, and what to try."""
        lines = [f"limited by: {self.findings[0].text}"]
        if self.advice is not None:
            lines += [f"try: {self.advice.text}", f"  {self.advice.options}"]
        return lines

    @property
    def forecast_error(self) -> float | None:
        """Relative error of a run's forecast: 0.1 if the run took a tenth longer than forecast.

        The forecast uses the measured costs. None: no forecast exists, or the run has too few
        clips, so that the warm-up in the first clip dominates.
        """
        metrics, seconds = self.metrics, self.metrics.forecast_seconds
        is_long = metrics.clips > metrics.world_size
        return metrics.makespan / seconds - 1 if seconds and is_long else None

    def to_json(self) -> dict[str, Any]:
        """Return the analysis of a run as plain values."""
        return {
            "headline": self.findings[0].text,
            "findings": [finding._asdict() for finding in self.findings],
            "advice": self.advice and self.advice._asdict(),
            "forecast_error": self.forecast_error,
            "measured": self.metrics.to_json(),
        }


def _find_limits(metrics: RunMetrics) -> list[Finding]:
    """Return the causes that limit a run's speed, the costliest first.

    If no cause is found, return a single finding of the kind `balanced`.

    The busiest rank sets the pace of a full pipeline. A cause is a reason why this rank is busier
    than the mean of all ranks, or a resource that this rank waits for.
    """
    least = _WORTH_NAMING * (metrics.makespan + metrics.write_tail)
    causes = [*_imbalance(metrics), *_waits(metrics)]
    worth = [each for each in causes if each.lost_seconds >= least]
    shares = [rank.compute / rank.wall if rank.wall else 0.0 for rank in metrics.ranks]
    text = f"no single rank: each computes {min(shares):.0%} to {max(shares):.0%} of the time"
    return sorted(worth, key=lambda cause: -cause.lost_seconds) or [Finding("balanced", text)]


def _busiest(metrics: RunMetrics) -> RankRunMetrics:
    """Return the rank of a run that works longest. Its waits for images and disks count as work."""
    return max(metrics.ranks, key=lambda rank: rank.compute + rank.image_wait + rank.writer_wait)


def _imbalance(metrics: RunMetrics) -> Iterator[Finding]:
    """Yield the main reason why the busiest rank is busier than the other ranks."""
    limit = _busiest(metrics)
    others = [rank for rank in metrics.ranks if rank is not limit]
    excess = limit.compute - statistics.fmean(rank.compute for rank in metrics.ranks)
    if not others or excess <= 0:
        return
    stepped = [rank.step.mean_seconds for rank in others if rank.step.count]
    usual, limit_step = statistics.median(stepped or [0.0]), limit.step
    slowness = limit_step.mean_seconds / usual if usual and limit_step.count else 1.0
    slowness = slowness if slowness >= _SLOW else 1.0
    steps = statistics.fmean(rank.step.count for rank in others)

    def more(work: WorkMetrics, theirs: list[WorkMetrics]) -> float:
        return work.seconds / slowness - statistics.fmean(each.seconds for each in theirs)

    # One tuple for each possible cause: the seconds of the busiest rank's extra work that the cause
    # explains, the cause's kind, and the cause's text.
    lost, kind, why = max(
        (more(limit.decode, [rank.decode for rank in others]), "decode",
         f"its decodes take {limit.decode.seconds / limit.compute:.0%} of its work"),
        (more(limit.encode, [rank.encode for rank in others]), "encode",
         f"its encodes take {limit.encode.seconds / limit.compute:.0%} of its work"),
        ((limit_step.count - steps) * limit_step.mean_seconds / slowness, "steps",
         f"it does {pluralize(limit_step.count, 'step')}, the others {steps:.0f} on average"),
        (limit.compute * (1 - 1 / slowness), "slow_device",
         f"a step takes {limit_step.mean_seconds:.3g} s, on the others {usual:.3g} s"),
    )  # fmt: skip
    text = f"rank {limit.rank}: {why}"
    yield Finding(kind, text, limit.rank, min(excess, lost))


def _waits(metrics: RunMetrics) -> Iterator[Finding]:
    """Yield a finding for each possible cause of waits: images, disk, transfers, too few clips.

    `lost_seconds` is 0 for a cause that cost no time.
    """
    rank = max(metrics.ranks, key=lambda rank: rank.image_wait)
    text = f"rank {rank.rank} waits {rank.image_wait:.1f} s for images to be read"
    yield Finding("images", text, rank.rank, rank.image_wait)
    rank = max(metrics.ranks, key=lambda rank: rank.writer_wait + rank.write.seconds)
    text = (
        f"rank {rank.rank} writes a clip in {rank.write.mean_seconds:.3g} s, and one comes every "
        f"{metrics.seconds_per_clip:.3g} s"
    )
    yield Finding("disk", text, rank.rank, rank.writer_wait + metrics.write_tail)
    rank = max(metrics.ranks, key=lambda rank: rank.transfer)
    text = (
        f"rank {rank.rank} waits {rank.transfer:.1f} s while packets arrive, "
        f"{metrics.transfer_seconds:.3g} s each"
    )
    yield Finding("transfers", text, rank.rank, rank.transfer)
    rank = _busiest(metrics)
    filling = max(0.0, min(rank.idle + rank.packet_wait - rank.transfer, metrics.first_clip))
    text = (
        f"{pluralize(metrics.clips, 'clip')} cannot fill {pluralize(metrics.world_size, 'rank')}: "
        f"at start and end rank {rank.rank} has no work"
    )
    yield Finding("few_clips", text, None, filling)


def analyze(metrics: RunMetrics, costs: Path, option: str = _OPTION_FORMAT) -> RunAnalysis:
    """Return the analysis of a run's metrics: causes that limit the speed, and a faster layout.

    Args:
        metrics: Metrics of the finished run.
        costs: Path of a file with the measured costs.
        option: Format string for the options in the advice, which gets the name and the value of an
            option: `--{} {}` for `svdpp run`, `--pipeline.{}={}` for `svdpp bench`.
    """
    advice = _advise_layout(metrics, costs, option)
    return RunAnalysis(metrics=metrics, findings=tuple(_find_limits(metrics)), advice=advice)


def _advise_layout(metrics: RunMetrics, costs: Path, option: str) -> Advice | None:
    """Return the layout with the best forecast, if it is clearly faster than the run's layout.

    The forecasts of the two layouts are compared, instead of a forecast and the measured time,
    because measured times include delays that forecasts ignore.
    """
    if metrics.costs is None or not metrics.forecast_seconds:
        return None
    clips = min(metrics.clips, _CLIPS_PER_RANK * metrics.world_size)
    try:
        layout = choose_layout(
            num_steps=metrics.num_steps,
            world_size=metrics.world_size,
            num_clips=clips,
            costs=metrics.costs,
            decodes=metrics.decodes,
            cfg_parallel_size=metrics.cfg_parallel,
        ).layout
        now = metrics.forecast_seconds * clips / metrics.clips
        times = now / forecast_layout(layout, clips).makespan
    except (RequestError, ZeroDivisionError):
        return None
    if times < _WORTH_A_CHANGE:
        return None
    text = f"{layout}, {times:.2f} times as fast"
    if layout.replica_size == 1:
        text += ", if each device holds the whole model"
        if option == _OPTION_FORMAT:
            return Advice(text, "--layout data-parallel", times)
    options = {
        option.name: getattr(layout, name)
        for name, option in layout_options().items()
        if "auto" in option.chosen_by
    }
    if layout.split != "uniform":
        options["costs"] = shlex.quote(str(costs))
    return Advice(text, " ".join(option.format(*each) for each in options.items()), times)


# --- report on a run's folder --------------------------------------------------------------------


def read_report(path: Path) -> tuple[dict[str, Any], RunAnalysis | None]:
    """Read the report on a run from its manifest, and analyse the run's metrics.

    Args:
        path: Path of the run's manifest, or of the run's output folder.

    Returns:
        Report as plain values, and the analysis. The analysis is None if the run was killed, made
        no clip, or used an earlier version of svdpp.

    Raises:
        InputError: The manifest is missing or damaged, or the file is not the manifest of a run.
    """
    manifest = _find_manifest(path)
    content = read_manifest(manifest)
    try:
        states = Counter(str(clip["state"]) for clip in content["clips"])
        lost = [
            {"output": str(clip.get("output") or ""), "why": str(clip["error"]["message"])}
            for clip in content["clips"]
            if clip["state"] == "failed"
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(manifest)!r} has no results of its clips") from error
    metrics = parse_run_metrics(content, repr(str(manifest)))
    analysis = None if metrics is None else analyze(metrics, manifest)
    report = {
        "schema_version": SCHEMA_VERSION,
        "manifest": str(manifest),
        "clips": dict(states),
        "lost": lost,
        **(_NOTHING if analysis is None else analysis.to_json()),
    }
    return report, analysis


def _find_manifest(path: Path) -> Path:
    if not path.is_dir() or (path / MANIFEST).exists():
        return path / MANIFEST if path.is_dir() else path
    manifests = sorted(path.glob(f"*.{MANIFEST}"))
    if len(manifests) == 1:
        return manifests[0]
    raise InputError(
        f"{str(path)!r} has {f'{len(manifests)} runs' if manifests else f'no {MANIFEST}'}",
        f"name a run's folder, or name a file *.{MANIFEST} in it; "
        "svdpp bench prints its own report",
        details={"path": str(path), "runs": len(manifests)},
    )
