"""The results of a bench: its folder and figures, and two benches compared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from svdpp.bench.runner import DATA_PARALLEL, ONE_DEVICE, PIPELINE, Bench, Round, differing
from svdpp.config.limits import read_small_file
from svdpp.diagnostics.figures import rounded
from svdpp.diagnostics.machine import environment, median_costs
from svdpp.diagnostics.report import diagnose
from svdpp.errors import InputError
from svdpp.media import output_files

SCHEMA_VERSION = 4

#: The files of a bench.
SUMMARY, CONFIG, ENVIRONMENT = "summary.json", "config.yaml", "env.json"
ROUNDS, PROFILE, COSTS = "rounds.jsonl", "profile.json", "costs.json"

#: The compared figures; `_RATE` is also taken over that of other cases.
_RATE = "steady_clips_per_minute"
_COMPARED = {
    _RATE: "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
}
#: Ratios closer to 1 than this are never called different, however small their spread.
_NEGLIGIBLE = 0.01


class Results:
    """The folder of one run: configuration and environment, then rounds, then the summary."""

    def __init__(self, root: Path, bench: Bench) -> None:
        self._bench = bench
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        self.folder = root / bench.asked.experiment / self.run_id
        with output_files.disk_errors(f"{str(self.folder)!r} cannot be created"):
            self.folder.mkdir(parents=True)
        output_files.write_text(self.folder / CONFIG, bench.asked.to_yaml())
        output_files.write_json(self.folder / ENVIRONMENT, environment())

    def add(self, done: Round) -> None:
        """Appends a round's figures, which stay if the bench fails later."""
        figures = {"case": done.case, "round": done.number, "measured": done.figures.to_json()}
        with (
            output_files.disk_errors(f"{ROUNDS} cannot be written"),
            (self.folder / ROUNDS).open("a", encoding="ascii") as file,
        ):
            file.write(json.dumps(figures) + "\n")

    def finish(self) -> dict[str, Any]:
        """Writes summary and costs; returns what `summary.json` holds.

        It says what limits the pipeline, of the round with the median makespan.
        """
        bench, path = self._bench, self.folder / COSTS
        cases = {case: _case(bench, case) for case in bench.cases}
        rounds = sorted(bench.rounds_of(PIPELINE), key=lambda done: done.figures.makespan)
        median, traces = rounds[(len(rounds) - 1) // 2], [done.trace for done in rounds]
        source = f"measured by: svdpp bench, {bench.asked.experiment}/{self.run_id}"
        costs = median_costs(bench.config, None, traces, source=source)
        limits = diagnose(median.figures, path, "--pipeline.{}={}").to_json()
        found = {
            "schema_version": SCHEMA_VERSION,
            "experiment": bench.asked.experiment,
            "run_id": self.run_id,
            "config": json.loads(json.dumps(bench.asked.model_dump())),
            "cases": cases,
            "speedups": _speedups(cases),
            "same_bits": not differing(bench.rounds),
            "latents_sha256": [latent for latent, _ in bench.rounds_of(PIPELINE)[0].sha256],
            "limits": {"round": median.number, **limits},
        }
        output_files.write_json(path, costs.to_json())
        output_files.write_json(self.folder / SUMMARY, found)
        return found


def _case(bench: Bench, case: str) -> dict[str, Any]:
    config, error = bench.cases[case], bench.out_of_memory.get(case)
    rounds = [_figures(done) for done in bench.rounds_of(case)]
    names = [name for name in rounds[0] if name != "round"] if rounds else []
    return {
        "layout": "diffusers' own pipeline" if case == ONE_DEVICE else str(config.layout),
        "world": config.world_size,
        "error": None if error is None else error.message,
        "rounds": rounds,
        "over_rounds": {name: _over_rounds(name, rounds) for name in names},
    }


def _over_rounds(name: str, rounds: list[dict[str, Any]]) -> float | None:
    """One number for a figure of all rounds; None if no round has it.

    It is the geometric mean, so that the ratio of two cases is the mean of the rounds' ratios. For
    shares it is the arithmetic mean, so that they still add up to 1; for memory the maximum.
    """
    values = [figures[name] for figures in rounds if figures[name] is not None]
    if not values:
        return None
    if name.startswith("peak_"):
        return float(max(values))
    if name == "bubble" or name.endswith("_share"):
        return statistics.fmean(values)
    return statistics.geometric_mean(values) if all(values) else 0.0


def _figures(done: Round) -> dict[str, Any]:
    """A round's figures, as plain numbers; those of each rank are in `rounds.jsonl`."""
    figures, forecast = done.figures, done.figures.forecast_seconds
    steps, ranks = [step.end - step.start for step in done.trace.steps], done.figures.ranks
    wall = sum(rank.wall for rank in ranks)
    parts = ("compute", "wait", "transfer", "idle", "unaccounted")
    values = {
        "clips": figures.clips,
        "makespan_seconds": figures.makespan,
        "overhead": figures.makespan / forecast if forecast else None,
        "first_clip_seconds": figures.first_clip,
        _RATE: 60 / figures.seconds_per_clip,
        **{f"step_p{n}_seconds": float(np.percentile(steps, n)) for n in (50, 90, 95)},
        "bubble": figures.bubble,
        **{f"{part}_share": sum(getattr(r, part) for r in ranks) / wall for part in parts},
        "start_seconds": figures.start_seconds,
        "load_seconds": max(rank.load_seconds for rank in ranks),
        "peak_allocated_gib": max(rank.allocated_bytes or 0 for rank in ranks) / 2**30 or None,
        "peak_reserved_gib": max(rank.peak_bytes or 0 for rank in ranks) / 2**30 or None,
    }
    return {"round": done.number, **rounded(values)}


def _speedups(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's clips per minute over those of each other case in the same round."""
    ours = {figures["round"]: figures[_RATE] for figures in cases[PIPELINE]["rounds"]}
    result = {}
    for case, about in cases.items():
        rounds = about["rounds"]
        ratios = [round(ours[figures["round"]] / figures[_RATE], 4) for figures in rounds]
        if case != PIPELINE and ratios:
            result[case] = {"rounds": ratios, "over_rounds": statistics.geometric_mean(ratios)}
    return result


# --- two benches compared ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of one figure, B over A: of geometric means over the rounds.

    `low` and `high` bound the ratio of a round of B and one of A, widened by the wider set times 2
    for 3 rounds, 1 for 4, 1/2 for 5 and so on, and by the machine's own change, all on logarithms.
    Of two equal sets, 1 lies outside in at most 2 of 1000 cases (by simulation: normal, exponential
    and Student's t with 2 degrees of freedom; 3 to 9 rounds). None if A or B has a single round.
    """

    name: str
    a: float
    b: float
    value: float
    low: float | None
    high: float | None
    is_baseline: bool = False
    """Whether A and B are the same work with the same libraries on the same machine."""

    @property
    def is_noise(self) -> bool | None:
        """Whether the difference is within noise; None if unknown."""
        if self.is_baseline or abs(math.log(self.value)) < _NEGLIGIBLE:
            return True
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high


def ratio(
    name: str, a: Sequence[float], b: Sequence[float], *, drift: float = 0.0, **more: bool
) -> Ratio:
    """B over A, from one value above 0 for each round of both; `drift` is a logarithm."""
    means = statistics.geometric_mean(a), statistics.geometric_mean(b)
    low = high = None
    if (rounds := min(len(a), len(b))) > 1:
        widest = max(math.log(max(values) / min(values)) for values in (a, b))
        margin = math.exp(2.0 ** (4 - rounds) * widest + abs(drift))
        low, high = min(b) / max(a) / margin, max(b) / min(a) * margin
    return Ratio(
        name=name, a=means[0], b=means[1], value=means[1] / means[0], low=low, high=high, **more
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two benches, side by side."""

    a: str
    b: str
    """Their names."""
    ratios: list[Ratio]
    settings: list[str]
    """The configuration fields that differ, such as `pipeline.world: 2, 4`."""
    machines: list[str]
    """The facts about the machines that differ."""
    same_bits: bool | None
    """Whether the clips have the same latents; None if they are different clips."""

    @property
    def is_equal(self) -> bool | None:
        """Whether every difference is within noise; None if unknown."""
        verdicts = [ratio.is_noise for ratio in self.ratios]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        if self.is_equal is None:
            return "unknown: a single round has no spread; use --measure.repeats=3 or more"
        beyond = [ratio.name for ratio in self.ratios if ratio.is_noise is False]
        return f"different: {', '.join(beyond)}" if beyond else "equal: every difference is noise"

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "schema_version": 1,
            **asdict(self),
            "equal": self.is_equal,
            "verdict": self.verdict,
            "ratios": [{**asdict(ratio), "noise": ratio.is_noise} for ratio in self.ratios],
        }


def compare(a: Path, b: Path) -> Comparison:
    """Compares the bench in folder `b` with that in folder `a`."""
    one, other = _read(a / SUMMARY), _read(b / SUMMARY)
    try:
        for summary in (one, other):
            is_later = summary["schema_version"] > SCHEMA_VERSION
            if is_later or not summary["cases"][PIPELINE]["rounds"]:
                raise ValueError("of a later version, or without a round")
        facts = [_machine(_read(folder / ENVIRONMENT)) for folder in (a, b)]
        machines = _differences(facts[0], facts[1])
        configs = one["config"], other["config"]
        same_work = _baseline(configs[0]) == _baseline(configs[1])
        clips = [(each["workload"]["clips"], each["measure"]["seeds"]) for each in configs]
        same_clips = same_work and clips[0] == clips[1]
        return Comparison(
            a=one["run_id"],
            b=other["run_id"],
            ratios=list(_ratios(one, other, same_baseline=same_work and not machines)),
            settings=_differences(*configs),
            machines=machines,
            same_bits=one["latents_sha256"] == other["latents_sha256"] if same_clips else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        folders = f"{str(a)!r} or {str(b)!r}"
        raise InputError(f"{folders} holds no bench that can be compared: {error!r}") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(read_small_file(path, "result"))
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON: {error}") from error


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Libraries and hardware; without svdpp and its commit, which a comparison may be about."""
    versions = {name: version for name, version in facts["versions"].items() if name != "svdpp"}
    host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
    return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}


def _ratios(a: Mapping[str, Any], b: Mapping[str, Any], *, same_baseline: bool) -> Iterator[Ratio]:
    """Ratios to other cases of the same rounds come first: machine drift cancels out in them."""
    for case in (ONE_DEVICE, DATA_PARALLEL):
        if case in a["speedups"] and case in b["speedups"]:
            rounds = a["speedups"][case]["rounds"], b["speedups"][case]["rounds"]
            yield ratio(f"{PIPELINE} / {case}", *rounds)
    for name, words in _COMPARED.items():
        alone = _values(a, ONE_DEVICE, name), _values(b, ONE_DEVICE, name)
        # If diffusers did not fit on the device, the drift of the machine is unknown.
        drift = math.log(ratio("", *alone).value) if same_baseline and all(alone) else 0.0
        for case in (PIPELINE, DATA_PARALLEL, ONE_DEVICE):
            values = _values(a, case, name), _values(b, case, name)
            if all(values):
                is_baseline = same_baseline and case == ONE_DEVICE
                yield ratio(f"{case}: {words}", *values, drift=drift, is_baseline=is_baseline)


def _values(summary: Mapping[str, Any], case: str, name: str) -> list[float]:
    """A figure of a case in each round; empty if it was not measured."""
    rounds = summary["cases"].get(case, {"rounds": []})["rounds"]
    values = [figures.get(name) for figures in rounds]
    return [] if None in values else values


def _baseline(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that diffusers on one device depends on, except the number of clips.

    A field that is None counts as missing: older benches do not have all of today's.
    """
    work = {k: v for k, v in config["workload"].items() if k != "clips" and v is not None}
    ranks = {name: config["pipeline"].get(name) for name in ("device", "threads", "deterministic")}
    parts = {"workload": work, "ranks": ranks}
    return {"model": config["model"], "precision": config["precision"], **parts}


def _differences(a: object, b: object, name: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if a == b else [f"{name}: {a}, {b}"]
