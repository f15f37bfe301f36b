"""The figures of benches: whether two differ or are noise, targets, and two benches compared."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.errors import InputError, RequestError, nearest

#: The case that is measured, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"
CASES = (PIPELINE, DATA_PARALLEL, ONE_DEVICE)

#: The files of a bench.
SUMMARY, CONFIG, ENVIRONMENT = "summary.json", "config.yaml", "env.json"
ROUNDS, PROFILE, COSTS = "rounds.jsonl", "profile.json", "costs.json"

#: The parts of the ranks' time; `summary.json` has the share of each.
TIME_PARTS = ("compute", "wait", "transfer", "idle", "unaccounted")

#: The figures of a case in `summary.json`, `over_rounds`.
FIGURES = (
    *("clips", "makespan_seconds", "overhead", "first_clip_seconds", "steady_clips_per_minute"),
    *("step_p50_seconds", "step_p90_seconds", "step_p95_seconds", "bubble"),
    *(f"{part}_share" for part in TIME_PARTS),
    *("start_seconds", "load_seconds", "peak_allocated_gib", "peak_reserved_gib"),
)

#: Ratios closer to 1 than this are never called different, however small their spread.
NEGLIGIBLE = 0.01
#: With fewer rounds too many equal benches would be called different.
MIN_ROUNDS = 3

#: Speed-ups of the pipeline, by the case that they are over.
_SPEEDUPS = {
    "pipeline_over_data_parallel": DATA_PARALLEL,
    "pipeline_over_diffusers": ONE_DEVICE,
}
_NAMES = (*_SPEEDUPS, *FIGURES)
_BOUND = re.compile(r"(<=|>=|<|>)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)")

_COMPARED = {
    "steady_clips_per_minute": "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
}
Summary = Mapping[str, Any]


def is_share(figure: str) -> bool:
    """Whether `figure` is a share of a whole; shares can be 0, and their mean is arithmetic."""
    return figure == "bubble" or figure.endswith("_share")


def check_rounds(repeats: int, what: str) -> None:
    """Checks that a bench has enough rounds to distinguish a difference from noise."""
    if repeats < MIN_ROUNDS:
        raise RequestError(
            f"{what} {MIN_ROUNDS} rounds or more, to know the noise, got {repeats}",
            f"--measure.repeats={MIN_ROUNDS + 2}",
        )


def interval(
    a: Sequence[float], b: Sequence[float], drift: float = 0.0
) -> tuple[float, float] | None:
    """All differences of a round of B and one of A, widened; None if A or B has a single round.

    A difference is noise if 0 lies within. The width is that of the wider set times 2 for 3 rounds,
    1 for 4, 1/2 for 5 and so on, and how far the machine itself has changed. It assumes no
    distribution. Of two equal sets, 0 lies outside in at most 2 of 1000 cases (by simulation:
    normal, exponential and Student's t with 2 degrees of freedom; 3 to 9 rounds).
    """
    rounds = min(len(a), len(b))
    if rounds < 2:
        return None
    widest = max(max(values) - min(values) for values in (a, b))
    margin = 2.0 ** (4 - rounds) * widest + abs(drift)
    return min(b) - max(a) - margin, max(b) - min(a) + margin


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of one figure, B over A: of geometric means over the rounds.

    `low` and `high` are the bounds of `interval`; both are None if A or B has a single round.
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
        if self.is_baseline or abs(math.log(self.value)) < NEGLIGIBLE:
            return True
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high


def ratio(
    name: str, a: Sequence[float], b: Sequence[float], *, drift: float = 0.0, **more: bool
) -> Ratio:
    """B over A, from one value above 0 for each round of both; `drift` is a logarithm."""
    bounds = interval([*map(math.log, a)], [*map(math.log, b)], drift)
    low, high = map(math.exp, bounds) if bounds else (None, None)
    means = statistics.geometric_mean(a), statistics.geometric_mean(b)
    value = means[1] / means[0]
    return Ratio(name=name, a=means[0], b=means[1], value=value, low=low, high=high, **more)


# --- targets -----------------------------------------------------------------------------------


class Target(NamedTuple):
    """A bound for one figure of the pipeline."""

    name: str
    is_upper: bool
    """Whether the figure must be below the bound."""
    bound: float


def parse_target(name: str, text: str) -> Target:
    """The target in a line of a configuration, such as `overhead: "<= 1.05"`."""
    if name not in _NAMES:
        hint = nearest(name, _NAMES, f"known: {', '.join(_NAMES)}")
        raise RequestError(f"targets: no figure {name!r}", hint)
    parts = _BOUND.fullmatch(text.strip())
    if parts is None:
        raise RequestError(
            f"targets.{name}: {text!r} is not a bound", 'a bound is ">= 0.95", "< 1.2" or "<= 1%"'
        )
    sign, number, percent = parts.groups()
    return Target(name, sign.startswith("<"), float(number) / (100 if percent else 1))


def check_measurable(targets: Collection[str], cases: Collection[str], *, has_gpu: bool) -> None:
    """Checks before a bench that it will measure all figures with a target."""
    for name in targets:
        if _SPEEDUPS.get(name, PIPELINE) not in cases:
            why = f"{_SPEEDUPS[name]} is not a case beside this pipeline"
        elif name == "peak_allocated_gib" and not has_gpu:
            why = "on the CPU only peak_reserved_gib is measured"
        else:
            continue
        raise RequestError(f"targets.{name}: {why}", f"leave targets.{name} out")


def outcome(name: str, text: str, summary: Summary) -> dict[str, Any]:
    """A target's value, its range by the spread of the rounds, and the verdict."""
    target = parse_target(name, text)
    if name in _SPEEDUPS:
        found = summary["speedups"].get(_SPEEDUPS[name], {"rounds": [], "over_rounds": None})
        value, rounds = found["over_rounds"], found["rounds"]
    else:
        case = summary["cases"][PIPELINE]
        value = case["over_rounds"][name]
        rounds = [figures[name] for figures in case["rounds"] if figures[name] is not None]
    low, high, verdict = None, None, "not measured"
    if value is not None:
        low, high, is_noise = _range(target, rounds)
        is_met = value <= target.bound if target.is_upper else value >= target.bound
        verdict = "met" if is_met else "within noise" if is_noise else "missed"
    return {"target": text, "value": value, "low": low, "high": high, "verdict": verdict}


def missed(outcomes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the targets that were missed beyond the noise, or not measured."""
    lost = ("missed", "not measured")
    return [name for name, outcome in outcomes.items() if outcome["verdict"] in lost]


def _range(target: Target, rounds: list[float]) -> tuple[float | None, float | None, bool]:
    """The range of the true figure, and whether it includes the bound.

    Like a comparison it takes logarithms, but not of shares, which can be 0. A bound has no spread
    of its own, so the range is twice as wide.
    """
    if target.name.startswith("peak_"):
        return None, None, False  # the largest of all rounds, and not a mean
    if len(rounds) < MIN_ROUNDS:
        return None, None, True  # this case ran out of memory in the other rounds
    bounds = [target.bound] * (len(rounds) - 1)
    if not is_share(target.name) and min(target.bound, *rounds) > 0:
        found = ratio("", bounds, rounds)
        assert found.low is not None
        assert found.high is not None
        return target.bound * found.low, target.bound * found.high, found.is_noise is True
    around = interval(bounds, rounds)
    assert around is not None
    low, high = around
    return target.bound + low, target.bound + high, low <= 0 <= high


# --- two benches -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two benches, side by side."""

    a: str
    b: str
    """Their names."""
    ratios: list[Ratio]
    settings: list[str]
    """The configuration fields that differ, such as `pipeline.world: 2, 4`; without targets."""
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
        if self.is_equal is False:
            beyond = [ratio.name for ratio in self.ratios if ratio.is_noise is False]
            return f"different: {', '.join(beyond)}"
        if self.is_equal is None:
            return "unknown: a single round has no spread; use --measure.repeats=3 or more"
        return "equal: every difference is within noise"

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
    one, other = read_summary(a), read_summary(b)
    machines = _differences(_read_machine(a), _read_machine(b))
    configs = one["config"], other["config"]
    same_work = _baseline(configs[0]) == _baseline(configs[1])
    same_clips = same_work and _clips(configs[0]) == _clips(configs[1])
    return Comparison(
        a=one["run_id"],
        b=other["run_id"],
        ratios=list(_ratios(one, other, same_baseline=same_work and not machines)),
        settings=_differences(_measured(configs[0]), _measured(configs[1])),
        machines=machines,
        same_bits=one["latents_sha256"] == other["latents_sha256"] if same_clips else None,
    )


def read_summary(folder: Path) -> Summary:
    """The `summary.json` of the bench in `folder`, checked by taking all that is compared."""
    path = folder / SUMMARY
    summary = _read(path)
    try:
        if summary["schema_version"] not in (1, 2, 3, 4):
            raise ValueError("it is of another version of svdpp")
        _baseline(summary["config"]), _clips(summary["config"])
        _ = summary["run_id"], summary["latents_sha256"], summary["same_bits"]
        if not summary["cases"][PIPELINE]["rounds"]:
            raise ValueError("no round of the pipeline")
        list(_ratios(summary, summary, same_baseline=False))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{str(path)!r} is not a bench's summary: {error!r}") from error
    return summary  # type: ignore[no-any-return]


def _read_machine(folder: Path) -> dict[str, Any]:
    """Libraries and hardware; without svdpp and its commit, which a comparison may be about."""
    path = folder / ENVIRONMENT
    facts = _read(path)
    try:
        versions = {k: v for k, v in facts["versions"].items() if k != "svdpp"}
        host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
        return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} is not a bench's environment") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error.strerror}",
            "--compare takes the folders of two finished benches, results/EXPERIMENT/RUN",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not JSON: {error}") from error


def _ratios(a: Summary, b: Summary, *, same_baseline: bool) -> Iterator[Ratio]:
    """Ratios to other cases of the same rounds come first: machine drift cancels out in them."""
    for case in (ONE_DEVICE, DATA_PARALLEL):
        if case in a["speedups"] and case in b["speedups"]:
            rounds = a["speedups"][case]["rounds"], b["speedups"][case]["rounds"]
            yield ratio(f"{PIPELINE} / {case}", *rounds)
    for name, words in _COMPARED.items():
        alone = _values(a, ONE_DEVICE, name), _values(b, ONE_DEVICE, name)
        # If diffusers did not fit on the device, the drift of the machine is unknown.
        drift = math.log(ratio("", *alone).value) if same_baseline and all(alone) else 0.0
        for case in CASES:
            values = _values(a, case, name), _values(b, case, name)
            if all(values):
                yield ratio(
                    f"{case}: {words}",
                    *values,
                    drift=drift,
                    is_baseline=same_baseline and case == ONE_DEVICE,
                )


def _values(summary: Summary, case: str, name: str) -> list[float]:
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


def _measured(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but the targets, which change nothing that is measured."""
    return {name: value for name, value in config.items() if name != "targets"}


def _clips(config: Mapping[str, Any]) -> tuple[Any, Any]:
    return config["workload"]["clips"], config["measure"]["seeds"]


def _differences(a: object, b: object, name: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if a == b else [f"{name}: {a}, {b}"]
