"""Benchmark: configuration, cases, result files, and comparison of two benchmarks."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from svdpp.bench import results as module
from svdpp.bench.compare import compare, ratio
from svdpp.bench.config import BenchConfig, pipeline_config, read_config, shipped
from svdpp.bench.results import ROUNDS, Results
from svdpp.bench.runner import Bench, Round, cases_of, differing
from svdpp.bench.targets import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.config import ParallelConfig
from svdpp.config.cost_files import read_costs
from svdpp.errors import InputError, OutOfMemoryError, RequestError
from tests.support.made_up_runs import EVEN, bench_of, config_of, replayed, round_of

_SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def _file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_what_is_shipped_is_valid() -> None:
    assert shipped() == ["smoke", "svd-xt", "wan-a14b"]
    assert [read_config(name, []).experiment for name in shipped()] == shipped()


@pytest.mark.parametrize("script", sorted(_SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_of_benchmarks_import_names_that_exist(script: Path) -> None:
    """Scripts in benchmarks/ import only names that exist in svdpp.

    The modules are not imported, because some need packages of extras.
    """
    root = script.parents[1]
    for node in ast.walk(ast.parse(script.read_text())):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("svdpp")):
            continue
        package = root / str(node.module).replace(".", "/")
        path = package.with_suffix(".py") if not package.is_dir() else package / "__init__.py"
        text = path.read_text()
        for name in (each.name for each in node.names):
            is_module = (package / f"{name}.py").exists()
            assert is_module or re.search(rf"\b{name}\b", text), f"{node.module} has no {name}"


def test_an_empty_file_has_every_default_and_the_files_name(tmp_path: Path) -> None:
    point = read_config(_file(tmp_path, "workload:\n  # clips: 3\n"), [])
    assert point == BenchConfig(experiment="mine")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("pipeline.wrold", "did you mean pipeline.world?"),
        ("world", "did you mean pipeline.world?"),
        ("workload.seeds", "did you mean measure.seeds?"),
        ("zzz", "the fields are experiment, "),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, hint: str) -> None:
    with pytest.raises(RequestError, match="no field") as caught:
        read_config("smoke", [f"{key}=1"])
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pipeline.world=many", "pipeline.world must be a whole number, got 'many'"),
        ("pipeline.world=0", "pipeline.world must be 1 or more, got 0"),
        ("precision=fp8", "precision must be 'fp32', 'fp16' or 'bf16', got 'fp8'"),
        ("experiment=../up", "experiment must match ^[A-Za-z0-9_]"),
        ("measure.seeds=[]", "measure.seeds needs 1 or more values, got []"),
        ("model=demo", "model must be a section, got 'demo'"),
        ("model.name.x=1", "'name' is not a section"),
        ("pipeline.world", "an override is section.field=value, got 'pipeline.world'"),
        ("pipeline.world=[1", "the value is not YAML"),
        ("workload.clips=100001", "workload.clips must be 100000 or less, got 100001"),
        ("profile='yes'", "profile must be true or false, got 'yes'"),
    ],
)
def test_values_that_do_not_fit_are_refused(override: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_config("smoke", [override])
    assert words in caught.value.message


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "just words", "\x00", "!!python/object:os.x {}", "a: &b [1]\nc: *b"]
)
def test_what_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_config(_file(tmp_path, text), [])


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(RequestError, match="neither a file") as caught:
        read_config("smok", [])
    assert caught.value.hint == "did you mean smoke?"


def test_the_last_override_holds_and_the_file_is_beneath_all(tmp_path: Path) -> None:
    name = _file(tmp_path, "workload: {clips: 3, steps: 6}\n")
    point = read_config(name, ["workload.clips=4", "workload.clips=5", "pipeline.timeout=1e1"])
    assert (point.workload.clips, point.workload.steps) == (5, 6)
    assert point.pipeline.timeout == 10.0


def test_fields_are_those_of_a_run() -> None:
    fields = ("model.channels_last", "pipeline.deterministic", "pipeline.allow_mixed_devices")
    config = pipeline_config(read_config("smoke", [f"{field}=true" for field in fields]))
    assert config.model.channels_last
    assert config.deterministic
    assert config.allow_mixed_devices


def test_a_configuration_shows_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    point = read_config(
        "smoke", [f"model.name={tmp_path}/weights", f"workload.images=[{tmp_path}/a.jpg]"]
    )
    text = point.to_yaml()
    assert str(tmp_path) not in text
    assert yaml.safe_load(text)["model"]["name"] == "~/weights"


# --- the cases -----------------------------------------------------------------------------------


def test_the_pipeline_has_two_yardsticks_on_the_same_devices() -> None:
    cases = cases_of(config_of(parallel=ParallelConfig(split="alternating"), checksum=True))
    assert list(cases) == [PIPELINE, DATA_PARALLEL, ONE_DEVICE]
    assert str(cases[DATA_PARALLEL].layout) == "data parallel"
    assert (cases[DATA_PARALLEL].world_size, cases[DATA_PARALLEL].checksum) == (2, True)
    assert cases[ONE_DEVICE].world_size == 1
    assert list(cases_of(config_of(parallel=ParallelConfig(data_parallel_size=2)))) == [
        PIPELINE,
        ONE_DEVICE,
    ]


def test_each_image_has_the_first_seed_before_any_has_the_second() -> None:
    requests = bench_of("demo", "workload.clips=9", "measure.seeds=[7, 8]").requests
    assert [each.seed for each in requests] == [7] * 4 + [8] * 4 + [7]
    names = [Path(str(each.image)).stem for each in requests]
    assert names[:5] == ["astronaut", "chelsea", "coffee", "rocket", "astronaut"]


def _replace_measurement(monkeypatch: pytest.MonkeyPatch, too_large: str) -> list[tuple[int, str]]:
    """Replace a benchmark's measurement by a stand-in; the case `too_large` runs out of memory.

    Return the list of measured rounds, which grows during the test.
    """
    asked: list[tuple[int, str]] = []

    def measure(self: Bench, case: str, number: int, *_: object) -> Round:  # noqa: ARG001
        asked.append((number, case))
        if case == too_large:
            raise OutOfMemoryError("out of memory while decoding")
        return round_of(case, number)

    monkeypatch.setattr(Bench, "_measure", measure)
    return asked


def test_cases_take_turns_and_one_that_does_not_fit_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = _replace_measurement(monkeypatch, DATA_PARALLEL)
    one = bench_of("dummy", "measure.repeats=2")
    said: list[str] = []
    one.run(said.append, print)
    found = Results(tmp_path, one).finish()

    assert asked == [
        *((0, PIPELINE), (0, DATA_PARALLEL), (0, ONE_DEVICE)),
        *((1, ONE_DEVICE), (1, PIPELINE)),
    ]
    assert said[1] == "round 1 of 2, data parallel: out of memory while decoding"
    assert found["cases"][DATA_PARALLEL]["error"] == "out of memory while decoding"
    assert list(found["speedups"]) == [ONE_DEVICE]


def test_a_pipeline_that_does_not_fit_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_measurement(monkeypatch, PIPELINE)
    with pytest.raises(OutOfMemoryError):
        bench_of().run(print, print)


def test_bits_are_held_against_diffusers_own() -> None:
    rounds = [round_of(PIPELINE, 0), round_of(ONE_DEVICE, 0), round_of(PIPELINE, 1, sha256="bb")]
    assert differing(rounds[:2]) == []
    assert differing(rounds) == ["pipeline, round 2, clip 0"]
    rounds[0].sha256[0] = "aa", "cc"
    assert differing(rounds[:2]) == ["pipeline, round 1, clip 0"]


# --- the files ------------------------------------------------------------------------------------


def test_files_of_a_run(tmp_path: Path) -> None:
    config = config_of(num_threads=3)
    config = replace(config, model=replace(config.model, dtype="bf16"))
    one = Bench(read_config("smoke", ["pipeline.threads=null", "precision=null"]), config)
    kept, other = Results(tmp_path, one), Results(tmp_path, one)
    for number in range(2):
        for case, seconds in ((PIPELINE, 1.0 + number), (ONE_DEVICE, 4.0)):
            done = round_of(case, number, seconds=seconds)
            one.rounds.append(done)
            kept.add(done)
    found = kept.finish()

    assert kept.folder != other.folder
    assert kept.folder.parent == tmp_path / "smoke"
    names = "config.yaml env.json summary.json summary.csv costs.json rounds.jsonl spans.jsonl"
    assert {path.name for path in kept.folder.iterdir()} == set(names.split())
    assert json.loads((kept.folder / "summary.json").read_text()) == found
    assert read_config(str(kept.folder / "config.yaml"), []) == one.bench_config
    asked = one.bench_config
    assert (asked.workload.steps, asked.pipeline.threads, asked.precision) == (2, 3, "bf16")
    assert read_costs(kept.folder / "costs.json").step_seconds == 0.75, "the median of both rounds"
    rates = [each["steady_clips_per_minute"] for each in found["cases"][PIPELINE]["rounds"]]
    assert rates == [60.0, 30.0]
    speedup = found["speedups"][ONE_DEVICE]
    assert speedup["rounds"] == [4.0, 2.0]
    assert speedup["over_rounds"] == pytest.approx(8**0.5)
    metrics = found["cases"][PIPELINE]["over_rounds"]
    assert metrics["start_seconds"] == pytest.approx(3.0)
    assert metrics["load_seconds"] == pytest.approx(2.0)
    assert (metrics["peak_allocated_gib"], metrics["peak_reserved_gib"]) == (None, 1.0)
    assert metrics["step_p50_seconds"] == pytest.approx((0.5 * 1.0) ** 0.5)
    parts = ("compute", "wait", "transfer", "idle", "unaccounted")
    assert sum(metrics[f"{part}_share"] for part in parts) == pytest.approx(1.0, abs=1e-3)


def test_the_known_bottleneck_comes_first_and_fields_of_the_configuration_are_advised(
    tmp_path: Path,
) -> None:
    metrics, one = replayed(replace(EVEN, step_seconds=(0.1, 0.2))), bench_of()
    kept = Results(tmp_path, one)
    for number, makespan in enumerate((2.0, 2.1, 2.2)):
        done = replace(round_of(PIPELINE, number), metrics=replace(metrics, makespan=makespan))
        one.rounds.append(done)
        kept.add(done)
    limits = kept.finish()["limits"]

    first = limits["findings"][0]
    assert (first["kind"], first["rank"], limits["round"]) == ("slow_device", 1, 1)
    assert "a step takes 0.2 s, on the others 0.1 s" in limits["headline"]
    rounds = [json.loads(line) for line in (kept.folder / ROUNDS).read_text().splitlines()]
    assert rounds[1]["measured"] == limits["measured"], "of the median round"
    options = shlex.split(limits["advice"]["options"])
    asked = read_config("smoke", [each.removeprefix("--") for each in options]).pipeline
    assert (asked.split, asked.replicas) == ("alternating", 1)
    assert asked.costs == str(kept.folder / "costs.json")


# --- comparison of two benches --------------------------------------------------------------------

ENVIRONMENT = {
    "versions": {"svdpp": "1", "torch": "2"},
    "host": {"cpu": "fast", "cpu_capability": "AVX", "usable_cores": 2},
    "devices": {"gpus": []},
}
#: Clips per minute in each round.
ALONE = (50.0, 51.0, 49.0, 50.5, 49.5)
TOGETHER = (99.0, 101.0, 100.0, 98.0, 102.0)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "environment", lambda: ENVIRONMENT)


def _write_results(
    folder: Path,
    pipeline: tuple[float, ...] = TOGETHER,
    alone: tuple[float, ...] = ALONE,
    *,
    overrides: tuple[str, ...] = (),
    sha256: str = "aa",
    **environment: Any,
) -> Path:
    """Write results of a benchmark with the given clips per minute; return their folder."""
    one = bench_of("dummy", *overrides)
    for case, rates in ((PIPELINE, pipeline), (ONE_DEVICE, alone)):
        for number, rate in enumerate(rates):
            one.rounds.append(round_of(case, number, seconds=60 / rate, sha256=sha256))
    results = Results(folder, one)
    results.finish()
    (results.folder / "env.json").write_text(json.dumps({**ENVIRONMENT, **environment}))
    return results.folder


def _times(factor: float, rates: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * rate for rate in rates)


def test_the_same_again_is_equal(tmp_path: Path) -> None:
    again = _times(1.02, TOGETHER[::-1])
    found = compare(_write_results(tmp_path / "a"), _write_results(tmp_path / "b", again))

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
    slower = _times(0.85, TOGETHER)
    found = compare(
        _write_results(tmp_path / "a"), _write_results(tmp_path / "b", slower, sha256="other")
    )

    assert found.is_equal is found.same_bits is False
    assert found.verdict.startswith("different: pipeline / diffusers, pipeline: clips/min")
    first = found.ratios[0]
    assert first.value == pytest.approx(0.85, rel=1e-4)
    assert first.low is not None
    assert first.high is not None
    assert 0.77 < first.low < 0.85 < first.high < 0.94


def test_a_machine_that_became_slower_is_no_difference(tmp_path: Path) -> None:
    """If both cases become 10% slower on the same machine, the change counts as drift.

    On another machine, the change counts as a difference.
    """
    a, slow = _write_results(tmp_path / "a"), (_times(0.9, TOGETHER), _times(0.9, ALONE))
    assert compare(a, _write_results(tmp_path / "b", *slow)).is_equal is True

    host = {**ENVIRONMENT["host"], "cpu": "slow"}  # type: ignore[dict-item]
    found = compare(a, _write_results(tmp_path / "c", *slow, host=host))
    assert found.machines == ["host.cpu: fast, slow"]
    assert [each.is_noise for each in found.ratios[:3]] == [True, False, False]


def test_another_workload_has_another_yardstick(tmp_path: Path) -> None:
    half = _times(0.5, TOGETHER), _times(0.5, ALONE)
    other = _write_results(
        tmp_path / "b", *half, overrides=("workload.images=[a.jpg]",), sha256="bb"
    )
    found = compare(_write_results(tmp_path / "a"), other)
    assert found.settings == ["workload.images: [], ['a.jpg']"]
    assert found.same_bits is None  # the clips are different ones
    assert found.ratios[2].is_noise is False


def test_one_round_says_nothing_of_its_spread(tmp_path: Path) -> None:
    other = _write_results(tmp_path / "other")
    found = compare(_write_results(tmp_path / "a", (100.0,), (50.0,)), other)
    assert found.ratios[1].low is None
    assert found.is_equal is True  # the ratio is so close to 1 that the spread does not matter
    found = compare(_write_results(tmp_path / "b", (80.0,), (50.0,)), other)
    assert found.is_equal is None
    assert "--measure.repeats" in found.verdict


def test_the_interval_is_all_differences_of_two_rounds_and_a_margin() -> None:
    """The interval of a ratio spans all pairs of rounds, plus a margin.

    The logarithms of the rounds have a spread of 0.2. With three rounds the margin is twice the
    spread, with four rounds it is the spread.
    """
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
    assert ratio("", a, b, drift=math.log(2)).is_noise is True  # drift may explain the ratio
    assert ratio("", a, [3.0, 4.0, 5.0, 18.0]).is_noise is True  # B's spread is larger


@pytest.mark.parametrize("name", ["summary.json", "env.json"])
@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"versions": 1}'])
def test_what_is_no_finished_bench_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    a, b = _write_results(tmp_path / "a"), _write_results(tmp_path / "b")
    (b / name).unlink()
    if text is not None:
        (b / name).write_text(text)
    for one, other in ((a, b), (b, a)):
        with pytest.raises(InputError, match=r"cannot be read|is not JSON|no benchmark that"):
            compare(one, other)


def test_an_arm_that_did_not_fit_is_left_out(tmp_path: Path) -> None:
    a, b = _write_results(tmp_path / "a"), _write_results(tmp_path / "b", alone=())
    for one, other in ((a, b), (b, a), (b, b)):
        assert [each.name for each in compare(one, other).ratios] == [
            *("pipeline: clips/min", "pipeline: first clip, s", "pipeline: step, s")
        ]
