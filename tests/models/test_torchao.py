"""Ranks with denoisers that TorchAO quantised to int8 give the bits of diffusers' `__call__`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from svdpp.config import ClipRequest, Denoiser, Lora, ModelConfig, PipelineConfig
from svdpp.driver.clip_metadata import _versions_of_extras
from svdpp.driver.resolve import _are_shared
from svdpp.errors import ModelError, RequestError
from svdpp.models import memory
from svdpp.models.checkpoint import find_checkpoint
from svdpp.plan.roles import Roles
from svdpp.serve.request_schema import Capabilities
from tests.models.test_registry import TinyModels
from tests.support.family_case import STEPS, Case, size
from tests.support.range_checks import (
    TinyModel,
    check_every_cut,
    loaded,
    ranks,
    whole_clip,
)
from tests.support.tiny_families import CASES, FIRST, chosen, save_tiny

torchao = pytest.importorskip("torchao.quantization")

pytestmark = pytest.mark.usefixtures("one_thread")

REQUEST = ClipRequest(seed=3, prompt="a cat")
CASE = Case("wan", size(32, 32, 5))
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CONFIG = "transformer/config.json"
LAYER = "blocks.0.attn1.to_q.weight"


def quantise(
    source: Path, folder: Path, *parts: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Copy a checkpoint to `folder`, and quantise its denoisers `parts` there with diffusers."""
    shutil.copytree(source, folder)
    for part in parts:
        name = json.loads((source / part / "config.json").read_text())["_class_name"]
        config = diffusers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
        cls = getattr(diffusers, name)
        module = cls.from_pretrained(source / part, quantization_config=config, dtype=dtype)
        shutil.rmtree(folder / part)
        module.save_pretrained(folder / part, **options)
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny Wan with two experts, not quantised."""
    return save_tiny("wan", tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)


@pytest.fixture(scope="session")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny Wan whose first expert is quantised to int8, from bf16."""
    folder = tmp_path_factory.mktemp("int8") / "wan"
    return quantise(plain, folder, "transformer", dtype=torch.bfloat16)


@pytest.fixture
def folder(quantised: Path, tmp_path: Path) -> Path:
    """Copy of the quantised checkpoint, which a test may change."""
    return Path(shutil.copytree(quantised, tmp_path / "wan"))


def bf16(folder: Path, **more: Any) -> ModelConfig:
    return ModelConfig(name=str(folder), dtype="bf16", **more)


def sampling_of(model: ModelConfig) -> Any:
    return find_checkpoint(model, weights=False).resolve_sampling(CASE.config())


@pytest.mark.slow
def test_every_cut_gives_the_bits_of_diffusers_with_the_same_checkpoint(
    plain: Path, quantised: Path
) -> None:
    model = bf16(quantised)
    checkpoint, sampling = find_checkpoint(model), sampling_of(model)
    assert checkpoint.int8_denoisers == ("transformer",)
    expected = whole_clip(model, sampling, REQUEST, None)
    rank_for = ranks(checkpoint, sampling, model=model)
    check_every_cut(rank_for, STEPS, expected, REQUEST, None)
    first, last = (loaded(rank_for(step, step + 1)) for step in (0, STEPS - 1))
    layers = first["transformer"].blocks[0].attn1, last["transformer_2"].blocks[0].attn1  # type: ignore[index, union-attr]
    assert [type(each.to_q.weight) for each in layers] == [torchao.Int8Tensor, torch.nn.Parameter]
    other = whole_clip(bf16(plain), sampling, REQUEST, None)
    assert not torch.equal(other[0][0], expected[0][0])


@pytest.mark.parametrize("name", chosen((), ("wan-modular",), FIRST.values()))
def test_every_cut_of_every_family_with_an_int8_denoiser(
    tiny_models: TinyModels, tmp_path: Path, name: str
) -> None:
    tiny, case = tiny_models(name), CASES[name]
    denoisers = {*tiny.checkpoint.spec.denoisers} & {*tiny.checkpoint.weighted_components}
    folder = quantise(tiny.checkpoint.folder, tmp_path / "int8", *denoisers)
    model = ModelConfig(name=str(folder), family=tiny.checkpoint.family)
    int8 = TinyModel(find_checkpoint(model), tiny.sampling, model, tiny.source)
    assert {*int8.checkpoint.int8_denoisers} == denoisers
    request = tiny.request(negative_prompt=case.negative)
    expected = whole_clip(model, tiny.sampling, request, tiny.source)
    check_every_cut(int8.rank_for, int8.steps, expected, request, tiny.source)
    other = whole_clip(tiny.model, tiny.sampling, request, tiny.source)
    assert not np.array_equal(other[1], expected[1])


def test_shards_may_divide_a_weight(plain: Path, quantised: Path, tmp_path: Path) -> None:
    folder = quantise(
        plain, tmp_path / "x", "transformer", dtype=torch.bfloat16, max_shard_size="1KB"
    )
    models = [bf16(each) for each in (quantised, folder)]
    one, shards = (
        loaded(ranks(find_checkpoint(model), sampling_of(model), model=model)(0, 1))["transformer"]
        for model in models
    )
    tensors = zip(memory._weights(one), memory._weights(shards), strict=True)
    assert all(torch.equal(*pair) for pair in tensors)
    keys = {
        Capabilities.of("wan", find_checkpoint(model), sampling=CASE.config(), sizes=()).model_key
        for model in (*models, bf16(plain))
    }
    assert len(keys) == 3


@pytest.mark.slow
def test_its_memory_is_that_of_its_bytes_and_of_layers_that_are_cast(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny = tiny_models("ltx")
    folder = quantise(tiny.checkpoint.folder, tmp_path / "int8", "transformer")
    model = ModelConfig(name=str(folder))
    checkpoint = find_checkpoint(model)
    (module,) = loaded(ranks(checkpoint, tiny.sampling, model=model)(0, 1)).values()
    ours, plain = (
        memory.estimate(each, ModelConfig(name=each.name), tiny.sampling, device="cpu").denoise
        for each in (checkpoint, tiny.checkpoint)
    )
    assert ours.weight_bytes == sum(each.nbytes for each in memory._weights(module))
    assert ours.weight_bytes < plain.weight_bytes / 2
    assert ours.activation_bytes > plain.activation_bytes


def test_ranks_share_the_pages_of_its_file_and_clips_name_the_version_of_torchao(
    plain: Path, quantised: Path
) -> None:
    model, denoise = bf16(quantised), Roles(denoise=True)
    checkpoint, sampling = find_checkpoint(model), sampling_of(model)
    config = PipelineConfig(world_size=1, model=model, sampling=sampling)
    (module,) = loaded(ranks(checkpoint, sampling, model=model)(0, 1)).values()
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    pages = [
        range(*(int(end, 16) for end in line[0].split("-")))
        for line in mapped
        if line[-1] == str(quantised / WEIGHTS)
    ]
    buffers = {each.data_ptr() for each in module.buffers()}
    for tensor in memory._weights(module):
        assert tensor.data_ptr() in buffers or any(tensor.data_ptr() in each for each in pages)
    assert _are_shared(config, checkpoint, denoise)
    other = find_checkpoint(bf16(plain))
    assert not _are_shared(config, other, denoise)  # the file of `plain` is in float32
    assert _versions_of_extras(config, checkpoint, ()) == {"torchao": version("torchao")}
    assert _versions_of_extras(config, other, ()) == {}


# --- refusals ------------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, Any], dict[str, str]], None]) -> Callable[[Path], None]:
    """Return a function that lets `change` edit a checkpoint's quantised weights and saves them."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, "pt") as file:
            metadata = file.metadata()
        change(tensors, metadata)
        save_file(tensors, folder / WEIGHTS, metadata)

    return write


def metadata_changed(**changes: Any) -> Callable[[Path], None]:
    """Return a function that edits the metadata of a quantised weight in a checkpoint."""

    def change(_: Any, metadata: dict[str, str]) -> None:
        entry = json.loads(metadata[LAYER])
        for name, value in changes.items():
            (entry if name.startswith("_") else entry["_data"])[name] = value
        metadata[LAYER] = json.dumps(entry)

    return rewritten(change)


def quantised_tensor_replaced(name: str, value: Any) -> Callable[[Path], None]:
    """Return a function that replaces a tensor in a quantised checkpoint. None removes it."""

    def change(tensors: dict[str, Any], _: Any) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return rewritten(change)


def int8(prefix: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}qdata": torch.ones(rows, columns, dtype=torch.int8),
        f"{prefix}scale": torch.ones(rows, 1),
        f"{prefix}zero_point": torch.zeros(rows, 1, dtype=torch.int8),
    }


def shrink_weight(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Replace a quantised weight by one with fewer columns, in tensors and metadata."""
    tensors |= int8("blocks.0.attn1.to_q._weight_", 24, 12)
    metadata[LAYER] = metadata[LAYER].replace("[1, 24]", "[1, 12]")


OTHER = f"'{LAYER}' is not a weight that Int8WeightOnlyConfig quantised"
QDATA = "blocks.0.attn1.to_q._weight_qdata"
DEFECTS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no metadata": (rewritten(lambda _, metadata: metadata.clear()), "not describe 'tensor_names'"),
    "no JSON": (
        rewritten(lambda _, metadata: metadata.update({LAYER: "["})),
        "not describe 'blocks",
    ),
    "another class": (metadata_changed(_type="Float8Tensor"), OTHER),
    "another dtype": (metadata_changed(dtype={"_type": "torch.dtype", "_data": "load"}), OTHER),
    "groups": (metadata_changed(block_size=[1, 8]), OTHER),
    "quantised activations": (
        metadata_changed(act_quant_kwargs={"_type": "x", "_data": {}}),
        OTHER,
    ),
    "further values": (metadata_changed(act_pre_scale=1), OTHER),
    "other tensors": (metadata_changed(_tensor_data_names=["qdata", "scale"]), OTHER),
    "missing numbers": (quantised_tensor_replaced(QDATA, None), OTHER),
    "other numbers": (quantised_tensor_replaced(QDATA, torch.ones(24, 24)), OTHER),
    "a missing tensor": (
        quantised_tensor_replaced("proj_out.bias", None),
        "'proj_out.bias' is missing",
    ),
    "a plain tensor of int8": (
        quantised_tensor_replaced("proj_out.bias", torch.ones(16, dtype=torch.int8)),
        "'proj_out.bias' is missing or is not floating-point",
    ),
    "an unknown tensor": (
        quantised_tensor_replaced("x", torch.ones(1)),
        "the metadata do not list 'x'",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_files_that_torchao_would_read_in_another_way_are_refused(
    folder: Path, defect: str
) -> None:
    change, words = DEFECTS[defect]
    change(folder)
    with pytest.raises(ModelError, match="transformer: ") as caught:
        find_checkpoint(bf16(folder))
    assert words in caught.value.message
    assert caught.value.details["component"] == "transformer"


def test_shards_of_different_checkpoints_are_refused(plain: Path, tmp_path: Path) -> None:
    options = {"dtype": torch.bfloat16, "max_shard_size": "1KB"}
    folder = quantise(plain, tmp_path / "x", "transformer", **options)
    shard = sorted((folder / "transformer").glob("*.safetensors"))[-1]
    save_file(load_file(shard), shard, {"format": "pt"})
    with pytest.raises(ModelError, match="differ from those of other shards"):
        find_checkpoint(bf16(folder))


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    """A quantised weight with a wrong shape is refused. diffusers would accept any shape."""
    rewritten(shrink_weight)(folder)
    model = bf16(folder)
    checkpoint, sampling = find_checkpoint(model), sampling_of(model)
    words = r"'blocks.0.attn1.to_q.weight' has the shape \[24, 12\], but .* \[24, 24\]"
    with pytest.raises(ModelError, match=words):
        ranks(checkpoint, sampling, model=model)(0, 1)


def test_a_quantised_tensor_of_another_layer_is_named(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny, name = tiny_models("ltx"), "transformer_blocks.0.scale_shift_table"
    folder = quantise(tiny.checkpoint.folder, tmp_path / "int8", "transformer")

    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        rows, columns = tensors.pop(name).shape
        tensors |= int8("transformer_blocks.0._scale_shift_table_", rows, columns)
        entry = json.loads(metadata["transformer_blocks.0.attn1.to_q.weight"])
        entry["_data"]["block_size"] = [1, columns]
        metadata[name] = json.dumps(entry)

    rewritten(change)(folder)
    model = ModelConfig(name=str(folder))
    with pytest.raises(ModelError, match=f"'{name}' is quantised, but only weights of linear"):
        ranks(find_checkpoint(model), tiny.sampling, model=model)(0, 1)


def test_another_dtype_is_refused_with_the_one_that_it_was_quantised_in(quantised: Path) -> None:
    with pytest.raises(RequestError, match="`dtype` is fp32, but transformer was") as caught:
        find_checkpoint(ModelConfig(name=str(quantised)))
    assert caught.value.hint == "use `dtype` bf16"
    assert caught.value.details["quantised_in"] == ["bf16"]


def test_other_files_for_it_are_refused(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised denoiser takes no LoRA and no GGUF file.

    Such files are refused before svdpp searches for them.
    """
    lora, file = Lora(name="x.safetensors", expert="high"), Denoiser(name="x.gguf", expert="high")
    for more, words in (
        ({"loras": (lora,)}, "takes no `loras`: its weights are quantised by TorchAO"),
        ({"clip_loras": (lora,)}, "takes no `loras`: its weights are quantised by TorchAO"),
        ({"denoisers": (file,)}, "takes no `denoisers`: its own denoisers are quantised"),
    ):
        with pytest.raises(RequestError, match=words):
            find_checkpoint(bf16(quantised, **more))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="needs the package torchao") as caught:
        find_checkpoint(bf16(quantised))
    assert caught.value.hint == "pip install 'svdpp[torchao]'"
