"""Ranks that run ranges of LTX-Video's steps give the bits of diffusers' whole `__call__`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import LtxSampling
from svdpp.errors import ModelError, RequestError
from svdpp.models.base import GENERATOR
from svdpp.models.engine import load
from svdpp.models.engine.ltx import generator_device
from tests.models.builders import edit_json
from tests.models.range_checks import (
    loaded,
    nothing,
    ranks,
    read_folder,
    request_of,
)
from tests.models.tiny_families import save_tiny_ltx

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4

TIMESTEP = {"timestep_conditioning": True}

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves each tiny checkpoint once."""
    folders: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        if repr(options) not in folders:
            folders[repr(options)] = save_tiny_ltx(tmp_path_factory.mktemp("ltx"), **options)
        return folders[repr(options)]

    return folder


def sampling_of(**changes: Any) -> LtxSampling:
    sizes = {"height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 8}
    return LtxSampling(**{**sizes, "num_inference_steps": STEPS, **changes})


def test_a_rank_holds_only_what_it_runs(save: Save) -> None:
    rank_for = ranks(read_folder(save()), sampling_of())
    ends = ((0, 0), (0, 1), (STEPS, STEPS))
    found = [{*loaded(rank_for(*each))} for each in ends]
    assert found == [{"text_encoder"}, {"transformer"}, {"vae"}]


def test_the_noise_of_the_decoder_is_that_of_the_packet(save: Save) -> None:
    sampling = sampling_of(decode_timestep=0.05, decode_noise_scale=0.5)
    rank_for = ranks(read_folder(save(**TIMESTEP)), sampling)
    packet = rank_for(0, 0).encode({}, request_of())
    packet = rank_for(0, STEPS).denoise(packet, 0, STEPS, nothing)
    frames = rank_for(STEPS, STEPS).decode(packet)
    assert torch.equal(rank_for(STEPS, STEPS).decode(packet), frames)
    other = {**packet, f"{GENERATOR}.0": torch.Generator().manual_seed(9).get_state()}
    assert not torch.equal(rank_for(STEPS, STEPS).decode(other), frames)


def test_an_image_and_a_timestep_need_a_generator_on_the_device(save: Save) -> None:
    conditioned, plain = read_folder(save(**TIMESTEP)), read_folder(save())
    from_image, from_text = sampling_of(from_image=True), sampling_of()
    assert generator_device(conditioned, from_image, "cuda") == "cuda"
    assert generator_device(conditioned, from_text, "cuda") == "cpu"
    assert generator_device(plain, from_image, "cuda") == "cpu"


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"num_frames": 10}, "--frames must be a multiple of 8 plus 1, got 10", "17"),
        (
            {"height": 80},
            "--height must be a multiple of 32 .*, got 80",
            "64 or 96",
        ),
        ({"num_inference_steps": 1}, "--steps must be 2 or more", ""),
        ({"decode_timestep": 0.1}, "--param decode_timestep has no effect", ""),
        ({"decode_noise_scale": 0.1}, "--param decode_noise_scale has no effect", ""),
        (
            {"guidance_scale": 1.0, "guidance_rescale": 0.5},
            "--param guidance_rescale has no effect",
            "",
        ),
    ],
)
def test_wrong_requests_are_refused(
    save: Save, changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_folder(save()).resolve(sampling_of(**changes))
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "LTXLatentUpsamplePipeline"},
            "LTXLatentUpsamplePipeline",
        ),
        ("model_index.json", {"scheduler": ["diffusers", "UniPCMultistepScheduler"]}, "scheduler"),
        ("model_index.json", {"text_encoder": [None, None]}, "text_encoder is missing"),
        ("vae/config.json", {"decoder_inject_noise": [True]}, "global generator"),
        ("vae/config.json", {"spatio_temporal_scaling": 3}, "not a list"),
        ("transformer/config.json", {"patch_size": 2}, "patch_size is 2 but must be 1"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "global generator"),
    ],
)
def test_wrong_configs_are_refused(
    save: Save, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(save(), tmp_path / "ltx"))
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError, match=message):
        read_folder(folder)


def test_a_missing_tokenizer_is_named(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(save(), tmp_path / "ltx"))
    rank_for = ranks(read_folder(folder), sampling_of())
    (folder / "tokenizer/tokenizer.json").rename(folder / "tokenizer/spiece.model")
    monkeypatch.setattr(load, "is_sentencepiece_available", lambda: False)
    with pytest.raises(ModelError, match="needs the packages") as error:
        rank_for(0, 0)
    assert error.value.hint == "pip install sentencepiece protobuf"
    (folder / "tokenizer/spiece.model").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        rank_for(0, 0)
