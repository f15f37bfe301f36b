"""The results of a bench: the figures of its rounds, a summary, and the folder with both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from svdpp.bench.compare import (
    CONFIG,
    COSTS,
    DATA_PARALLEL,
    ENVIRONMENT,
    FIGURES,
    ONE_DEVICE,
    PIPELINE,
    ROUNDS,
    SUMMARY,
    TIME_PARTS,
    is_share,
)
from svdpp.bench.runner import Bench, Round, differing
from svdpp.bench.targets import outcome
from svdpp.diagnostics.cost_profile import median_costs
from svdpp.diagnostics.environment import environment
from svdpp.diagnostics.figures import rounded
from svdpp.diagnostics.report import diagnose
from svdpp.media import output_files
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import percentile

SCHEMA_VERSION = 4


class Results:
    """The folder of one run: configuration and environment, then rounds, then the summary."""

    def __init__(self, root: Path, bench: Bench) -> None:
        self._bench = bench
        output_files.check_writable(root.absolute())
        sha256 = bench.asked.sha256
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{sha256[:8]}"
        self.folder = root / bench.asked.experiment / self.run_id
        with output_files.disk_errors(f"{str(self.folder)!r} cannot be created"):
            self.folder.mkdir(parents=True)
        text = f"# sha256 {sha256}\n{bench.asked.to_yaml()}"
        output_files.write_text(self.folder / CONFIG, text)
        output_files.write_json(self.folder / ENVIRONMENT, environment())

    def add(self, done: Round) -> None:
        """Appends a round's figures, which stay if the bench fails later."""
        measured = done.figures.to_json()
        record = {"case": done.case, "round": done.number, "measured": measured}
        with (
            output_files.disk_errors(f"{ROUNDS} cannot be written"),
            (self.folder / ROUNDS).open("a", encoding="ascii") as file,
        ):
            file.write(json.dumps(record) + "\n")

    def finish(self) -> dict[str, Any]:
        """Writes summary and costs; returns what `summary.json` holds."""
        found = {**summary(self._bench, self.run_id), "limits": self._limits()}
        output_files.write_json(self.folder / COSTS, costs_of(self._bench, self.run_id).to_json())
        output_files.write_json(self.folder / SUMMARY, found)
        return found

    def _limits(self) -> dict[str, Any]:
        """The diagnosis of the pipeline's round with the median makespan."""
        rounds = sorted(self._bench.rounds_of(PIPELINE), key=lambda done: done.figures.makespan)
        median = rounds[(len(rounds) - 1) // 2]

        found = diagnose(median.figures, self.folder / COSTS, "--pipeline.", "=")
        return {"round": median.number, **found.to_json()}


def summary(bench: Bench, run_id: str) -> dict[str, Any]:
    """What `summary.json` holds, without what limits the pipeline."""
    cases = {case: _case(bench, case) for case in bench.cases}
    content = {
        "schema_version": SCHEMA_VERSION,
        "experiment": bench.asked.experiment,
        "run_id": run_id,
        "config_sha256": bench.asked.sha256,
        "config": json.loads(json.dumps(bench.asked.model_dump())),
        "cases": cases,
        "speedups": _speedups(cases),
        "same_bits": not differing(bench.rounds),
        "latents_sha256": bench.rounds_of(PIPELINE)[0].latents_sha256,
    }
    targets = bench.asked.targets.items()
    return {**content, "targets": {name: outcome(name, text, content) for name, text in targets}}


def _case(bench: Bench, case: str) -> dict[str, Any]:
    config, error = bench.cases[case], bench.out_of_memory.get(case)
    rounds = [_figures(done) for done in bench.rounds_of(case)]
    return {
        "layout": "diffusers' own pipeline" if case == ONE_DEVICE else str(config.layout),
        "world": config.world_size,
        "error": None if error is None else error.message,
        "rounds": rounds,
        "over_rounds": {name: _over_rounds(name, rounds) for name in FIGURES if rounds},
    }


def _over_rounds(name: str, rounds: list[dict[str, Any]]) -> float | None:
    """One number for a figure of all rounds; None if no round has it.

    It is the geometric mean, as in `compare`, so that the ratio of two cases is the mean of the
    rounds' ratios. For shares it is the arithmetic mean, so that they still add up to 1; for memory
    it is the maximum.
    """
    values = [figures[name] for figures in rounds if figures[name] is not None]
    if not values:
        return None
    if name.startswith("peak_"):
        return float(max(values))
    if is_share(name):
        return statistics.fmean(values)
    return statistics.geometric_mean(values) if all(values) else 0.0


def _figures(done: Round) -> dict[str, Any]:
    """A round's figures, as plain numbers; those of each rank are in `rounds.jsonl`."""
    figures, forecast = done.figures, done.figures.forecast_seconds
    steps, ranks = [step.end - step.start for step in done.trace.steps], done.figures.ranks
    wall = sum(rank.wall for rank in ranks)
    values = {
        "clips": figures.clips,
        "makespan_seconds": figures.makespan,
        "overhead": figures.makespan / forecast if forecast else None,
        "first_clip_seconds": figures.first_clip,
        "steady_clips_per_minute": 60 / figures.seconds_per_clip,
        **{f"step_p{n}_seconds": percentile(steps, n) for n in (50, 90, 95)},
        "bubble": figures.bubble,
        **{f"{part}_share": sum(getattr(r, part) for r in ranks) / wall for part in TIME_PARTS},
        "start_seconds": figures.start_seconds,
        "load_seconds": max(rank.load_seconds for rank in ranks),
        "peak_allocated_gib": max(rank.allocated_bytes or 0 for rank in ranks) / 2**30 or None,
        "peak_reserved_gib": max(rank.peak_bytes or 0 for rank in ranks) / 2**30 or None,
    }
    return {"round": done.number, **rounded(values)}


def _speedups(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's clips per minute over those of each other case in the same round."""
    rate = "steady_clips_per_minute"
    ours = {figures["round"]: figures[rate] for figures in cases[PIPELINE]["rounds"]}
    result = {}
    for case, about in cases.items():
        rounds = about["rounds"]
        ratios = [round(ours[figures["round"]] / figures[rate], 4) for figures in rounds]
        if case != PIPELINE and ratios:
            result[case] = {"rounds": ratios, "over_rounds": statistics.geometric_mean(ratios)}
    return result


def costs_of(bench: Bench, run_id: str) -> Costs:
    """The medians of all rounds of the pipeline. A bench does not measure memory and writing.

    A rank that only decodes in the pipeline has its steps from data parallel.
    """
    traces = [done.trace for done in bench.rounds_of(PIPELINE)]
    elsewhere = [done.trace for done in bench.rounds_of(DATA_PARALLEL)]
    source = f"measured by: svdpp bench, {bench.asked.experiment}/{run_id}"
    return median_costs(bench.config, None, traces, elsewhere, source=source)
