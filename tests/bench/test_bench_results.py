"""The results of a bench: its files and figures, what limits it; two compared, and their noise."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.bench import results as module
from svdpp.bench.results import ROUNDS, SUMMARY, Comparison, Results, compare, ratio
from svdpp.bench.runner import ONE_DEVICE, PIPELINE, read_config
from svdpp.cli.bench import show_summary
from svdpp.cli.console import Console
from svdpp.config.limits import read_costs
from svdpp.errors import InputError
from tests.bench.made_up_benches import bench_of, leave_bench, round_of
from tests.diagnostics.made_up_runs import EVEN, replayed

ENVIRONMENT = {
    "versions": {"svdpp": "1", "torch": "2"},
    "host": {"cpu": "fast", "cpu_capability": "AVX", "usable_cores": 2},
    "devices": {"gpus": []},
}
#: Clips a minute in each round.
ALONE = (50.0, 51.0, 49.0, 50.5, 49.5)
TOGETHER = (99.0, 101.0, 100.0, 98.0, 102.0)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "environment", lambda: ENVIRONMENT)


def _bench(
    folder: Path,
    pipeline: tuple[float, ...] = TOGETHER,
    alone: tuple[float, ...] = ALONE,
    *,
    overrides: tuple[str, ...] = (),
    sha256: str = "aa",
    **environment: Any,
) -> Path:
    """A folder of results in which every figure follows from the clips per minute."""
    one = bench_of("dummy", *overrides)
    for case, rates in ((PIPELINE, pipeline), (ONE_DEVICE, alone)):
        for number, rate in enumerate(rates):
            one.rounds.append(round_of(case, number, seconds=60 / rate, sha256=sha256))
    results = Results(folder, one)
    results.finish()
    (results.folder / "env.json").write_text(json.dumps({**ENVIRONMENT, **environment}))
    return results.folder


def _verdicts(found: Comparison) -> dict[str, bool | None]:
    return {each.name: each.is_noise for each in found.ratios}


def test_the_same_again_is_equal(tmp_path: Path) -> None:
    again = tuple(1.02 * rate for rate in reversed(TOGETHER))
    found = compare(_bench(tmp_path / "a"), _bench(tmp_path / "b", again))

    assert found.verdict == "equal: every difference is noise"
    assert found.is_equal is True
    assert found.same_bits is True
    assert found.settings == found.machines == []
    assert [each.name for each in found.ratios] == [
        *("pipeline / diffusers", "pipeline: clips/min", "diffusers: clips/min"),
        *("pipeline: first clip, s", "diffusers: first clip, s"),
        *("pipeline: step, s", "diffusers: step, s"),
    ]


def test_a_pipeline_that_became_slower_is_different(tmp_path: Path) -> None:
    slower = tuple(0.85 * rate for rate in TOGETHER)
    found = compare(_bench(tmp_path / "a"), _bench(tmp_path / "b", slower, sha256="other"))

    assert found.is_equal is found.same_bits is False
    assert found.verdict.startswith("different: pipeline / diffusers, pipeline: clips/min")
    first = found.ratios[0]
    assert first.value == pytest.approx(0.85, rel=1e-4)
    assert first.low is not None
    assert first.high is not None
    assert 0.77 < first.low < 0.85 < first.high < 0.94


def test_a_machine_that_became_slower_is_no_difference(tmp_path: Path) -> None:
    """Both cases lose a tenth: on one machine that is drift, on another one it is real."""
    a = _bench(tmp_path / "a")
    slow = tuple(0.9 * rate for rate in TOGETHER), tuple(0.9 * rate for rate in ALONE)
    assert compare(a, _bench(tmp_path / "b", *slow)).is_equal is True

    host = {**ENVIRONMENT["host"], "cpu": "slow"}  # type: ignore[dict-item]
    found = compare(a, _bench(tmp_path / "c", *slow, host=host))
    assert found.machines == ["host.cpu: fast, slow"]
    verdicts = _verdicts(found)
    assert verdicts["pipeline / diffusers"] is True
    assert verdicts["pipeline: clips/min"] is False
    assert verdicts["diffusers: clips/min"] is False


def test_another_workload_has_another_yardstick(tmp_path: Path) -> None:
    half = tuple(rate / 2 for rate in TOGETHER), tuple(rate / 2 for rate in ALONE)
    other = _bench(tmp_path / "b", *half, overrides=("workload.images=[a.jpg]",), sha256="bb")
    found = compare(_bench(tmp_path / "a"), other)
    assert found.settings == ["workload.images: [], ['a.jpg']"]
    assert found.same_bits is None  # other clips
    assert _verdicts(found)["diffusers: clips/min"] is False


def test_one_round_says_nothing_of_its_spread(tmp_path: Path) -> None:
    found = compare(_bench(tmp_path / "a", (100.0,), (50.0,)), _bench(tmp_path / "b"))
    assert found.ratios[1].low is None
    assert found.is_equal is True  # so close to 1 that no spread is needed
    found = compare(_bench(tmp_path / "c", (80.0,), (50.0,)), _bench(tmp_path / "d"))
    assert found.is_equal is None
    assert "--measure.repeats" in found.verdict


def test_the_interval_is_all_differences_of_two_rounds_and_a_margin() -> None:
    """Logarithms with a spread of 0.2: three rounds add twice that, four the spread itself."""
    a = [math.exp(x) for x in (-0.1, 0.0, 0.1)]
    found = ratio("", a, [2 * x for x in a])
    assert (found.a, found.b, found.value) == pytest.approx((1.0, 2.0, 2.0))
    assert (found.low, found.high) == pytest.approx((2 * math.exp(-0.6), 2 * math.exp(0.6)))
    drifted = ratio("", a, [2 * x for x in a], drift=-0.5)
    assert drifted.high == pytest.approx(2 * math.exp(1.1))
    four = ratio("", [*a, 1.0], [2 * x for x in (*a, 1.0)])
    assert four.high == pytest.approx(2 * math.exp(0.4))


def test_one_wild_round_does_not_hide_what_is_plain() -> None:
    a, b = [1.0, 1.01, 0.99, 1.0], [10.0, 10.5, 11.0, 60.0]
    assert ratio("", a, b).is_noise is False
    assert ratio("", a, b, drift=math.log(2)).is_noise is True  # most of it may be drift
    assert ratio("", a, [3.0, 4.0, 5.0, 18.0]).is_noise is True  # no wider than the spread of B


@given(
    st.integers(3, 9),
    st.lists(st.floats(0.5, 2.0), min_size=18, max_size=18),
    st.floats(0.1, 10.0),
)
def test_a_difference_is_the_same_from_both_sides(
    rounds: int, values: list[float], scale: float
) -> None:
    a, b = values[:rounds], [scale * value for value in values[9 : 9 + rounds]]
    one, other = ratio("", a, b), ratio("", b, a)
    assert one.is_noise is other.is_noise
    assert one.low is not None
    assert one.low * (1 - 1e-9) <= one.value
    if one.is_noise is False:
        assert max(a) < min(b) or max(b) < min(a)


@pytest.mark.parametrize("name", ["summary.json", "env.json"])
@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"versions": 1}', '{"cases": {}}'])
def test_what_is_no_finished_bench_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    a, b = _bench(tmp_path / "a"), _bench(tmp_path / "b")
    (b / name).unlink()
    if text is not None:
        (b / name).write_text(text)
    for one, other in ((a, b), (b, a)):
        with pytest.raises(InputError, match=r"cannot be read|is not JSON|no bench that can be"):
            compare(one, other)


def test_an_arm_that_did_not_fit_is_left_out(tmp_path: Path) -> None:
    a, b = _bench(tmp_path / "a"), _bench(tmp_path / "b", alone=())
    for one, other in ((a, b), (b, a), (b, b)):
        assert [each.name for each in compare(one, other).ratios] == [
            *("pipeline: clips/min", "pipeline: first clip, s", "pipeline: step, s")
        ]


# --- the files ------------------------------------------------------------------------------------


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
    names = "config.yaml env.json summary.json costs.json rounds.jsonl"
    assert {path.name for path in kept.folder.iterdir()} == set(names.split())
    source = f"measured by: svdpp bench, smoke/{kept.run_id}"
    assert read_costs(kept.folder / "costs.json").source == source
    assert json.loads((kept.folder / "summary.json").read_text()) == found
    assert read_config(str(kept.folder / "config.yaml"), []) == one.asked
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
    for one_ratio in compare(kept.folder, kept.folder).ratios:
        case, _, figure = one_ratio.name.partition(": ")
        if case == f"{PIPELINE} / {ONE_DEVICE}":
            assert found["speedups"][ONE_DEVICE]["over_rounds"] == pytest.approx(one_ratio.a)
        if figure == "clips/min":
            over_rounds = found["cases"][case]["over_rounds"]
            assert over_rounds["steady_clips_per_minute"] == pytest.approx(one_ratio.a)
    show_summary(Console(), found)
    printed = capsys.readouterr().out
    assert "geometric means over rounds" in printed
    assert re.search(r"steady_clips_per_minute +30 ", printed), printed


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
