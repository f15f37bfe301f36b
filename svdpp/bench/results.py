"""The results of a bench: the figures of its rounds, a summary, and the folder with both."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import statistics
from collections.abc import Iterator, Mapping
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
    TABLE,
    TIME_PARTS,
    is_share,
)
from svdpp.bench.runner import Bench, Round, differing
from svdpp.bench.targets import outcome
from svdpp.diagnostics.cost_profile import median_costs
from svdpp.diagnostics.environment import environment
from svdpp.diagnostics.figures import rounded
from svdpp.errors import OutputError, SvdppError, error_to_dict
from svdpp.media import output_files
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import percentile
from svdpp.redaction import redact_all

SCHEMA_VERSION = 3


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
        """Appends a round's figures, for `svdpp report`."""
        measured = redact_all(done.figures.to_json())
        self._append({"case": done.case, "round": done.number, "measured": measured})

    @contextlib.contextmanager
    def failure_recorded(self) -> Iterator[None]:
        """Records an error that ends the block, for `svdpp report`."""
        try:
            yield
        except SvdppError as error:
            with contextlib.suppress(OutputError):  # it would hide the error
                self._append({"error": redact_all(error_to_dict(error))})
            raise

    def _append(self, record: Mapping[str, Any]) -> None:
        with (
            output_files.disk_errors(f"{ROUNDS} cannot be written"),
            (self.folder / ROUNDS).open("a", encoding="ascii") as file,
        ):
            file.write(json.dumps(record) + "\n")

    def finish(self) -> dict[str, Any]:
        """Writes summary, table and costs; returns what `summary.json` holds."""
        found = summary(self._bench, self.run_id)
        output_files.write_json(self.folder / COSTS, costs_of(self._bench, self.run_id).to_json())
        output_files.write_json(self.folder / SUMMARY, found)
        rows = list(_table(found))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        output_files.write_text(self.folder / TABLE, text.getvalue())
        return found


def summary(bench: Bench, run_id: str) -> dict[str, Any]:
    """The content of `summary.json`."""
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


def _table(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    about = {name: content[name] for name in ("experiment", "run_id", "config_sha256")}
    hashes = " ".join(content["latents_sha256"]) if content["same_bits"] else ""
    for case, values in content["cases"].items():
        names = {"case": case, "layout": values["layout"], "world": values["world"]}
        for figures in values["rounds"]:
            yield {**about, **names, **figures, "latents_sha256": hashes}
