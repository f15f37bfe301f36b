"""Comparison of two benchmarks: ratios of their metrics, with the noise of their rounds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from svdpp.bench.results import ENVIRONMENT, RATE, SCHEMA_VERSION, SUMMARY
from svdpp.bench.targets import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.config.limits import read_small_file
from svdpp.errors import InputError

#: The compared figures; the rate is also taken over that of other cases.
_COMPARED = {
    RATE: "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
}
#: Ratios closer to 1 than this are never called different, however small their spread.
_NEGLIGIBLE = 0.01


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
    """Return the ratio of one figure, B over A, with its range.

    Args:
        name: Name of the figure.
        a: Value above 0 of each round of A.
        b: The same of B.
        drift: Logarithm of the machine's own change between the two, by which the range is widened.
        more: Further fields of the ratio.
    """
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
        """Return the comparison as plain values."""
        return {
            "schema_version": 1,
            **asdict(self),
            "equal": self.is_equal,
            "verdict": self.verdict,
            "ratios": [{**asdict(ratio), "noise": ratio.is_noise} for ratio in self.ratios],
        }


def compare(a: Path, b: Path) -> Comparison:
    """Compare two finished benchmarks.

    Args:
        a: Folder of the results that count as 1.
        b: Folder of the results that are compared with them.

    Raises:
        InputError: A folder holds no benchmark that can be compared.
    """
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
        raise InputError(
            f"{folders} holds no bench that can be compared: {error!r}",
            details={"folders": [str(a), str(b)], "problem": repr(error)},
        ) from error


def _read(path: Path) -> Any:
    try:
        return json.loads(read_small_file(path, "result"))
    except ValueError as error:
        raise InputError(
            f"{str(path)!r} is not JSON: {error}",
            details={"path": str(path), "problem": str(error)},
        ) from error


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return libraries and hardware; a comparison may be about svdpp and its commit."""
    versions = {name: version for name, version in facts["versions"].items() if name != "svdpp"}
    host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
    return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}


def _ratios(a: Mapping[str, Any], b: Mapping[str, Any], *, same_baseline: bool) -> Iterator[Ratio]:
    """Yield ratios to other cases of the same rounds first: machine drift cancels out in them."""
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
    """Return a figure of a case in each round; empty if it was not measured."""
    rounds = summary["cases"].get(case, {"rounds": []})["rounds"]
    values = [metrics.get(name) for metrics in rounds]
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
