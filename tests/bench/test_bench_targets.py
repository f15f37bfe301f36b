"""Targets of a bench: their names, their bounds, and when one counts as missed."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from svdpp.bench.compare import DATA_PARALLEL, FIGURES, ONE_DEVICE, PIPELINE, missed, outcome
from svdpp.bench.config import BenchConfig, read_config
from svdpp.bench.runner import Bench, summary
from svdpp.errors import RequestError
from tests.bench.made_up_benches import bench_of, config_of, round_of


def _summary(
    figure: str, rounds: tuple[float, ...], speedups: tuple[float, ...] = ()
) -> dict[str, Any]:
    """A summary with one figure of the pipeline and its speed-ups over data parallel."""
    value = max(rounds) if figure.startswith("peak_") else statistics.fmean(rounds)
    pipeline = {"rounds": [{figure: each} for each in rounds], "over_rounds": {figure: value}}
    over = {"rounds": list(speedups), "over_rounds": statistics.fmean(speedups or rounds)}
    return {
        "cases": {PIPELINE: pipeline},
        "speedups": {DATA_PARALLEL: over} if speedups else {},
    }


def _verdict(name: str, bound: str, found: dict[str, Any]) -> str:
    return str(outcome(name, bound, found)["verdict"])


@pytest.mark.parametrize(
    ("bound", "rounds", "verdict"),
    [
        ("<= 1.05", (1.04, 1.03, 1.05), "met"),
        ("<= 1.05", (1.06, 1.02, 1.11), "within noise"),
        ("<= 1.05", (1.205, 1.210, 1.215), "missed"),
        ("<= 1.05", (1.0560, 1.0561, 1.0562), "within noise"),  # below 1%
        ("<= 1.05", (1.30, 1.30, 1.30), "missed"),  # no spread at all
        (">= 1.05", (0.900, 0.905, 0.895), "missed"),
        (">= 0.95", (0.96, 0.95, 0.97), "met"),
        ("> 95%", (0.96, 0.95, 0.97), "met"),
        # One disturbed round, yet all lie far beyond the bound.
        ("< 1", (10.0, 10.5, 11.0, 19.0), "missed"),
        ("< 1", (10.0, 10.5, 11.0, 80.0), "within noise"),
        ("< 1", (10.0, 10.5, 19.0), "within noise"),
        ("<= 1.05", (1.2, 1.3), "within noise"),  # the others ran out of memory
    ],
)
def test_a_target_is_missed_only_beyond_the_noise(
    bound: str, rounds: tuple[float, ...], verdict: str
) -> None:
    assert _verdict("overhead", bound, _summary("overhead", rounds)) == verdict


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ((0.0, 0.002, -0.0001), "met"),
        ((0.011, 0.009, 0.013), "within noise"),
        ((0.031, 0.030, 0.032), "missed"),
    ],
)
def test_shares_are_compared_by_their_difference(rounds: tuple[float, ...], verdict: str) -> None:
    assert _verdict("unaccounted_share", "<= 1%", _summary("unaccounted_share", rounds)) == verdict


def test_memory_is_the_largest_of_all_rounds_and_has_no_noise() -> None:
    found = _summary("peak_reserved_gib", (10.0, 10.0, 12.5))
    assert _verdict("peak_reserved_gib", "<= 12.5", found) == "met"
    assert _verdict("peak_reserved_gib", "<= 12.4", found) == "missed"


def test_what_was_not_measured_counts_as_missed() -> None:
    """The case that the pipeline is compared with ran out of memory."""
    found = outcome("pipeline_over_data_parallel", ">= 0.95", _summary("overhead", (1.0,)))
    assert found == {
        **{"target": ">= 0.95", "value": None, "low": None, "high": None},
        "verdict": "not measured",
    }
    assert missed({"speedup": found}) == ["speedup"]
    once = _summary("overhead", (1.0,), speedups=(0.5,))
    assert _verdict("pipeline_over_data_parallel", ">= 0.95", once) == "within noise"


def test_the_range_is_that_of_the_true_figure() -> None:
    """Three rounds: 4 times their spread on both sides; five: once."""
    found = outcome("bubble", "<= 1", _summary("bubble", (0.2, 0.3, 0.4)))
    assert (found["low"], found["high"]) == pytest.approx((0.2 - 0.8, 0.4 + 0.8))
    assert found["value"] == pytest.approx(0.3)
    found = outcome("bubble", "<= 1", _summary("bubble", (0.2, 0.3, 0.3, 0.3, 0.4)))
    assert (found["low"], found["high"]) == pytest.approx((0.0, 0.6))


@pytest.mark.parametrize(
    ("name", "bound", "words", "hint"),
    [
        ("overhed", "<= 1", "no figure 'overhed'", "did you mean overhead?"),
        ("step_p99_seconds", "<= 1", "no figure 'step_p99_seconds'", "did you mean step_p9"),
        ("zzz", "<= 1", "no figure 'zzz'", "known: pipeline_over_data_parallel, "),
        ("overhead", "1.05", "targets.overhead: '1.05' is not a bound", '"<= 1%"'),
        ("overhead", "== 1", "'== 1' is not a bound", ""),
        ("overhead", "<= -1", "'<= -1' is not a bound", ""),
        ("overhead", "<= fast", "'<= fast' is not a bound", ""),
    ],
)
def test_wrong_targets_are_refused(name: str, bound: str, words: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_config("smoke", [f"targets.{name}={bound}"])
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_targets_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(
        "targets:\n"
        '  pipeline_over_data_parallel: ">= 0.95"\n'
        '  overhead: "<= 1.05"\n'
        '  unaccounted_share: "<= 1%"\n'
        '  step_p95_seconds: "<= 1.2"\n'
    )
    point = read_config(str(path), ["targets.overhead=<= 1.1", "targets.bubble=< 0.5"])
    assert point.targets == {
        "pipeline_over_data_parallel": ">= 0.95",
        "overhead": "<= 1.1",
        "unaccounted_share": "<= 1%",
        "step_p95_seconds": "<= 1.2",
        "bubble": "< 0.5",
    }
    assert point.sha256 == BenchConfig(experiment="gate").sha256
    path.write_text(point.to_yaml())
    assert read_config(str(path), []) == point


@pytest.mark.parametrize("value", ["1.05", '["<= 1", "<= 2"]', "null"])
def test_a_target_is_text(value: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(f"targets: {{overhead: {value}}}\n")
    with pytest.raises(RequestError, match=r"targets\.overhead must be a string"):
        read_config(str(path), [])


def test_too_few_rounds_for_a_target_are_refused() -> None:
    with pytest.raises(RequestError, match="3 rounds or more, to know the noise, got 2") as caught:
        read_config("smoke", ["targets.overhead=<= 1", "measure.repeats=2"])
    assert caught.value.hint == "--measure.repeats=5"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipeline_over_data_parallel", "data parallel is not a case"),
        ("peak_allocated_gib", "only peak_reserved_gib is measured"),
    ],
)
def test_what_will_not_be_measured_is_refused_before_the_bench(name: str, words: str) -> None:
    point = read_config("smoke", ["model.name=dummy", f"targets.{name}=<= 1"])
    with pytest.raises(RequestError, match=words):
        Bench(point, config_of(replicas=2))


def test_a_summary_has_every_figure_that_a_target_can_name() -> None:
    one = bench_of("dummy", "targets.overhead=<= 1.05", "targets.makespan_seconds=< 0.5")
    for number in range(3):
        one.rounds += [round_of(PIPELINE, number), round_of(ONE_DEVICE, number)]
    found = summary(one, "run")

    assert set(FIGURES) == set(found["cases"][PIPELINE]["over_rounds"])
    assert found["cases"][PIPELINE]["over_rounds"]["overhead"] == pytest.approx(1.0)
    verdicts = {name: each["verdict"] for name, each in found["targets"].items()}
    assert verdicts == {"overhead": "met", "makespan_seconds": "missed"}
