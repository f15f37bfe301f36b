"""The result files of a bench, results/<experiment>/<run_id>/; only the parent writes them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from svdpp.bench.costs import costs_of
from svdpp.bench.names import (
    CONFIG,
    COSTS,
    ENVIRONMENT,
    ONE_DEVICE,
    PIPELINE,
    ROUNDS,
    SPANS,
    SUMMARY,
    TABLE,
    TIME_PARTS,
    is_share,
)
from svdpp.bench.runner import Bench, Round, differing, schedule_of
from svdpp.bench.targets import outcomes
from svdpp.config import PipelineConfig
from svdpp.diagnostics.environment import environment
from svdpp.diagnostics.time_breakdown import time_breakdown
from svdpp.diagnostics.utilisation import speeds_of
from svdpp.errors import OutputError, SvdppError, error_to_dict
from svdpp.media import output_files
from svdpp.plan.forecast import percentile, replay, summarise
from svdpp.redaction import redact_all

SCHEMA_VERSION = 2
_GIB = 2**30
_SPEEDS = ("tflops", "mfu")


class Results:
    """One run's folder: configuration and environment at the start, then spans, then the summary.

    Args:
        root: the folder of all experiments.
        bench: not run yet.
    """

    def __init__(self, root: Path, bench: Bench) -> None:
        self._bench = bench
        output_files.check_writable(root.absolute())
        self.folder = _new_folder(root / bench.asked.experiment, bench.asked.sha256)
        self.run_id = self.folder.name
        with output_files.atomic_output(str(self.folder / CONFIG), ".yaml") as temporary:
            temporary.write_text(f"# sha256 {bench.asked.sha256}\n{bench.asked.to_yaml()}")
        output_files.write_json(self.folder / ENVIRONMENT, environment())

    def add(self, done: Round) -> None:
        """Appends a round's spans, and its figures for `svdpp report`."""
        self._append(SPANS, span_records(done))
        if done.figures is not None:
            measured = redact_all(done.figures.to_json())
            self._append(ROUNDS, [{"case": done.case, "round": done.number, "measured": measured}])

    @contextlib.contextmanager
    def failure_recorded(self) -> Iterator[None]:
        """Records an error that ends the block, for `svdpp report`."""
        try:
            yield
        except SvdppError as error:
            with contextlib.suppress(OutputError):  # it would hide the error
                self._append(ROUNDS, [{"error": redact_all(error_to_dict(error))}])
            raise

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        try:
            with (self.folder / name).open("a", encoding="ascii") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise OutputError(f"{name} cannot be written: {error.strerror}") from error

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
        with output_files.atomic_output(str(self.folder / TABLE), ".csv") as temporary:
            temporary.write_text(text.getvalue())
        return found


def span_records(done: Round) -> Iterator[dict[str, Any]]:
    """One record for each rank, clip and action, sorted by start, in seconds from the first start.

    `bytes` is 0 for compute. A transfer starts with its header; `waited` is the sender's wait for
    the receiver before that. Steps are omitted, because they lie within their DENOISE, and so are
    other waits, because they belong to no clip.
    """
    trace = done.trace
    begin = min(span.start for span in trace.spans)
    records: list[dict[str, Any]] = [
        {
            "rank": span.rank,
            "clip": span.action.clip - done.num_warmups,
            "action": span.action.kind.value,
            "first_step": span.action.start,
            "end_step": span.action.end,
            "peer": None,
            "start": span.start - begin,
            "end": span.end - begin,
            "bytes": 0,
            "waited": 0.0,
        }
        for span in trace.spans
    ]
    records += [
        {
            "rank": transfer.rank,
            "clip": transfer.clip - done.num_warmups,
            "action": transfer.direction.upper(),
            "first_step": transfer.next_step,
            "end_step": transfer.next_step,
            "peer": transfer.peer,
            "start": transfer.start - begin,
            "end": transfer.end - begin,
            "bytes": transfer.num_bytes,
            "waited": transfer.waited,
        }
        for transfer in trace.transfers
    ]
    for record in sorted(records, key=lambda record: (record["start"], record["rank"])):
        yield {"case": done.case, "round": done.number, **record}


def summary(bench: Bench, run_id: str) -> dict[str, Any]:
    """The content of `summary.json`."""
    cases = {
        case: _case(
            bench, case, [_figures(each, config) for each in bench.rounds if each.case == case]
        )
        for case, config in bench.cases.items()
    }
    found = {
        "schema_version": SCHEMA_VERSION,
        "experiment": bench.asked.experiment,
        "run_id": run_id,
        "config_sha256": bench.asked.sha256,
        "config": json.loads(json.dumps(bench.asked.model_dump())),
        "cases": cases,
        "speedups": _speedups(cases),
        "same_bits": not differing(bench.rounds),
        "latents_sha256": _hashes(bench),
    }
    return {**found, "targets": outcomes(bench.asked.targets, found)}


def _case(bench: Bench, case: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    config, error = bench.cases[case], bench.out_of_memory.get(case)
    return {
        "layout": "diffusers' own pipeline" if case == ONE_DEVICE else str(config.layout),
        "world": config.world_size,
        "error": None if error is None else error.message,
        "rounds": rounds,
        "over_rounds": {name: _over_rounds(name, rounds) for name in rounds[0] if name != "ranks"}
        if rounds
        else {},
    }


def _over_rounds(name: str, rounds: list[dict[str, Any]]) -> float | None:
    """One number for a figure of all rounds; None if no round has it.

    It is the geometric mean, as in `compare`, so that the ratio of two cases is the mean of the
    rounds' ratios. For shares it is the arithmetic mean, so that they still add up to 1; for memory
    it is the maximum.
    """
    values = [each[name] for each in rounds if each[name] is not None]
    if not values:
        return None
    if name.startswith("peak_"):
        return float(max(values))
    if is_share(name):
        return statistics.fmean(values)
    return statistics.geometric_mean(values) if all(values) else 0.0


def _figures(done: Round, config: PipelineConfig) -> dict[str, Any]:
    """A round's figures: plain numbers, with those of each rank under `ranks`."""
    times = done.trace.summary()
    steps = [step.end - step.start for step in done.trace.steps]
    speeds = _speeds(done)
    ranks = [
        {
            **{name: round(value, 6) for name, value in asdict(times_of_rank).items()},
            "unaccounted": round(times_of_rank.unaccounted, 6),
            "load_seconds": round(done.load_seconds[times_of_rank.rank], 3),
            "peak_allocated_gib": _gib(done.peaks[times_of_rank.rank].allocated_bytes),
            "peak_reserved_gib": _gib(done.peaks[times_of_rank.rank].reserved_bytes),
            **speeds[times_of_rank.rank],
        }
        for times_of_rank in time_breakdown(done.trace)
    ]
    wall = sum(rank["wall"] for rank in ranks)
    return {
        "round": done.number,
        "clips": times.clips,
        "makespan_seconds": round(times.makespan, 4),
        "overhead": round(times.makespan / _ideal_makespan(done, config), 4),
        "first_clip_seconds": round(times.first_clip, 4),
        "steady_clips_per_minute": round(60 / times.seconds_per_clip, 4),
        "step_p50_seconds": round(percentile(steps, 50), 6),
        "step_p90_seconds": round(percentile(steps, 90), 6),
        "step_p95_seconds": round(percentile(steps, 95), 6),
        "bubble": round(times.bubble, 4),
        **{
            f"{part}_share": round(sum(rank[part] for rank in ranks) / wall, 4)
            for part in TIME_PARTS
        },
        **{name: _mean_speed(name, ranks) for name in _SPEEDS},
        "start_seconds": round(done.start_seconds, 3),
        "load_seconds": max(rank["load_seconds"] for rank in ranks),
        "peak_allocated_gib": max(r["peak_allocated_gib"] or 0.0 for r in ranks) or None,
        "peak_reserved_gib": max(r["peak_reserved_gib"] or 0.0 for r in ranks) or None,
        "ranks": ranks,
    }


def _speeds(done: Round) -> dict[int, dict[str, float | None]]:
    """TFLOP/s and MFU of each rank that computed; None where they are unknown."""
    found: dict[int, dict[str, float | None]] = defaultdict(lambda: dict.fromkeys(_SPEEDS))
    for each in speeds_of(done.figures).ranks:
        speeds = {"tflops": each.tflops, "mfu": each.mfu}
        found[each.rank] = {
            name: None if value is None else float(f"{value:.6g}") for name, value in speeds.items()
        }
    return found


def _mean_speed(name: str, ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean of all ranks while they compute; None if that of one is unknown."""
    computing = [rank for rank in ranks if rank["compute"]]
    if not computing or any(rank[name] is None for rank in computing):
        return None
    done = sum(rank[name] * rank["compute"] for rank in computing)
    return float(f"{done / sum(rank['compute'] for rank in computing):.6g}")


def _ideal_makespan(done: Round, config: PipelineConfig) -> float:
    """The makespan of the same actions at the round's own mean costs, without an engine."""
    schedule = schedule_of(config, done.trace.summary().clips)
    return summarise(replay(schedule, done.trace.costs()), config.world_size).makespan


def _speedups(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's clips per minute over those of each other case in the same round."""
    ours = {each["round"]: each["steady_clips_per_minute"] for each in cases[PIPELINE]["rounds"]}
    result = {}
    for case, about in cases.items():
        ratios = [
            round(ours[each["round"]] / each["steady_clips_per_minute"], 4)
            for each in about["rounds"]
        ]
        if case != PIPELINE and ratios:
            result[case] = {"rounds": ratios, "over_rounds": statistics.geometric_mean(ratios)}
    return result


def _hashes(bench: Bench) -> list[str]:
    """The latents' hashes of the pipeline's first round, by clip."""
    first = next(each for each in bench.rounds if each.case == PIPELINE)
    return [sha256 for _, sha256 in sorted(first.latents_sha256.items())]


def _table(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each case and round."""
    about = {name: found[name] for name in ("experiment", "run_id", "config_sha256")}
    for case, each in found["cases"].items():
        for figures in each["rounds"]:
            plain = {name: value for name, value in figures.items() if name != "ranks"}
            hashes = " ".join(found["latents_sha256"]) if found["same_bits"] else ""
            row = {"case": case, "layout": each["layout"], "world": each["world"], **plain}
            yield {**about, **row, "latents_sha256": hashes}


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 4)


def _new_folder(above: Path, sha256: str) -> Path:
    """Creates a new folder, named by time and configuration."""
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{sha256[:8]}"
    for number in range(1, 1000):
        folder = above / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise OutputError(f"{str(folder)!r} cannot be created: {error.strerror}") from error
        return folder
    raise OutputError(f"{str(above / name)!r} and 998 more exist already")
