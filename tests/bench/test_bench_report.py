"""The report on a bench: what limits its pipeline, what would help, its noise and its targets."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.bench.compare import DATA_PARALLEL, PIPELINE, ROUNDS, SUMMARY
from svdpp.bench.config import BenchConfig, read_grid
from svdpp.bench.report import BenchReport, is_bench, read_bench_report
from svdpp.diagnostics.report import Diagnosis
from svdpp.errors import InputError, RankError
from tests.bench.made_up_benches import FIGURES, begun_bench, leave_bench, leave_rounds
from tests.diagnostics.made_up_runs import EVEN, delayed, replayed

_DECODE = replayed(replace(EVEN, decode_seconds=1.0))


def _pipeline(report: BenchReport) -> Diagnosis:
    found = report.cases[0]
    assert found.name == PIPELINE
    assert found.diagnosis is not None
    return found.diagnosis


def _asked(command: str) -> BenchConfig:
    program, name, config, *changes = shlex.split(command)
    assert (program, name) == ("svdpp", "bench")
    (point,) = read_grid(config, [change.removeprefix("--") for change in changes])
    return point


def test_the_known_bottleneck_of_the_pipeline_comes_first(tmp_path: Path) -> None:
    report = read_bench_report(leave_bench(tmp_path, _DECODE))

    first = _pipeline(report).findings[0]
    assert (first.kind, first.rank) == ("decode", 1)
    assert "its decodes take 67% of its work" in report.headline
    kinds = [each.diagnosis.findings[0].kind for each in report.cases if each.diagnosis]
    assert kinds == ["decode", "balanced", "balanced"]
    assert [each.num_rounds for each in report.cases] == [3, 3, 3]
    assert [each.round for each in report.cases] == [1, 1, 1]


def test_layouts_are_advised_as_fields_of_the_configuration(tmp_path: Path) -> None:
    """Data parallel is not advised by forecast: it is measured beside the pipeline."""
    folder = leave_bench(tmp_path, replayed(slow=(1.0, 2.0)))
    best = _pipeline(read_bench_report(folder)).advice
    assert best is not None
    asked = _asked(best.command).pipeline
    assert (asked.split, asked.replicas) == ("dithered", 1)
    assert asked.costs == str(folder / "costs.json")
    assert _pipeline(read_bench_report(leave_bench(tmp_path, _DECODE))).advice is None


def test_writing_limits_no_bench(tmp_path: Path) -> None:
    figures = delayed(FIGURES, 1, 20.0, writer_wait=20.0)
    figures = replace(figures, write_tail=2.0)
    findings = _pipeline(read_bench_report(leave_bench(tmp_path, figures))).findings
    assert [each.kind for each in findings] == ["balanced"]


def test_missed_targets_and_noise_are_named(tmp_path: Path) -> None:
    targets = ("targets.makespan_seconds=<= 0.5", "targets.bubble=<= 1")
    report = read_bench_report(leave_bench(tmp_path, FIGURES, *targets))
    assert report.headline.startswith("missed targets: makespan_seconds. ")
    assert report.summary is not None
    verdicts = {name: each["verdict"] for name, each in report.summary["targets"].items()}
    assert verdicts == {"makespan_seconds": "missed", "bubble": "met"}
    noise = {each.name: each for each in report.noise}
    (low, high) = (noise["pipeline: clips/min"].low, noise["pipeline: clips/min"].high)
    assert low is not None
    assert high is not None
    assert 0.8 < low < 1 < high < 1.25
    assert noise[f"{PIPELINE} / {DATA_PARALLEL}"].a == pytest.approx(2.0, rel=0.01)
    once = read_bench_report(leave_bench(tmp_path, pipeline=(1.0,), apart=(2.0,)))
    assert {each.low for each in once.noise} == {None}


def test_a_bench_that_failed_reports_what_it_measured(tmp_path: Path) -> None:
    one, kept = begun_bench(tmp_path)
    with pytest.raises(RankError), kept.failure_recorded():
        leave_rounds(one, kept, _DECODE)
        raise RankError("rank 1 died")

    report = read_bench_report(kept.folder)

    assert report.headline.startswith("the bench failed: rank 1 died. rank 1 limits")
    assert [each.num_rounds for each in report.cases] == [3, 3, 3]
    with (kept.folder / ROUNDS).open("a") as file:
        file.write('{"case": "pipel')  # killed while it wrote
    assert len(read_bench_report(kept.folder).cases) == 3


def test_a_bench_without_a_round_has_a_report(tmp_path: Path) -> None:
    _, kept = begun_bench(tmp_path)
    assert is_bench(kept.folder)
    report = read_bench_report(kept.folder)
    assert report.headline == "the bench has not finished. no round of the pipeline has figures"
    assert report.to_json()["cases"] == {}


def test_the_json_holds_what_the_report_says(tmp_path: Path) -> None:
    report = read_bench_report(leave_bench(tmp_path, _DECODE, "targets.bubble=<= 1"))
    content = json.loads(json.dumps(report.to_json()))
    assert content["finished"] is True
    assert content["cases"][PIPELINE]["diagnosis"]["findings"][0]["kind"] == "decode"
    assert content["targets"]["bubble"]["verdict"] == "met"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (SUMMARY, "{", "is not JSON"),
        (SUMMARY, "{}", "is not a bench's summary"),
        (ROUNDS, '{"case": "pipeline"}', "damaged results"),
        (ROUNDS, "[]", "damaged results"),
        (ROUNDS, '{"case": "pipeline", "round": 0, "measured": {"makespan": 1}}', "are damaged"),
    ],
)
def test_damaged_files_are_one_sentence(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    folder = leave_bench(tmp_path)
    (folder / name).write_text(content + "\n")
    with pytest.raises(InputError, match=words):
        read_bench_report(folder)
