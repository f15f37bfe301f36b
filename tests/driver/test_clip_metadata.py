"""Metadata of clips, which identify the model by its weights, not only by its folder's name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from svdpp.config import Lora, ModelConfig, OutputConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.config.pipeline import latents_key, parameters_sha256
from svdpp.driver import clip_metadata as metadata_module
from svdpp.driver.clip_metadata import (
    check_clip_metadata,
    clip_metadata,
    recorded_sampling,
    weights_identity,
)
from svdpp.errors import InputError, RequestError
from svdpp.media.images import read_image
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import find_checkpoint
from svdpp.serve.request_schema import Capabilities
from tests.support.builders import save_tiny_checkpoint, save_tiny_lora
from tests.support.shell import PHOTO, assert_error, svdpp_here
from tests.support.tiny_families import save_tiny_wan

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "ckpt")


def _record(name: str, out: Path, *, fps: float = 7, **model: Any) -> dict[str, Any]:
    size = {"height": 32, "width": 32, "num_frames": 2, "decode_chunk_size": 2}
    sampling = SvdSampling(num_inference_steps=2, fps=fps, **size)
    config = PipelineConfig(world_size=2, model=ModelConfig(name=name, **model), sampling=sampling)
    _, media_file = read_image(Path(PHOTO))
    output = OutputConfig(path=str(out / "rocket_0.mp4"))
    return clip_metadata(ClipInput(media_file), 0, output, config, find_checkpoint(config.model))


def test_the_json_of_a_clip_has_whole_frames_per_second_as_an_integer(tmp_path: Path) -> None:
    """Whole frames per second are written as an integer.

    The text of the number is hashed in `parameters_sha256`, and clips of earlier versions have an
    integer.
    """
    of_video = {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64}
    records = [_record("demo", tmp_path, fps=fps) | of_video for fps in (24, 24.0, 23.976)]
    read = [check_clip_metadata(json.loads(json.dumps(each)), "x") for each in records]
    assert [repr(each["fps"]) for each in records] == ["24", "24", "23.976"]
    assert [repr(each["fps"]) for each in read] == ["24", "24", "23.976"]
    assert [repr(recorded_sampling(each).fps) for each in read] == ["24", "24", "23.976"]
    written = [each["parameters_sha256"] for each in records]
    assert written == [*map(parameters_sha256, read)]
    assert len(set(written)) == 2
    for wrong in ("24", True, None, float("inf"), float("nan")):
        with pytest.raises((InputError, RequestError)):
            recorded_sampling(check_clip_metadata({**records[0], "fps": wrong}, "x"))


def _change_weight(folder: Path) -> None:
    """Change one number in a tensor of the UNet of the checkpoint in `folder`."""
    tensors = load_file(folder / UNET)
    moved = tensors["conv_in.weight"].view(-1)
    moved[len(moved) // 2] += 1
    save_file(tensors, folder / UNET, metadata={"format": "pt"})


def test_a_folder_is_recorded_as_where_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [_record(name, tmp_path) for name in ("ckpt", "./ckpt/", str(folder))]
    assert {record["model"] for record in records} == {str(folder)}
    assert len({record["parameters_sha256"] for record in records}) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = _record("ckpt", tmp_path)
    assert at_home["model"] == "~/ckpt"
    assert str(tmp_path) not in json.dumps(at_home)
    record = _record("demo", tmp_path)
    assert (record["model"], record["revision"]) == ("demo", None)
    assert record["weights_fingerprint"] is None


def test_another_order_in_memory_is_another_clip(folder: Path, tmp_path: Path) -> None:
    weights = weights_identity(find_checkpoint(ModelConfig(name=str(folder))))
    records = [_record(str(folder), tmp_path, channels_last=on) for on in (False, True)]
    assert len(set(map(parameters_sha256, records))) == 2
    assert len({latents_key(record, weights) for record in records}) == 2


def test_another_attention_backend_is_another_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips with different attention backends have different hashes.

    Without a backend, the JSON has no key for it, as in earlier versions.
    """
    monkeypatch.setattr(metadata_module, "version", lambda package: f"version of {package}")
    checkpoint = find_checkpoint(ModelConfig(name=str(save_tiny_wan(tmp_path / "wan"))))
    output = OutputConfig(path=str(tmp_path / "a.mp4"))
    records = []
    for name in (None, "native", "sage"):
        model = ModelConfig(name=checkpoint.name, attention_backend=name)
        config = PipelineConfig(world_size=2, model=model, sampling=WanSampling())
        inputs = ClipInput(None, "a cat", None)
        records.append(clip_metadata(inputs, 0, output, config, checkpoint))
    assert "attention_backend" not in records[0]
    assert [each["attention_backend"] for each in records[1:]] == ["native", "sage"]
    assert len(set(map(parameters_sha256, records))) == 3
    assert len({latents_key(record, weights_identity(checkpoint)) for record in records}) == 3
    assert records[2]["versions"]["sageattention"] == "version of sageattention"
    assert "sageattention" not in records[1]["versions"]
    hashes = {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64}
    read = [check_clip_metadata({**record, **hashes}, "x") for record in records]
    assert [parameters_sha256(each) for each in read] == [*map(parameters_sha256, records)]


@pytest.mark.slow
def test_servers_with_other_loras_are_told_apart(tmp_path: Path) -> None:
    model = save_tiny_wan(tmp_path / "wan")
    files = [save_tiny_lora(model, tmp_path / f"{n}.safetensors", seed=n) for n in (1, 2)]
    first, second = (Lora(name=str(file)) for file in files)
    weights = set()
    for loras in ((), (first,), (second,), (replace(first, weight=0.5),)):
        checkpoint = find_checkpoint(ModelConfig(name=str(model), loras=loras))
        asked = Capabilities.of("wan", checkpoint, sampling=WanSampling(), sizes=())
        weights.add(asked.weights)
    assert len(weights) == 4


def test_verify_finds_the_folder_and_notices_other_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` finds the model's folder from any working directory, and refuses changed weights.

    It refuses changed weights before it computes anything.
    """
    monkeypatch.chdir(tmp_path)
    record = _record("ckpt", tmp_path)
    path = tmp_path / "rocket_0.json"
    path.write_text(json.dumps({**record, "latents_sha256": "0" * 64, "frames_sha256": "0" * 64}))
    _change_weight(folder)
    replaced = _record("ckpt", tmp_path)
    assert replaced["parameters_sha256"] != record["parameters_sha256"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    answer = svdpp_here("verify", str(path))
    assert_error(answer, 5, "have changed since 'rocket_0.mp4' was made", "--overwrite")
    shutil.rmtree(folder)
    assert_error(svdpp_here("verify", str(path)), 5, "there is no folder")
