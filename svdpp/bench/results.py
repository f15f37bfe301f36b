"""Results of a benchmark: its folder, its files and its metrics."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from svdpp.bench.runner import Bench, Round, differing
from svdpp.bench.targets import ONE_DEVICE, PIPELINE, outcomes
from svdpp.diagnostics.machine import environment, median_costs
from svdpp.diagnostics.report import analyze
from svdpp.diagnostics.run_metrics import rounded
from svdpp.diagnostics.utilisation import peaks_of, speed_of_run
from svdpp.driver.trace import StepSpan, TimedSpan, Trace, TransferSpan, WaitSpan
from svdpp.media import output_files
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span

SCHEMA_VERSION = 5

#: Names of the files in a benchmark's folder.
SUMMARY, TABLE, CONFIG, ENVIRONMENT = "summary.json", "summary.csv", "config.yaml", "env.json"
ROUNDS, SPANS, PROFILE, COSTS = "rounds.jsonl", "spans.jsonl", "profile.json", "costs.json"

#: Metric from which speed-ups are computed: the pipeline's value divided by a baseline's value.
RATE = "steady_clips_per_minute"


class Results:
    """Folder with the results of one benchmark.

    Configuration and environment are written first, then each round, and the summary last.
    """

    def __init__(self, root: Path, bench: Bench) -> None:
        self._bench = bench
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        self.folder = root / bench.bench_config.experiment / self.run_id
        with output_files.disk_errors(f"{str(self.folder)!r} cannot be created"):
            self.folder.mkdir(parents=True)
        output_files.write_text(self.folder / CONFIG, bench.bench_config.to_yaml())
        output_files.write_json(self.folder / ENVIRONMENT, environment())

    def add(self, done: Round) -> None:
        """Append a round's metrics and spans to the benchmark's files, in case a later round fails.

        Args:
            done: Measured round.

        Raises:
            OutputError: The files cannot be written.
        """
        about = {"case": done.case, "round": done.number}
        self._append(ROUNDS, [{**about, "measured": done.metrics.to_json()}])
        self._append(SPANS, ({**about, **span} for span in spans_of(done.trace)))

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        with (
            output_files.disk_errors(f"{name} cannot be written"),
            (self.folder / name).open("a", encoding="ascii") as file,
        ):
            file.writelines(json.dumps(record) + "\n" for record in records)

    def finish(self) -> dict[str, Any]:
        """Write a finished benchmark's summary, table and costs, and return the summary.

        Returns:
            Content of `summary.json`. Its field `limits` says what limits the pipeline, for the
            round with the median makespan.

        Raises:
            OutputError: A file cannot be written.
        """
        bench, path = self._bench, self.folder / COSTS
        cases = {case: _case(bench, case) for case in bench.cases}
        rounds = sorted(bench.rounds_of(PIPELINE), key=lambda done: done.metrics.makespan)
        median, traces = rounds[(len(rounds) - 1) // 2], [done.trace for done in rounds]
        source = f"measured by: svdpp bench, {bench.bench_config.experiment}/{self.run_id}"
        costs = median_costs(bench.config, None, traces, source=source)
        limits = analyze(median.metrics, path, "--pipeline.{}={}").to_json()
        found = {
            "schema_version": SCHEMA_VERSION,
            "experiment": bench.bench_config.experiment,
            "run_id": self.run_id,
            "config": json.loads(json.dumps(bench.bench_config.model_dump())),
            "config_sha256": bench.bench_config.sha256,
            "flops": bench.flops._asdict(),
            "cases": cases,
            "speedups": _speedups(cases),
            "same_bits": not differing(bench.rounds),
            "latents_sha256": [latent for latent, _ in bench.rounds_of(PIPELINE)[0].sha256],
            "limits": {"round": median.number, **limits},
        }
        found["targets"] = [each._asdict() for each in outcomes(bench.bench_config.targets, found)]
        output_files.write_json(path, costs.to_json())
        output_files.write_json(self.folder / SUMMARY, found)
        with output_files.disk_errors(f"{TABLE} cannot be written"):
            write_table(self.folder / TABLE, cases)
        return found


def spans_of(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the actions, steps, waits and transfers of a benchmark's round, in order of time.

    Args:
        trace: Measurements of the round.

    Yields:
        Dictionary with the span's kind, rank, clip and further fields. `start` and `end` are in
        seconds since the earliest span of all ranks began.
    """
    spans: list[TimedSpan] = [*trace.spans, *trace.steps, *trace.waits, *trace.transfers]
    spans.sort(key=lambda span: (span.start, span.rank))
    begun = spans[0].start if spans else 0.0
    for span in spans:
        times = {name: round(getattr(span, name) - begun, 6) for name in ("start", "end")}
        yield {**_kind_of(span), "rank": span.rank, "clip": span.clip, **times}


def _kind_of(span: TimedSpan) -> dict[str, Any]:
    match span:
        case Span(action=action):
            steps = {"step": action.start, "end_step": action.end}
            return {"kind": action.kind.lower(), **(steps if action.kind is Kind.DENOISE else {})}
        case StepSpan(step=step):
            return {"kind": "step", "step": step}
        case WaitSpan():
            return {"kind": "wait"}
        case TransferSpan():
            about = {"step": span.next_step, "peer": span.peer, "bytes": span.num_bytes}
            return {"kind": span.direction, **about}


def write_table(path: Path, cases: Mapping[str, Any]) -> None:
    """Write a benchmark's metrics as CSV, with one row for each round of each case.

    A case is the pipeline or one of its baselines. The last row of each case has the metrics over
    all rounds.

    Args:
        path: Path of the file.
        cases: Field `cases` of a summary. If a case lacks a metric, the metric's cell is empty.
    """
    names = next((list(about["over_rounds"]) for about in cases.values()), [])
    with path.open("w", encoding="ascii", newline="") as file:
        table = csv.DictWriter(file, ["case", "round", *names])
        table.writeheader()
        for case, about in cases.items():
            if about["rounds"]:
                rounds = [*about["rounds"], {**about["over_rounds"], "round": "all"}]
                table.writerows({"case": case, **metrics} for metrics in rounds)


def _case(bench: Bench, case: str) -> dict[str, Any]:
    config, error = bench.cases[case], bench.out_of_memory.get(case)
    rounds = [_round_metrics(bench, done) for done in bench.rounds_of(case)]
    names = [name for name in rounds[0] if name != "round"] if rounds else []
    return {
        "layout": "diffusers' own pipeline" if case == ONE_DEVICE else str(config.layout),
        "world": config.world_size,
        "error": None if error is None else error.message,
        "rounds": rounds,
        "over_rounds": {name: _over_rounds(name, rounds) for name in names},
    }


def _over_rounds(name: str, rounds: list[dict[str, Any]]) -> float | None:
    """Combine a metric's values of all rounds into one; None if no round has the metric.

    The value is the geometric mean, so that the ratio of two cases equals the geometric mean of
    their ratios in each round. Fractions use the arithmetic mean, so that they still add up to 1.
    Memory uses the maximum.
    """
    values = [metrics[name] for metrics in rounds if metrics[name] is not None]
    if not values:
        return None
    if name.startswith("peak_"):
        return float(max(values))
    if name == "bubble" or name.endswith("_share"):
        return statistics.fmean(values)
    return statistics.geometric_mean(values) if all(values) else 0.0


def _round_metrics(bench: Bench, done: Round) -> dict[str, Any]:
    """Return a round's metrics for all ranks together, by the names of `METRICS`."""
    metrics, forecast = done.metrics, done.metrics.forecast_seconds
    steps, ranks = [step.end - step.start for step in done.trace.steps], done.metrics.ranks
    wall = sum(rank.wall for rank in ranks)
    peaks = peaks_of(metrics, bench.config.model.dtype, bench.bench_config.measure.peak_tflops)
    speed = speed_of_run(metrics, bench.flops, peaks)
    parts = ("compute", "wait", "transfer", "idle", "unaccounted")
    values = {
        "clips": metrics.clips,
        "makespan_seconds": metrics.makespan,
        "overhead": metrics.makespan / forecast if forecast else None,
        "first_clip_seconds": metrics.first_clip,
        RATE: 60 / metrics.seconds_per_clip,
        **{f"step_p{n}_seconds": float(np.percentile(steps, n)) for n in (50, 90, 95)},
        "tflops": speed.tflops,
        "utilisation": speed.utilisation,
        "bubble": metrics.bubble,
        **{f"{part}_share": sum(getattr(r, part) for r in ranks) / wall for part in parts},
        "start_seconds": metrics.start_seconds,
        "load_seconds": max(rank.load_seconds for rank in ranks),
        "peak_allocated_gib": max(rank.allocated_bytes or 0 for rank in ranks) / 2**30 or None,
        "peak_reserved_gib": max(rank.peak_bytes or 0 for rank in ranks) / 2**30 or None,
    }
    return {"round": done.number, **rounded(values)}


def _speedups(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each baseline, the pipeline's clips per minute divided by the baseline's."""
    ours = {metrics["round"]: metrics[RATE] for metrics in cases[PIPELINE]["rounds"]}
    result = {}
    for case, about in cases.items():
        rounds = about["rounds"]
        ratios = [round(ours[metrics["round"]] / metrics[RATE], 4) for metrics in rounds]
        if case != PIPELINE and ratios:
            result[case] = {"rounds": ratios, "over_rounds": statistics.geometric_mean(ratios)}
    return result
