"""The comparison of two benches: when a difference is real, and when it is noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.bench import runner
from svdpp.bench.compare import ONE_DEVICE, PIPELINE, Comparison, compare, ratio
from svdpp.errors import InputError
from tests.bench.made_up_benches import bench_of, round_of

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
    monkeypatch.setattr(runner, "environment", lambda: ENVIRONMENT)


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
    results = runner.Results(folder, one)
    results.finish()
    (results.folder / "env.json").write_text(json.dumps({**ENVIRONMENT, **environment}))
    return results.folder


def _verdicts(found: Comparison) -> dict[str, bool | None]:
    return {each.name: each.is_noise for each in found.ratios}


def test_the_same_again_is_equal(tmp_path: Path) -> None:
    again = tuple(1.02 * rate for rate in reversed(TOGETHER))
    found = compare(_bench(tmp_path / "a"), _bench(tmp_path / "b", again))

    assert found.verdict == "equal: every difference is within noise"
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
    assert ratio("", a[:3], b[:3], drift=math.log(9)).is_noise is True


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
@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"versions": 1}'])
def test_what_is_no_finished_bench_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    a, b = _bench(tmp_path / "a"), _bench(tmp_path / "b")
    (b / name).unlink()
    if text is not None:
        (b / name).write_text(text)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        compare(a, b)


def test_an_arm_that_did_not_fit_is_left_out(tmp_path: Path) -> None:
    a, b = _bench(tmp_path / "a"), _bench(tmp_path / "b", alone=())
    for one, other in ((a, b), (b, a), (b, b)):
        assert [each.name for each in compare(one, other).ratios] == [
            *("pipeline: clips/min", "pipeline: first clip, s", "pipeline: step, s")
        ]


@pytest.mark.parametrize(
    "damage",
    [
        {"cases": {}},
        {"cases": {"pipeline": {"rounds": []}}},
        {"config": {}},
        {"config": {"pipeline": 3, "workload": {}}},
    ],
)
def test_a_summary_without_what_is_compared_is_refused(
    damage: dict[str, Any], tmp_path: Path
) -> None:
    a, b = _bench(tmp_path / "a"), _bench(tmp_path / "b")
    content = json.loads((b / "summary.json").read_text())
    (b / "summary.json").write_text(json.dumps({**content, **damage}))
    for one, other in ((a, b), (b, a)):
        with pytest.raises(InputError, match=r"summary\.json' is not a bench's summary: "):
            compare(one, other)
