"""Comparison of two benchmarks: ratios of their metrics, and which differences are noise."""

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

#: Compared metrics and their labels. The clip rate is also compared as a speed-up over the
#: baselines.
_COMPARED = {
    RATE: "clips/min",
    "first_clip_seconds": "first clip, s",
    "step_p50_seconds": "step, s",
}
#: If the logarithm of a metric's ratio is closer to 0 than this value (a ratio of about 0.99 to
#: 1.01), the metric counts as equal in both benchmarks, however small the noise is.
_NEGLIGIBLE = 0.01
#: Fields of the section `pipeline` that affect the measurement of diffusers on one device.
_BASELINE_RANK_FIELDS = ("device", "threads", "deterministic")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of one metric of two benchmarks, B over A, and the range of noise around the ratio.

    If the range includes 1, noise alone may explain the difference between A and B.

    Each benchmark measures the metric in several rounds. Without a margin, the range reaches from
    the smallest to the largest ratio of a round of B to a round of A. A margin widens the range at
    both ends. On a logarithmic scale, the margin is the sum of two parts:
    - the drift: how much faster or slower the machine was during B than during A;
    - the spread (the largest over the smallest value) of A's or of B's rounds, whichever is larger,
      times a factor: 2 for 3 rounds, 1 for 4 rounds, 1/2 for 5 rounds, and so on.

    Simulations with normal, exponential and Student's t noise (2 degrees of freedom) and 3 to 9
    rounds show: if A and B are equally fast, the range excludes 1 in at most 2 of 1000 comparisons.
    """

    name: str
    a: float
    """Geometric mean of the metric over the rounds of A."""
    b: float
    """Geometric mean of the metric over the rounds of B."""
    value: float
    """`b` divided by `a`."""
    low: float | None
    """Lower end of the range of noise around the ratio; None if A or B has a single round."""
    high: float | None
    """Upper end of the range of noise around the ratio; None if A or B has a single round."""
    must_be_equal: bool = False
    """Whether A and B did the same work with the same libraries on the same machine, so that every
    difference is noise."""

    @property
    def is_noise(self) -> bool | None:
        """Whether a metric differs between A and B only by noise; None if the noise is unknown.

        A negligible difference (about 1%) counts as noise, even if the noise is unknown.
        """
        if self.must_be_equal or abs(math.log(self.value)) < _NEGLIGIBLE:
            return True
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high


def ratio(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    drift: float = 0.0,
    must_be_equal: bool = False,
) -> Ratio:
    """Return the ratio of one metric, B over A, with the range of noise; see `Ratio`.

    Args:
        name: Name of the metric.
        a: Values of the rounds of A, above 0.
        b: Values of the rounds of B, above 0.
        drift: Logarithm of the ratio of the machine's speeds during A and B; 0 if unknown or equal.
            A drift in either direction widens the range.
        must_be_equal: Whether A and B did the same work with the same libraries on the same
            machine, so that every difference is noise.
    """
    mean_a, mean_b = statistics.geometric_mean(a), statistics.geometric_mean(b)
    low = high = None
    num_rounds = min(len(a), len(b))
    if num_rounds > 1:
        spread = max(math.log(max(values) / min(values)) for values in (a, b))
        margin = math.exp(2.0 ** (4 - num_rounds) * spread + abs(drift))
        low, high = min(b) / max(a) / margin, max(b) / min(a) * margin
    return Ratio(
        name=name,
        a=mean_a,
        b=mean_b,
        value=mean_b / mean_a,
        low=low,
        high=high,
        must_be_equal=must_be_equal,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of the metrics of two finished benchmarks, A and B."""

    a: str
    """Run id of A."""
    b: str
    """Run id of B."""
    ratios: list[Ratio]
    settings: list[str]
    """Configuration fields that differ, with the values in A and B, such as
    `pipeline.world: 2, 4`."""
    machines: list[str]
    """Facts about the machines that differ, with the values of A and B, such as
    `gpu: NVIDIA A100, NVIDIA H200`."""
    same_bits: bool | None
    """Whether the clips of A and B have the same latents; None: not comparable, because A and B did
    different work, such as clips with other seeds."""

    @property
    def is_equal(self) -> bool | None:
        """Whether all metrics of A and B differ only by noise.

        False if at least one metric differs by more than noise. None if there is no such metric,
        but the noise of at least one metric is unknown.
        """
        verdicts = [ratio.is_noise for ratio in self.ratios]
        if False in verdicts:
            return False
        if None in verdicts:
            return None
        return True

    @property
    def verdict(self) -> str:
        """Result of the comparison of two benchmarks in one sentence."""
        if self.is_equal is None:
            return "unknown: a single round has no spread; use --measure.repeats=3 or more"
        beyond = [ratio.name for ratio in self.ratios if ratio.is_noise is False]
        return f"different: {', '.join(beyond)}" if beyond else "equal: every difference is noise"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison of two benchmarks as JSON values."""
        return {
            "schema_version": 1,
            **asdict(self),
            "equal": self.is_equal,
            "verdict": self.verdict,
            "ratios": [{**asdict(ratio), "noise": ratio.is_noise} for ratio in self.ratios],
        }


def compare(a: Path, b: Path) -> Comparison:
    """Compare the metrics of two finished benchmarks, read from their folders.

    Args:
        a: Folder of the results of A, the denominator of the ratios.
        b: Folder of the results of B.

    Raises:
        InputError: A folder holds no benchmark that can be compared.
    """
    summary_a, summary_b = _read(a / SUMMARY), _read(b / SUMMARY)
    try:
        for summary in (summary_a, summary_b):
            is_later = summary["schema_version"] > SCHEMA_VERSION
            if is_later or not summary["cases"][PIPELINE]["rounds"]:
                raise ValueError("the summary is of a later version, or has no rounds")
        facts = [_machine(_read(folder / ENVIRONMENT)) for folder in (a, b)]
        machines = _differences(facts[0], facts[1])
        config_a, config_b = summary_a["config"], summary_b["config"]
        same_work = _baseline(config_a) == _baseline(config_b)
        same_number = config_a["workload"]["clips"] == config_b["workload"]["clips"]
        same_seeds = config_a["measure"]["seeds"] == config_b["measure"]["seeds"]
        same_bits = None
        if same_work and same_number and same_seeds:
            same_bits = summary_a["latents_sha256"] == summary_b["latents_sha256"]
        return Comparison(
            a=summary_a["run_id"],
            b=summary_b["run_id"],
            ratios=list(_ratios(summary_a, summary_b, same_baseline=same_work and not machines)),
            settings=_differences(config_a, config_b),
            machines=machines,
            same_bits=same_bits,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        folders = f"{str(a)!r} or {str(b)!r}"
        raise InputError(
            f"{folders} holds no benchmark that can be compared: {error!r}",
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
    """Return a benchmark's hardware and versions of libraries, without svdpp's own version.

    Versions of svdpp are left out, because a user may want to compare two of them.
    """
    versions = {name: version for name, version in facts["versions"].items() if name != "svdpp"}
    host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
    return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}


def _ratios(a: Mapping[str, Any], b: Mapping[str, Any], *, same_baseline: bool) -> Iterator[Ratio]:
    """Yield the ratio, B over A, of each metric of two benchmarks.

    Speed-ups over the baselines come first. Each is computed from a pipeline and a baseline that
    were measured in the same round, so it is compared without a `drift` of the machine's speed.
    """
    for case in (ONE_DEVICE, DATA_PARALLEL):
        if case in a["speedups"] and case in b["speedups"]:
            rounds = a["speedups"][case]["rounds"], b["speedups"][case]["rounds"]
            yield ratio(f"{PIPELINE} / {case}", *rounds)
    for name, words in _COMPARED.items():
        alone = _values(a, ONE_DEVICE, name), _values(b, ONE_DEVICE, name)
        # If diffusers did the same work in A and B (`same_baseline`), a difference of its times
        # shows how much the machine's speed has drifted. Without these times, for example if
        # diffusers ran out of memory, the drift counts as 0.
        drift = math.log(ratio("", *alone).value) if same_baseline and all(alone) else 0.0
        for case in (PIPELINE, DATA_PARALLEL, ONE_DEVICE):
            values = _values(a, case, name), _values(b, case, name)
            if all(values):
                must_be_equal = same_baseline and case == ONE_DEVICE
                yield ratio(f"{case}: {words}", *values, drift=drift, must_be_equal=must_be_equal)


def _values(summary: Mapping[str, Any], case: str, name: str) -> list[float]:
    """Return the values of the metric `name` in all rounds of a case; empty if a round lacks it.

    A case is the pipeline or one of its baselines, such as `diffusers`.
    """
    rounds = summary["cases"].get(case, {"rounds": []})["rounds"]
    values = [metrics.get(name) for metrics in rounds]
    return [] if None in values else values


def _baseline(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a benchmark's configuration on which diffusers' time for a clip depends.

    Fields that are None are left out, because summaries of earlier versions lack some fields.
    """
    workload = {name: value for name, value in config["workload"].items() if value is not None}
    workload.pop("clips", None)
    return {
        "model": config["model"],
        "precision": config["precision"],
        "workload": workload,
        "ranks": {name: config["pipeline"].get(name) for name in _BASELINE_RANK_FIELDS},
    }


def _differences(a: object, b: object, name: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if a == b else [f"{name}: {a}, {b}"]
