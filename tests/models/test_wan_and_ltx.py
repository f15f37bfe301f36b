"""What Wan and LTX-Video load, keep between clips and refuse; test_rows.py has their bits."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from transformers import TokenizersBackend

from svdpp.config import LtxSampling, WanSampling
from svdpp.errors import ModelError, NotFiniteError, RequestError
from svdpp.models.engine import load
from svdpp.models.engine.families import ltx_generator_device
from tests.models.builders import edit_json
from tests.models.conftest import Save
from tests.models.range_checks import nothing, ranks, read_folder, request_of
from tests.models.tiny_families import WAN_UNIPC, save_tiny_ltx, save_tiny_wan
from tests.models.tiny_rows import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
T2V = partial(save_tiny_wan, boundary_ratio=0.875)
T2V_SHARDS = partial(T2V, max_shard_size="20KB")
I2V = partial(save_tiny_wan, boundary_ratio=0.9, image_to_video=True)
I2V_CLIP = partial(save_tiny_wan, image_encoder=True, image_to_video=True)
WAN_5B = partial(save_tiny_wan, expand_timesteps=True)
LTX = save_tiny_ltx
LTX_TIMESTEP = partial(save_tiny_ltx, timestep_conditioning=True)
HUNYUAN = partial(save_tiny, "hunyuan_video", image=True)
KANDINSKY = partial(save_tiny, "kandinsky5")


@pytest.fixture
def t2v(save: Save) -> Any:
    """The checkpoint of Wan with two experts."""
    return read_folder(save(T2V))


def wan(side: int = 32, **changes: Any) -> WanSampling:
    sizes = {"height": side, "width": side, "num_frames": 5, "max_sequence_length": 8}
    return WanSampling(**{**sizes, "num_inference_steps": STEPS, **changes})


def ltx(**changes: Any) -> LtxSampling:
    sizes = {"height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 8}
    return LtxSampling(**{**sizes, "num_inference_steps": STEPS, **changes})


@pytest.mark.parametrize("make", [T2V, T2V_SHARDS], ids=["file", "shards"])
def test_weights_are_mapped_and_the_other_expert_is_not_opened(
    save: Save, tmp_path: Path, make: Any
) -> None:
    folder = Path(shutil.copytree(save(make), tmp_path / "wan"))
    rank_for = ranks(read_folder(folder), wan())
    models = [rank_for(0, 0), rank_for(STEPS - 1, STEPS)]
    maps = Path("/proc/self/maps").read_text()
    mapped = {path for path in folder.glob("*/*.safetensors") if str(path) in maps}
    parts = ("text_encoder", "transformer_2")
    assert mapped == {path for part in parts for path in (folder / part).glob("*.safetensors")}
    assert len(list((folder / "transformer_2").glob("*.safetensors"))) > (make is T2V_SHARDS)
    del models


def test_frames_that_are_not_finite_are_an_error(t2v: Any) -> None:
    rank_for = ranks(t2v, wan())
    packet = rank_for(0, 0).encode({}, request_of())
    packet = rank_for(0, 2).denoise(packet, 0, 2, nothing)
    packet = rank_for(2, STEPS).denoise(packet, 2, STEPS, nothing)
    packet["latents"][:] = torch.nan
    with pytest.raises(NotFiniteError, match="VAE"):
        rank_for(STEPS, STEPS).decode(packet)


def test_a_fast_tokenizer_saved_by_transformers_5_is_loaded(save: Save, tmp_path: Path) -> None:
    folder = save(T2V)
    tokenizer = TokenizersBackend.from_pretrained(folder / "tokenizer")
    pipe = diffusers.WanPipeline.from_pretrained(folder, tokenizer=tokenizer)
    pipe.save_pretrained(tmp_path)
    assert "TokenizersBackend" in (tmp_path / "model_index.json").read_text()
    ours, other = (ranks(read_folder(each), wan())(0, 0) for each in (tmp_path, folder))
    packet, expected = (each.encode({}, request_of()) for each in (ours, other))
    assert packet.keys() == expected.keys()
    assert all(torch.equal(packet[name], tensor) for name, tensor in expected.items())


def test_a_missing_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LTX(tmp_path)
    rank_for = ranks(read_folder(folder), ltx())
    (folder / "tokenizer/tokenizer.json").rename(folder / "tokenizer/spiece.model")
    monkeypatch.setattr(load, "is_sentencepiece_available", lambda: False)
    with pytest.raises(ModelError, match="needs the packages") as error:
        rank_for(0, 0)
    assert error.value.hint == "pip install sentencepiece protobuf"
    (folder / "tokenizer/spiece.model").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        rank_for(0, 0)


def test_each_distinct_prompt_is_encoded_once(t2v: Any) -> None:
    model = ranks(t2v, wan())(0, 0)
    texts: list[int] = []
    model._pipe.text_encoder.register_forward_hook(lambda *_: texts.append(1))
    first = model.encode({}, request_of(prompt="the sea"))
    second = model.encode({}, request_of(prompt="the sea", seed=4))
    other = model.with_sampling(wan(num_frames=9)).encode({}, request_of(prompt="a cat"))
    assert len(texts) == 3  # two prompts, and the empty negative one
    assert torch.equal(first["record.0.0"], second["record.0.0"])
    assert not torch.equal(first["record.0.0"], other["record.0.0"])
    assert not torch.equal(first["latents"], second["latents"])


def test_the_end_of_a_long_prompt_is_named(t2v: Any) -> None:
    model = ranks(t2v, wan(max_sequence_length=16))(0, 0)
    assert model.removed_text("the sea") == ""
    assert model.removed_text("the sea at night " * 8).endswith("sea at night")


def test_boundary_of_the_published_model(t2v: Any) -> None:
    for shift, boundary in ((3.0, 13), (12.0, 26)):
        assert t2v.expert_boundary(wan(num_inference_steps=40, flow_shift=shift)) == boundary


def test_steps_of_an_expert_that_is_not_loaded_are_an_error(t2v: Any) -> None:
    rank_for = ranks(t2v, wan())
    packet = rank_for(0, 0).encode({}, request_of())
    with pytest.raises(ValueError, match="step 0 needs transformer, which is not loaded"):
        rank_for(STEPS - 1, STEPS).denoise(packet, 0, 1, nothing)
    with pytest.raises(ValueError, match="step 2 needs transformer_2"):
        rank_for(0, 1).denoise(packet, 0, STEPS, nothing)


def test_an_image_and_a_timestep_need_a_generator_on_the_device(save: Save) -> None:
    conditioned, plain = read_folder(save(LTX_TIMESTEP)), read_folder(save(LTX))
    from_image, from_text = ltx(from_image=True), ltx()
    assert ltx_generator_device(conditioned, from_image, "cuda") == "cuda"
    assert ltx_generator_device(conditioned, from_text, "cuda") == "cpu"
    assert ltx_generator_device(plain, from_image, "cuda") == "cpu"


# What is refused.

UNGUIDED = {"guidance_scale": 1.0}


@pytest.mark.parametrize("from_image", [True, False])
def test_two_first_steps_at_one_timestep_are_refused(save: Save, from_image: bool) -> None:
    checkpoint = read_folder(save(WAN_5B))
    plain = UniPCMultistepScheduler(**WAN_UNIPC)
    plain.set_timesteps(500, device="cpu")
    assert plain.timesteps[0] == plain.timesteps[1]
    for changes in ({"num_inference_steps": 500}, {"num_inference_steps": 40, "flow_shift": 60.0}):
        sampling = wan(64, from_image=from_image, **changes)
        if from_image:
            with pytest.raises(RequestError, match="have the same timestep, 999"):
                checkpoint.resolve(sampling)
        else:  # this pipeline says where it begins
            assert checkpoint.resolve(sampling) == sampling


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (T2V, {"image": True}, "takes no image"),
        (I2V, {}, "needs an image"),
        (T2V, {"prompt": None}, "needs a prompt"),
        (T2V, {"prompt": " \n"}, "--prompt is empty"),
        (WAN_5B, {"image": True}, "have from_image=False"),
        (T2V, {"negative_prompt": "blurred"}, "--negative-prompt has no effect"),
    ],
)
def test_wrong_inputs_are_refused(
    save: Save, make: Any, inputs: dict[str, Any], message: str
) -> None:
    known = {"image": False, "prompt": "the sea", "negative_prompt": None, **inputs}
    checkpoint = read_folder(save(make))
    guidance = UNGUIDED if known["negative_prompt"] else {}
    with pytest.raises(RequestError, match=message):
        checkpoint.check_inputs(wan(64, **guidance), **known)
    if guidance:
        checkpoint.check_inputs(wan(64), **known)


INDEX, DENOISER = "model_index.json", "transformer/config.json"
SCHEDULER, NO_CODE = "scheduler/scheduler_config.json", "runs no code from a checkpoint"


@pytest.mark.parametrize(
    ("make", "file", "changes", "message"),
    [
        (T2V, INDEX, {"boundary_ratio": None}, "boundary_ratio is None"),
        (T2V, INDEX, {"boundary_ratio": 2.0}, "boundary_ratio is 2.0"),
        (T2V, INDEX, {"transformer_2": [None, None]}, "transformer_2 is missing"),
        (T2V, INDEX, {"scheduler": ["diffusers", "EulerScheduler"]}, "are proven with"),
        (T2V, DENOISER, {"num_layers": 10**6}, "num_layers"),
        (T2V, DENOISER, {"pos_embed_seq_len": 514}, "a first and a last image"),
        (T2V, "text_encoder/config.json", {"quantization_config": {}}, NO_CODE),
        (T2V, "vae/config.json", {"auto_map": {"AutoModel": "x.y"}}, NO_CODE),
        (T2V, SCHEDULER, {"use_beta_sigmas": True}, "needs scipy"),
        (T2V, SCHEDULER, {"solver_p": {"a": 1}}, "solver_p"),
        (LTX, INDEX, {"_class_name": "LTXLatentUpsamplePipeline"}, "LTXLatentUpsamplePipeline"),
        (LTX, "vae/config.json", {"decoder_inject_noise": [True]}, "global generator"),
        (LTX, SCHEDULER, {"stochastic_sampling": True}, "global generator"),
        (HUNYUAN, DENOISER, {"image_condition_type": "latent_concat"}, "first four frames"),
        (KANDINSKY, DENOISER, {"attention_type": "nabla"}, "sparse attention"),
    ],
)
def test_wrong_configs_are_refused(
    save: Save, tmp_path: Path, make: Any, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(save(make), tmp_path / "copy"))
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError, match=message) as error:
        read_folder(folder)
    assert f": {file}: " in error.value.message or ": scheduler/" in error.value.message
