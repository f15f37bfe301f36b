"""Which cases a bench measures, with which clips, and what it records."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.bench import runner as module
from svdpp.bench.compare import DATA_PARALLEL, ONE_DEVICE, PIPELINE, ROUNDS, SUMMARY, compare
from svdpp.bench.config import read_config
from svdpp.bench.runner import Bench, Results, Round, cases_of, differing, summary
from svdpp.cli.bench import show_summary
from svdpp.cli.console import Console
from svdpp.config.limits import read_costs
from svdpp.errors import OutOfMemoryError
from tests.bench.made_up_benches import bench_of, config_of, leave_bench, round_of
from tests.diagnostics.made_up_runs import EVEN, replayed


def test_the_pipeline_has_two_yardsticks_on_the_same_devices() -> None:
    cases = cases_of(config_of(split="alternating", checksum=True))
    assert list(cases) == [PIPELINE, DATA_PARALLEL, ONE_DEVICE]
    assert str(cases[DATA_PARALLEL].layout) == "data parallel"
    assert (cases[DATA_PARALLEL].world_size, cases[DATA_PARALLEL].checksum) == (2, True)
    assert cases[ONE_DEVICE].world_size == 1


def test_data_parallel_is_not_measured_against_itself() -> None:
    assert list(cases_of(config_of(replicas=2))) == [PIPELINE, ONE_DEVICE]
    assert list(cases_of(config_of().alone())) == [PIPELINE, ONE_DEVICE]


def test_each_image_has_the_first_seed_before_any_has_the_second() -> None:
    requests = bench_of("demo", "workload.clips=9", "measure.seeds=[7, 8]").requests
    assert [each.seed for each in requests] == [7] * 4 + [8] * 4 + [7]
    names = [Path(str(each.image)).stem for each in requests]
    assert names[:5] == ["astronaut", "chelsea", "coffee", "rocket", "astronaut"]


def test_arms_take_turns_and_one_that_does_not_fit_is_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []

    def measure(self: Bench, case: str, number: int, *_: object) -> Round:  # noqa: ARG001
        asked.append((number, case))
        if case == DATA_PARALLEL:
            raise OutOfMemoryError("out of memory while decoding")
        return round_of(case, number)

    monkeypatch.setattr(module.Bench, "_measure", measure)
    one = bench_of("dummy", "measure.repeats=2")
    said: list[str] = []
    one.run(said.append, lambda done: None)  # noqa: ARG005
    found = summary(one, "run")

    assert asked == [
        *((0, PIPELINE), (0, DATA_PARALLEL), (0, ONE_DEVICE)),
        *((1, ONE_DEVICE), (1, PIPELINE)),
    ]
    assert said[1] == "round 1 of 2, data parallel: out of memory while decoding"
    assert found["cases"][DATA_PARALLEL]["error"] == "out of memory while decoding"
    assert list(found["speedups"]) == [ONE_DEVICE]


def test_a_pipeline_that_does_not_fit_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Bench, case: str, number: int, *_: object) -> Round:  # noqa: ARG001
        raise OutOfMemoryError("out of memory")

    monkeypatch.setattr(module.Bench, "_measure", measure)
    with pytest.raises(OutOfMemoryError):
        bench_of().run(lambda said: None, lambda done: None)  # noqa: ARG005


def test_bits_are_held_against_diffusers_own() -> None:
    rounds = [round_of(PIPELINE, 0), round_of(ONE_DEVICE, 0), round_of(PIPELINE, 1, sha256="bb")]
    assert differing(rounds[:2]) == []
    assert differing(rounds) == ["pipeline, round 2, clip 0"]
    rounds[0].frames_sha256[0] = "cc"
    assert differing(rounds[:2]) == ["pipeline, round 1, clip 0"]


def test_files_of_a_run(tmp_path: Path) -> None:
    one = bench_of()
    kept, other = Results(tmp_path, one), Results(tmp_path, one)
    for number in range(2):
        for case, seconds in ((PIPELINE, 1.0 + number), (ONE_DEVICE, 4.0)):
            done = round_of(case, number, seconds=seconds)
            one.rounds.append(done)
            kept.add(done)
    found = kept.finish()

    assert kept.folder != other.folder
    assert kept.folder.parent == tmp_path / "smoke"
    assert kept.run_id.endswith(f"-{one.asked.sha256[:8]}")
    names = "config.yaml env.json summary.json costs.json rounds.jsonl"
    assert {path.name for path in kept.folder.iterdir()} == set(names.split())
    source = f"measured by: svdpp bench, smoke/{kept.run_id}"
    assert read_costs(kept.folder / "costs.json").source == source
    assert json.loads((kept.folder / "summary.json").read_text()) == found
    assert read_config(str(kept.folder / "config.yaml"), []) == one.asked
    assert f"# sha256 {one.asked.sha256}\n" in (kept.folder / "config.yaml").read_text()
    rates = [each["steady_clips_per_minute"] for each in found["cases"][PIPELINE]["rounds"]]
    assert rates == [60.0, 30.0]
    speedup = found["speedups"][ONE_DEVICE]
    assert speedup["rounds"] == [4.0, 2.0]
    assert speedup["over_rounds"] == pytest.approx(8**0.5)
    figures = found["cases"][PIPELINE]["over_rounds"]
    assert figures["start_seconds"] == pytest.approx(3.0)
    assert figures["load_seconds"] == pytest.approx(2.0)
    assert (figures["peak_allocated_gib"], figures["peak_reserved_gib"]) == (None, 1.0)
    assert figures["step_p50_seconds"] == pytest.approx((0.5 * 1.0) ** 0.5)
    parts = ("compute", "wait", "transfer", "idle", "unaccounted")
    assert sum(figures[f"{part}_share"] for part in parts) == pytest.approx(1.0, abs=1e-3)


def test_a_bench_prints_the_figures_that_its_comparison_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds of 60, 60 and 7.5 clips per minute: the median is 60, the geometric mean 30."""
    one = bench_of()
    kept = Results(tmp_path, one)
    for number, seconds in enumerate((1.0, 1.0, 8.0)):
        one.rounds += [round_of(PIPELINE, number, seconds=seconds), round_of(ONE_DEVICE, number)]
    found = kept.finish()
    for ratio in compare(kept.folder, kept.folder).ratios:
        case, _, figure = ratio.name.partition(": ")
        if case == f"{PIPELINE} / {ONE_DEVICE}":
            assert found["speedups"][ONE_DEVICE]["over_rounds"] == pytest.approx(ratio.a)
        if figure == "clips/min":
            over_rounds = found["cases"][case]["over_rounds"]
            assert over_rounds["steady_clips_per_minute"] == pytest.approx(ratio.a)
    show_summary(Console(), found)
    printed = capsys.readouterr().out
    assert "geometric means over rounds" in printed
    assert re.search(r"steady_clips_per_minute +30 ", printed), printed


# --- what limits the pipeline ---------------------------------------------------------------------


def _limits(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())["limits"]
    return found


def test_the_known_bottleneck_of_the_pipeline_comes_first(tmp_path: Path) -> None:
    folder = leave_bench(tmp_path, replayed(replace(EVEN, decode_seconds=1.0)))
    limits = _limits(folder)
    first = limits["findings"][0]
    assert (first["kind"], first["rank"], limits["round"]) == ("decode", 1, 1)
    assert "its decodes take 67% of its work" in limits["headline"]
    rounds = [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]
    assert [each["case"] for each in rounds] == ["pipeline", "data parallel", "diffusers"] * 3
    assert rounds[3]["measured"] == limits["measured"], "of the median round"


def test_layouts_are_advised_as_fields_of_the_configuration(tmp_path: Path) -> None:
    folder = leave_bench(tmp_path, replayed(slow=(1.0, 2.0)))
    options = shlex.split(_limits(folder)["advice"]["options"])
    asked = read_config("smoke", [each.removeprefix("--") for each in options]).pipeline
    assert (asked.split, asked.replicas) == ("alternating", 1)
    assert asked.costs == str(folder / "costs.json")
