"""Ranks that run ranges of Wan's steps give the bits of diffusers' whole `__call__`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from transformers import TokenizersBackend

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ModelError, NotFiniteError, RequestError
from tests.models.builders import edit_json
from tests.models.range_checks import (
    nothing,
    ranks,
    read_folder,
    request_of,
)
from tests.models.tiny_families import WAN_UNIPC, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4

T2V = {"boundary_ratio": 0.875}
I2V = {"boundary_ratio": 0.9, "image_to_video": True}
I2V_CLIP = {"image_encoder": True, "image_to_video": True}
WAN_5B = {"expand_timesteps": True}
BF16 = {"dtype": torch.bfloat16}

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves each tiny checkpoint once."""
    folders: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in folders:
            folders[key] = save_tiny_wan(tmp_path_factory.mktemp("wan"), **options)
        return folders[key]

    return folder


@pytest.fixture
def copy(save: Save, tmp_path: Path) -> Save:
    return lambda **options: Path(shutil.copytree(save(**options), tmp_path / "wan"))


def sampling_of(side: int = 32, **changes: Any) -> WanSampling:
    sizes = {"height": side, "width": side, "num_frames": 5, "max_sequence_length": 8}
    return WanSampling(**{**sizes, "num_inference_steps": STEPS, **changes})


NO_GUIDANCE = {"guidance_scale": 1.0}


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["file", "shards"])
def test_weights_are_mapped_and_the_other_expert_is_not_opened(
    copy: Save, options: dict[str, Any]
) -> None:
    folder = copy(**T2V, **options)
    rank_for = ranks(read_folder(folder), sampling_of())
    models = [rank_for(0, 0), rank_for(STEPS - 1, STEPS)]
    maps = Path("/proc/self/maps").read_text()
    mapped = {path for path in folder.glob("*/*.safetensors") if str(path) in maps}
    parts = ("text_encoder", "transformer_2")
    assert mapped == {path for part in parts for path in (folder / part).glob("*.safetensors")}
    assert len(list((folder / "transformer_2").glob("*.safetensors"))) > bool(options)
    del models


def test_a_missing_shard_is_named_before_a_rank_starts(copy: Save) -> None:
    folder = copy(**T2V, max_shard_size="20KB")
    shard = max((folder / "transformer_2").glob("*.safetensors"))
    shard.unlink()
    model = ModelConfig(name=str(folder))
    with pytest.raises(ModelError, match=r"transformer_2/.*: 1 of 3 shards miss"):
        Pipeline(PipelineConfig(world_size=2, model=model, sampling=sampling_of()))


def test_frames_that_are_not_finite_are_an_error(save: Save) -> None:
    rank_for = ranks(read_folder(save(**T2V)), sampling_of())
    packet = rank_for(0, 0).encode({}, request_of())
    packet = rank_for(0, 2).denoise(packet, 0, 2, nothing)
    packet = rank_for(2, STEPS).denoise(packet, 2, STEPS, nothing)
    packet["latents"][:] = torch.nan
    with pytest.raises(NotFiniteError, match="VAE"):
        rank_for(STEPS, STEPS).decode(packet)


def test_a_fast_tokenizer_saved_by_transformers_5_is_loaded(save: Save, tmp_path: Path) -> None:
    folder = save(**T2V)
    tokenizer = TokenizersBackend.from_pretrained(folder / "tokenizer")
    pipe = diffusers.WanPipeline.from_pretrained(folder, tokenizer=tokenizer)
    pipe.save_pretrained(tmp_path)
    assert "TokenizersBackend" in (tmp_path / "model_index.json").read_text()
    ours, other = (ranks(read_folder(each), sampling_of())(0, 0) for each in (tmp_path, folder))
    packet, expected = (each.encode({}, request_of()) for each in (ours, other))
    assert packet.keys() == expected.keys()
    assert all(torch.equal(packet[name], tensor) for name, tensor in expected.items())


def test_each_distinct_prompt_is_encoded_once(save: Save) -> None:
    model = ranks(read_folder(save(**T2V)), sampling_of())(0, 0)
    texts: list[int] = []
    model._pipe.text_encoder.register_forward_hook(lambda *_: texts.append(1))
    first = model.encode({}, request_of(prompt="the sea"))
    second = model.encode({}, request_of(prompt="the sea", seed=4))
    other = model.with_sampling(sampling_of(num_frames=9)).encode({}, request_of(prompt="a cat"))
    assert len(texts) == 3  # two prompts, and the empty negative one
    assert torch.equal(first["record.0.0"], second["record.0.0"])
    assert not torch.equal(first["record.0.0"], other["record.0.0"])
    assert not torch.equal(first["latents"], second["latents"])
    assert model.with_sampling(sampling_of(num_frames=9)).frames_shape == (9, 32, 32, 3)


def test_the_end_of_a_long_prompt_is_named(save: Save) -> None:
    sampling = sampling_of(max_sequence_length=16)
    model = ranks(read_folder(save(**T2V)), sampling)(0, 0)
    assert model.removed_text("the sea") == ""
    assert model.removed_text("the sea at night " * 8).endswith("sea at night")


def test_boundary_of_the_published_model(save: Save) -> None:
    checkpoint = read_folder(save(**T2V))
    shifts = {
        shift: checkpoint.expert_boundary(sampling_of(num_inference_steps=40, flow_shift=shift))
        for shift in (3.0, 12.0)
    }
    assert shifts == {3.0: 13, 12.0: 26}


def test_steps_of_an_expert_that_is_not_loaded_are_an_error(save: Save) -> None:
    rank_for = ranks(read_folder(save(**T2V)), sampling_of())
    packet = rank_for(0, 0).encode({}, request_of())
    with pytest.raises(ValueError, match="step 0 needs transformer, which is not loaded"):
        rank_for(STEPS - 1, STEPS).denoise(packet, 0, 1, nothing)
    with pytest.raises(ValueError, match="step 2 needs transformer_2"):
        rank_for(0, 1).denoise(packet, 0, STEPS, nothing)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"num_frames": 80}, "--frames must be a multiple of 4 plus 1, got 80", "77"),
        ({"num_frames": 0}, "--frames must be 1 to 1024, got 0", ""),
        ({"height": 40}, "--height must be a multiple of 16 .*, got 40", "48"),
        ({"width": 8}, "--width must be a multiple of 16 .*, got 8", "--width 16"),
        ({"guidance_scale": 1.0, "guidance_scale_2": 2.0}, "has no effect", ""),
        ({"decode_chunk_size": 2}, "decodes all frames", ""),
        ({"flow_shift": 0.0}, "--param flow_shift must be above 0", ""),
    ],
)
def test_wrong_requests_are_refused(
    save: Save, changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_folder(save(**T2V)).resolve(sampling_of(**changes))
    assert hint in error.value.hint


@pytest.mark.parametrize("from_image", [True, False])
def test_two_first_steps_at_one_timestep_are_refused(save: Save, from_image: bool) -> None:
    checkpoint = read_folder(save(**WAN_5B))
    plain = UniPCMultistepScheduler(**WAN_UNIPC)
    plain.set_timesteps(500, device="cpu")
    assert plain.timesteps[0] == plain.timesteps[1]
    for changes in ({"num_inference_steps": 500}, {"num_inference_steps": 40, "flow_shift": 60.0}):
        sampling = sampling_of(64, from_image=from_image, **changes)
        if from_image:
            with pytest.raises(RequestError, match="have the same timestep, 999"):
                checkpoint.resolve(sampling)
        else:  # this pipeline says where it begins
            assert checkpoint.resolve(sampling) == sampling


def test_requests_that_the_model_cannot_run_are_refused(save: Save) -> None:
    with pytest.raises(RequestError, match="two experts"):
        read_folder(save(**I2V_CLIP)).resolve(sampling_of(guidance_scale_2=2.0))
    with pytest.raises(RequestError, match=r"multiple of 32 .*, got 48"):
        read_folder(save(**WAN_5B)).resolve(sampling_of(48))
    with pytest.raises(RequestError, match="is of the family wan, not svd"):
        read_folder(save(**T2V)).resolve(SvdSampling())


@pytest.mark.parametrize(
    ("saved", "inputs", "message"),
    [
        (T2V, {"image": True, "prompt": "the sea"}, "takes no image"),
        (I2V, {"image": False, "prompt": "the sea"}, "needs an image"),
        (T2V, {"image": False, "prompt": None}, "needs a prompt"),
        (T2V, {"image": False, "prompt": " \n"}, "--prompt is empty"),
        (WAN_5B, {"image": True, "prompt": "the sea"}, "have from_image=False"),
    ],
)
def test_wrong_inputs_are_refused(
    save: Save, saved: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read_folder(save(**saved)).check_inputs(sampling_of(64), negative_prompt=None, **inputs)


def test_a_negative_prompt_without_guidance_is_refused(save: Save) -> None:
    checkpoint = read_folder(save(**T2V))
    inputs = {"image": False, "prompt": "the sea", "negative_prompt": "blurred"}
    checkpoint.check_inputs(sampling_of(), **inputs)
    with pytest.raises(RequestError, match="--negative-prompt has no effect"):
        checkpoint.check_inputs(sampling_of(**NO_GUIDANCE), **inputs)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("model_index.json", {"boundary_ratio": None}, "boundary_ratio is None"),
        ("model_index.json", {"boundary_ratio": 2.0}, "boundary_ratio is 2.0"),
        ("model_index.json", {"transformer_2": [None, None]}, "transformer_2 is missing"),
        ("model_index.json", {"transformer": [None, None]}, "transformer is missing"),
        ("model_index.json", {"_class_name": "WanOtherPipeline"}, "WanOtherPipeline"),
        ("model_index.json", {"scheduler": ["diffusers", "EulerScheduler"]}, "are proven with"),
        ("model_index.json", {"vae": ["diffusers", "UNet2DModel"]}, "vae is of class"),
        ("transformer/config.json", {"in_channels": 7}, "in_channels is 7, not 4 or 12"),
        ("transformer/config.json", {"num_layers": 10**6}, "num_layers"),
        ("transformer/config.json", {"pos_embed_seq_len": 514}, "a first and a last image"),
        ("text_encoder/config.json", {"quantization_config": {}}, "runs no code from a checkpoint"),
        ("vae/config.json", {"auto_map": {"AutoModel": "x.y"}}, "runs no code from a checkpoint"),
        ("scheduler/scheduler_config.json", {"use_beta_sigmas": True}, "needs scipy"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "dynamic_shifting"),
        ("scheduler/scheduler_config.json", {"solver_p": {"a": 1}}, "solver_p"),
    ],
)
def test_wrong_configs_are_refused(
    copy: Save, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = copy(**T2V)
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError, match=message) as error:
        read_folder(folder)
    assert f": {file}: " in error.value.message or ": scheduler/" in error.value.message


def test_the_solver_order_decides_how_much_history_travels(save: Save) -> None:
    rank_for = ranks(read_folder(save(**T2V)), sampling_of())
    assert WAN_UNIPC["solver_order"] == 2
    packets = [rank_for(0, 0).encode({}, request_of())]
    for step in range(STEPS):
        packets.append(rank_for(step, step + 1).denoise(packets[-1], step, step + 1, nothing))
    counts = [
        sum(name.startswith("scheduler.model_outputs") for name in packet) for packet in packets
    ]
    assert counts == [0, 1, 2, 2, 2]
