"""A bench's configuration: YAML, overrides, and errors for unknown keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from svdpp.bench.config import BenchConfig, read_config, shipped
from svdpp.cli.bench import pipeline_config
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.errors import InputError, RequestError


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
        ("pipelin.world", "did you mean pipeline.world?"),
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
        ("pipeline.world=[]", "pipeline.world must be a whole number, got []"),
        ("precision=fp8", "precision must be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        ("experiment=../up", "experiment must match ^[A-Za-z0-9_]"),
        ("measure.seeds=[]", "measure.seeds needs 1 or more values, got []"),
        ("model=demo", "model must be a section, got 'demo'"),
        ("model.name.x=1", "'name' is not a section"),
        ("pipeline.world", "an override is section.field=value, got 'pipeline.world'"),
        ("pipeline.world=[1", "the value is not YAML"),
        ("workload.clips=100001", "workload.clips must be 100000 or less, got 100001"),
        ("measure.repeats=1001", "measure.repeats must be 1000 or less, got 1001"),
        ("measure.warmups=1001", "measure.warmups must be 1000 or less, got 1001"),
        ("pipeline.timeout=true", "pipeline.timeout is refused: true and false are not numbers"),
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


def test_names_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a file") as caught:
        read_config("smok", [])
    assert caught.value.hint == "did you mean smoke?"
    with pytest.raises(InputError, match="cannot be read"):
        read_config(str(tmp_path / "absent.yaml"), [])


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
    assert resolved.sha256 == resolved.model_copy(update={"experiment": "other"}).sha256


def test_a_configuration_shows_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    point = read_config(
        "smoke", [f"model.name={tmp_path}/weights", f"workload.images=[{tmp_path}/a.jpg]"]
    )
    text = point.to_yaml()
    assert str(tmp_path) not in text
    assert yaml.safe_load(text)["model"]["name"] == "~/weights"


def test_aliases_that_stand_for_a_billion_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"is not YAML: alias \*a0: write the value out"):
        read_config(str(path), [])
    with pytest.raises(RequestError, match="the value is not YAML"):
        read_config("smoke", ["workload.clips=[&a 1, *a]"])


def test_a_pipe_or_a_file_without_end_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="is not a regular file"):
        read_config(str(tmp_path / "pipe.yaml"), [])
    (tmp_path / "large.yaml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match="is larger than 1000000 bytes"):
        read_config(str(tmp_path / "large.yaml"), [])
