"""A bench's configuration: YAML, overrides, refusals; its cases, clips and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from svdpp.bench import runner as module
from svdpp.bench.results import (
    DATA_PARALLEL,
    ONE_DEVICE,
    PIPELINE,
    costs_of,
    summary,
)
from svdpp.bench.runner import (
    Bench,
    BenchConfig,
    Round,
    cases_of,
    differing,
    read_config,
    shipped,
)
from svdpp.cli.bench import pipeline_config
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.machine import median_costs
from svdpp.driver.trace import Trace
from svdpp.errors import InputError, OutOfMemoryError, RequestError
from svdpp.launch import gpus
from svdpp.launch.world import World
from svdpp.plan.layout import Layout
from svdpp.worker.messages import ActionDone, StepDone, TransferDone
from tests.bench.made_up_benches import bench_of, config_of, round_of


def _file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_what_is_shipped_is_valid(name: str) -> None:
    point = read_config(name, [])
    assert point.experiment == name
    assert shipped() == ["smoke", "svd-xt", "wan-a14b"]


def test_an_empty_file_has_every_default_and_the_files_name(tmp_path: Path) -> None:
    point = read_config(_file(tmp_path, "workload:\n  # clips: 3\n"), [])
    assert point == BenchConfig(experiment="mine")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("pipeline.wrold", "did you mean pipeline.world?"),
        ("pipelin.world", "did you mean pipeline?"),
        ("world", "did you mean pipeline.world?"),
        ("workload.seeds", "did you mean measure.seeds?"),
        ("zzz", "known: experiment, "),
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
        ("pipeline.world=true", "pipeline.world must be a whole number, got True"),
        ("pipeline.world=0", "pipeline.world must be 1 or more, got 0"),
        ("precision=fp8", "precision must be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
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


@pytest.mark.parametrize("text", ["a: [", "- 1", "just words", "\x00", "!!python/object:os.x {}"])
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


@pytest.mark.parametrize("is_on", [True, False])
def test_fields_are_those_of_a_run(is_on: bool) -> None:
    fields = ("model.channels_last", "pipeline.deterministic", "pipeline.allow_mixed_devices")
    config = pipeline_config(read_config("smoke", [f"{field}=true" for field in fields if is_on]))
    found = config.model.channels_last, config.deterministic, config.allow_mixed_devices
    assert found == (is_on,) * 3


def test_what_was_resolved_is_a_configuration_again(tmp_path: Path) -> None:
    point = read_config("smoke", ["pipeline.threads=null", "precision=null"])
    config = PipelineConfig(
        world_size=2,
        model=ModelConfig(name="demo", dtype="bf16"),
        sampling=SvdSampling(num_inference_steps=4, num_frames=8, decode_chunk_size=8),
        num_threads=3,
    )
    resolved = point.resolved(config)
    path = tmp_path / "again.yaml"
    path.write_text(resolved.to_yaml())

    assert (resolved.pipeline.threads, resolved.precision) == (3, "bf16")
    assert (resolved.workload.frames, resolved.workload.decode_chunk_size) == (8, 8)
    assert read_config(str(path), []) == resolved


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
    cases = cases_of(config_of(split="alternating", checksum=True))
    assert list(cases) == [PIPELINE, DATA_PARALLEL, ONE_DEVICE]
    assert str(cases[DATA_PARALLEL].layout) == "data parallel"
    assert (cases[DATA_PARALLEL].world_size, cases[DATA_PARALLEL].checksum) == (2, True)
    assert cases[ONE_DEVICE].world_size == 1
    assert list(cases_of(config_of(replicas=2))) == [PIPELINE, ONE_DEVICE]


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
    def measure(self: Bench, *_: object) -> Round:  # noqa: ARG001
        raise OutOfMemoryError("out of memory")

    monkeypatch.setattr(module.Bench, "_measure", measure)
    with pytest.raises(OutOfMemoryError):
        bench_of().run(print, print)


def test_bits_are_held_against_diffusers_own() -> None:
    rounds = [round_of(PIPELINE, 0), round_of(ONE_DEVICE, 0), round_of(PIPELINE, 1, sha256="bb")]
    assert differing(rounds[:2]) == []
    assert differing(rounds) == ["pipeline, round 2, clip 0"]
    rounds[0].sha256[0] = "aa", "cc"
    assert differing(rounds[:2]) == ["pipeline, round 1, clip 0"]


# --- the costs, of a bench and of `svdpp profile` -------------------------------------------------

TWO_HOSTS = World(rank=0, local_rank=0, size=4, local_size=2, num_hosts=2, launcher="torchrun")


def _config(world_size: int, device: str = "cpu") -> PipelineConfig:
    sampling = SvdSampling(num_inference_steps=world_size, num_frames=2)
    return replace(config_of(), world_size=world_size, sampling=sampling, device=device)


def _note(
    trace: Trace,
    step_seconds: Mapping[int, float],
    transfers: Mapping[tuple[int, int], float],
    *,
    clip: int = 0,
    encode_seconds: float = 0.25,
) -> Trace:
    """Adds a clip in which each rank does one step."""
    encode = ActionDone(action=f"ENCODE c{clip} @0", start=0.0, end=encode_seconds, waited=0.0)
    trace(0, encode)
    for rank, seconds in step_seconds.items():
        trace(rank, StepDone(clip=clip, step=rank, seconds=seconds))
        action = f"DENOISE c{clip} {rank}:{rank + 1}"
        trace(rank, ActionDone(action=action, start=1.0, end=1 + seconds, waited=0.0))
    for (source, target), seconds in transfers.items():
        about = {"clip": clip, "next_step": 1, "num_bytes": 77, "end": 9.0}
        trace(target, TransferDone(direction="recv", peer=source, seconds=seconds, **about))
        trace(source, TransferDone(direction="send", peer=target, seconds=5.0, **about))
    return trace


@pytest.mark.parametrize(
    ("device", "steps", "costs"),
    [
        ("cuda", (1.0, 1.05, 1.02), 1.02),  # the same GPUs: one number
        ("cuda", (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)),
        ("cpu", (1.0, 2.0, 1.1), 1.1),  # one processor: noise
    ],
)
def test_ranks_are_told_apart_where_gpus_differ(
    device: str, steps: tuple[float, ...], costs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    trace = _note(Trace(3), dict(enumerate(steps)), {})
    found = median_costs(_config(3, device), None, [trace], source="")
    assert found.step_seconds == pytest.approx(costs)


def test_the_first_clip_warms_up_and_does_not_count() -> None:
    trace = Trace(2, first_clip=1)
    for clip, transfer in enumerate((1.0, 0.1, 0.1)):
        took = 10.0 - clip
        _note(trace, {1: took}, {(0, 1): transfer}, clip=clip, encode_seconds=took)
    costs = median_costs(_config(2), None, [trace], source="a test")
    assert (costs.step_seconds, costs.encode_seconds) == (8.5, 8.5)
    assert costs.transfer_seconds == pytest.approx(0.1)
    assert (costs.name, costs.source) == ("dummy fp32, 2 frames of 1024x576", "a test")


def test_a_bench_has_the_medians_of_its_rounds() -> None:
    one = bench_of()
    for seconds in (1.0, 9.0, 2.0):
        trace = _note(Trace(2), {0: seconds, 1: seconds}, {(0, 1): seconds / 10})
        one.rounds.append(replace(round_of(PIPELINE, 0), trace=trace))
    costs = costs_of(one, "run")
    assert (costs.step_seconds, costs.transfer_seconds) == (2.0, pytest.approx(0.2))
    assert (costs.encode_seconds, costs.decode_seconds) == (0.25, 0.0)
    assert costs.source == "measured by: svdpp bench, smoke/run"


def test_a_slow_host_gets_fewer_steps() -> None:
    """Ranks on different hosts get separate costs, and so do their transfers."""
    steps = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    trace = _note(Trace(4), steps, {(0, 1): 0.1, (1, 2): 0.5, (2, 3): 0.1})
    costs = median_costs(_config(4), TWO_HOSTS, [trace], source="")
    assert costs.step_seconds == (1.0, 1.0, 3.0, 3.0)
    assert costs.ranks_per_host == 2
    assert (costs.transfer_seconds, costs.inter_host_transfer_seconds) == pytest.approx((0.1, 0.5))
    shares = Layout(num_steps=28, world_size=4, split="balanced", costs=costs).all_shares
    sizes = [share.end - share.start for share in shares]
    assert sum(sizes) == 28
    assert max(sizes[2:]) < min(sizes[:2])


def test_a_step_of_a_pair_and_a_part_of_a_decode_count_as_whole_ones() -> None:
    config = replace(_config(2), cfg_parallel=2)
    trace = _note(Trace(2), {0: 1.0, 1: 1.0}, {(0, 1): 0.1})
    trace(1, ActionDone(action="DECODE c0 @2 8:16/16", start=5.0, end=6.0, waited=0.0))
    costs = median_costs(config, None, [trace], source="")
    assert (costs.step_seconds, costs.decode_seconds) == (pytest.approx(1.8), 2.0)
