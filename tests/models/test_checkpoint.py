"""Checkpoints: the search for them, their loading, and errors that name each defect."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNetSpatioTemporalConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from svdpp.config import ModelConfig, SvdSampling
from svdpp.errors import ModelError, OutOfMemoryError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import load_pipeline
from svdpp.models.files import read_dtypes
from svdpp.plan.roles import Roles
from tests.support.builders import edit_json, save_tiny_checkpoint

MODEL_INDEX = "model_index.json"
CONFIG = "unet/config.json"
UNET = "unet/diffusion_pytorch_model.safetensors"
INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"
VAE = "vae/diffusion_pytorch_model.safetensors"
CLIP = "image_encoder/model.safetensors"
CLIP_CONFIG = "image_encoder/config.json"
PROJECTION = "visual_projection.weight"

Change = Callable[[Path], Any]


def error_of(name: str | Path, **options: Any) -> ModelError:
    """Check that the checkpoint `name` is refused with a readable error; return the error."""
    with pytest.raises(ModelError) as caught:
        find_checkpoint(ModelConfig(name=str(name), **options))
    error = caught.value
    for text in (error.message, error.hint):
        assert text
        assert text.isprintable()
        assert len(text) < 400
    return error


def test_relative_paths_and_home_are_resolved(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setenv("HOME", str(tiny.parent))
    for name in (tiny.name, f"./{tiny.name}", f"~/{tiny.name}"):
        found = find_checkpoint(ModelConfig(name=name))
        assert (found.name, found.folder) == (name, tiny)


def content(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def config(part: str, **changes: Any) -> Change:
    return lambda folder: edit_json(folder / part, **changes)


def file_replaced(name: str, make: Change = lambda _: None) -> Change:
    """Return a function that removes a file of a checkpoint, and calls `make` with its path."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def rename_to_variant(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.fp16.safetensors")


def shards(index: object) -> Change:
    return content(INDEX, json.dumps(index).encode())


NOT_JSON = f"{MODEL_INDEX} does not hold valid JSON"
DAMAGED = f"{UNET} is damaged or truncated"
DEFECTS: dict[str, tuple[Change, str]] = {
    "index deeply nested": (content(MODEL_INDEX, b'{"a":' + b"[" * 100_000), NOT_JSON),
    "index not an object": (content(MODEL_INDEX, b"[]"), "does not hold a JSON object"),
    "index not UTF-8": (content(MODEL_INDEX, b'{"\xff": 1}'), NOT_JSON),
    "index huge": (content(MODEL_INDEX, b" " * (16 * 2**20) + b"{}"), NOT_JSON),
    "index missing": (file_replaced(MODEL_INDEX), f"{MODEL_INDEX} is missing"),
    "another pipeline": (config(MODEL_INDEX, _class_name="Other"), "pipeline is 'Other'"),
    "code by module": (
        config(MODEL_INDEX, unet=["evil", "UNetSpatioTemporalConditionModel"]),
        "is from the module 'evil'",
    ),
    "config missing": (file_replaced("vae/config.json"), "is missing"),
    "config endless": (
        file_replaced(CONFIG, lambda path: path.symlink_to("/dev/zero")),
        f"{CONFIG} is missing",
    ),
    "no frames": (config(CONFIG, num_frames=0), "num_frames is 0"),
    "a width for all memory": (
        config(CONFIG, block_out_channels=[32, 10**9]),
        "block_out_channels is [32, 1000000000]",
    ),
    "a nested depth for all memory": (
        config(CLIP_CONFIG, text_config={"num_hidden_layers": 10**9}),
        "text_config.num_hidden_layers is 1000000000, but at most 1024 is allowed",
    ),
    "nested quantisation": (
        config(CLIP_CONFIG, vision_config=[{"quantization_config": {"load_in_8bit": True}}]),
        "the key 'vision_config.quantization_config' is not supported, because svdpp runs no "
        "weights that are quantised: only denoisers may be quantised, and only by TorchAO to int8",
    ),
    "an encoder quantised by bitsandbytes": (
        config(CLIP_CONFIG, quantization_config={"quant_method": "bitsandbytes"}),
        "svdpp runs no weights that are quantised by 'bitsandbytes': only denoisers may be",
    ),
    "an encoder quantised by TorchAO": (
        config(CLIP_CONFIG, quantization_config={"quant_method": "torchao"}),
        "svdpp runs no weights that are quantised by 'torchao': only denoisers may be",
    ),
    "no object": (config(CONFIG, quantization_config=[1]), "quantised: svdpp has no test that"),
    "a nested kernel of the hub": (
        config(CLIP_CONFIG, text_config={"attn_implementation": "owner/kernel"}),
        "the key 'text_config.attn_implementation' is not supported",
    ),
    "code of a processor": (
        config("feature_extractor/preprocessor_config.json", auto_map={"AutoProcessor": "x.Y"}),
        "preprocessor_config.json: the key 'auto_map' is not supported",
    ),
    "another scheduler": (
        config(MODEL_INDEX, scheduler=["diffusers", "DDPMScheduler"]),
        "from_config(pipe.scheduler.config)",
    ),
    "code beside the index": (content("pipeline.py", b"1"), "'pipeline.py'"),
    "weights missing": (file_replaced(UNET), f"{UNET} is missing"),
    "weights empty": (content(UNET, b""), DAMAGED),
    "weights truncated": (lambda folder: os.truncate(folder / UNET, 100_000), DAMAGED),
    "weights of endless header": (content(UNET, (2**62).to_bytes(8, "little") + b"{"), DAMAGED),
    "weights a pipe": (file_replaced(UNET, os.mkfifo), f"{UNET} is missing"),
    "weights a link outside": (
        file_replaced(UNET, lambda path: path.symlink_to("/etc/passwd")),
        DAMAGED,
    ),
    "weights of a variant": (rename_to_variant, "fp16.safetensors'\n`variant` fp16 reads"),
    "shard with absolute path": (shards({"weight_map": {"a": "/x.safetensors"}}), "'/x.safe"),
    "shard a pickle": (shards({"weight_map": {"a": "part.bin"}}), "'part.bin'"),
    "shard missing": (
        shards({"weight_map": {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"}}),
        "1 of 1 shards are missing",
    ),
    "index of shards without map": (shards({}), f"{INDEX}: the index lists None"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(folder: Path, defect: str) -> None:
    change, words = DEFECTS[defect]
    change(folder)
    error = error_of(folder)
    assert words in f"{error.message}\n{error.hint}"


@pytest.mark.parametrize("method", sorted({*AUTO_QUANTIZER_MAPPING, "gptq"} - {"torchao"}))
def test_denoisers_that_are_quantised_by_other_methods_are_refused(
    folder: Path, method: str
) -> None:
    method = method.removesuffix("_4bit").removesuffix("_8bit")
    edit_json(folder / CONFIG, quantization_config={"quant_method": method, "load_in_4bit": True})
    error = error_of(folder)
    reasons = {"bitsandbytes": "diffusers loads them only on GPUs", "quanto": "has deprecated"}
    assert f"quantised by '{method}': " in error.message
    assert reasons.get(method, "no test that compares their clips") in error.message
    assert error.details["quant_method"] == repr(method)
    assert error.hint.startswith("use the original checkpoint, which is not quantised")


@pytest.mark.skipif(torch.cuda.is_available(), reason="diffusers refuses it without a GPU")
def test_diffusers_loads_bitsandbytes_on_gpus_alone(folder: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    edit_json(folder / CONFIG, quantization_config=quantised)
    with pytest.raises(RuntimeError, match="No GPU found"):
        UNetSpatioTemporalConditionModel.from_pretrained(folder / "unet")


ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
VALUES = {"granularity": ROWS, "group_size": None, "set_inductor_config": True}
INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": VALUES}


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        (None, {}),
        ("int8wo", {}),
        ({**INT8, "_type": "Int4WeightOnlyConfig"}, {}),
        ({**INT8, "_version": 1}, {}),
        ({**INT8, "_data": {**VALUES, "x": 1}}, {}),
        ({**INT8, "_data": {**VALUES, "granularity": {"_type": "quantize_", "_data": {}}}}, {}),
        (INT8, {"load_in_8bit": True}),  # diffusers would read it as bitsandbytes
        (INT8, {"modules_to_not_convert": [1]}),
    ],
)
def test_denoisers_that_torchao_quantised_in_another_way_are_refused(
    folder: Path, kind: Any, further: dict[str, Any]
) -> None:
    """Denoisers that TorchAO quantised in any other way are refused.

    TorchAO would create an object of any of its classes that the config names.
    """
    config = {"quant_method": "torchao", "quant_type": {"default": kind}, **further}
    edit_json(folder / CONFIG, quantization_config=config)
    error = error_of(folder)
    assert (
        "svdpp runs denoisers quantised by TorchAO with TorchAoConfig(Int8WeightOnlyConfig())"
        in error.message
    )
    assert error.details["quant_type"]


NO_FOLDER = ("./nowhere", "/no/where", "a/b/c", "x\\y", "https://huggingface.co/a/b", __file__)


@pytest.mark.parametrize("name", [*NO_FOLDER, "a b", "n" * 5000])
def test_a_name_of_nothing(name: str) -> None:
    expected = "no folder" if name in NO_FOLDER else "neither a local folder"
    assert expected in error_of(name).message


def test_contradictory_request(tiny: Path) -> None:
    with pytest.raises(RequestError, match="`revision`"):
        find_checkpoint(ModelConfig(name=str(tiny), revision="main"))


SIZES = st.one_of(st.integers(-2, 9), st.integers(), st.booleans(), st.floats(), st.none())
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "X", "", 1, None]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, max_size=3),
    },
)


@pytest.mark.slow
@settings(
    max_examples=settings.default.max_examples // 3,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(entries=st.dictionaries(st.text(max_size=20), st.one_of(ENTRIES, SIZES), max_size=4))
def test_any_json_gives_a_header_or_an_error(tmp_path: Path, entries: dict[str, Any]) -> None:
    text = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    message = ""
    try:
        read_dtypes(path)
    except ModelError as error:
        message = error.message
    assert message.isprintable()
    assert len(message) < 400


# --- a rank loads the components that it needs, with the bits of diffusers' own pipeline ---------


def parts_of(folder: Path, roles: str = "EXD", **options: Any) -> dict[str, Any]:
    """Load a checkpoint's components for some roles: E for encode, X for denoise, D for decode.

    Return the components that have weights, by name.
    """
    model = ModelConfig(name=str(folder), **options)
    held = Roles(encode="E" in roles, denoise="X" in roles, decode="D" in roles)
    checkpoint = find_checkpoint(model)
    pipe = load_pipeline(checkpoint, model, sampling=SvdSampling(), roles=held, device="cpu")
    return {
        part: module
        for part, module in pipe.components.items()
        if not getattr(module, "is_skeleton", False)
    }


def test_shards_and_variants_are_loaded(tiny: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, variant="fp16", max_shard_size="500KB")
    parts, whole = parts_of(tmp_path, variant="fp16"), parts_of(tiny)
    for name in ("unet", "vae", "image_encoder"):
        ours, expected = (each[name].state_dict() for each in (parts, whole))
        assert expected
        assert ours.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "present", "halves"),
    [
        ("E", {"image_encoder", "vae"}, {"encoder", "quant_conv"}),
        ("XD", {"vae", "unet"}, {"decoder"}),
        ("ED", {"image_encoder", "vae"}, {"encoder", "quant_conv", "decoder"}),
    ],
)
def test_a_rank_loads_only_what_its_roles_need(
    tiny: Path, roles: str, present: set[str], halves: set[str]
) -> None:
    parts = parts_of(tiny, roles)
    assert parts.keys() & {"image_encoder", "vae", "unet"} == present
    assert {name for name, _ in parts["vae"].named_children()} == halves


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_component_without_the_variant_is_read_without_it(
    folder: Path, tiny: Path, is_sharded: bool
) -> None:
    """A component without files of the requested variant is read from its plain files, as in
    diffusers.

    Shards have the names that diffusers gave them before 2025.
    """
    if is_sharded:
        tensors = load_file(folder / UNET)
        keys, stem = sorted(tensors), "diffusion_pytorch_model"
        halves = [keys[::2], keys[1::2]]
        names = [f"{stem}-0000{place}-of-00002.fp16.safetensors" for place in (1, 2)]
        for half, name in zip(halves, names, strict=True):
            save_file({key: tensors[key] for key in half}, folder / "unet" / name, {"format": "pt"})
        places = {key: name for half, name in zip(halves, names, strict=True) for key in half}
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (folder / f"unet/{stem}.safetensors.fp16.index.json").write_text(json.dumps(index))
        (folder / UNET).unlink()
    else:
        rename_to_variant(folder)
    parts, whole = parts_of(folder, variant="fp16"), parts_of(tiny)
    for name in ("unet", "vae"):
        ours, expected = (each[name].state_dict() for each in (parts, whole))
        assert all(torch.equal(tensor, ours[key]) for key, tensor in expected.items())
    assert "is missing" in error_of(folder, variant="fp61").message


@pytest.mark.parametrize("name", ["svd.safetensors", "wan/model-Q4_K_M.gguf", UNET])
def test_a_single_file_is_named_as_what_it_is(tiny: Path, name: str) -> None:
    for path in (name, tiny / name):
        assert "svdpp reads only folders and hub models" in error_of(path).message


def test_memory_opt_turns_on_chunking_in_the_unet(tiny: Path) -> None:
    for memory_opt, size in ((False, None), (True, 1)):
        unet = parts_of(tiny, "X", memory_opt=memory_opt)["unet"]
        blocks = [each for each in unet.modules() if isinstance(each, BasicTransformerBlock)]
        assert {each._chunk_size for each in blocks} == {size}


FIND = """
import sys
from svdpp.config import ModelConfig
from svdpp.models.checkpoint import find_checkpoint
find_checkpoint(ModelConfig(name="demo"))
print(sorted({"torch", "diffusers", "transformers", "huggingface_hub"} & set(sys.modules)))
"""


def test_finding_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def tensor_replaced(file: str, name: str, tensor: torch.Tensor | None) -> Change:
    """Return a function that replaces a tensor in a checkpoint's file. None removes the tensor."""

    def change(folder: Path) -> None:
        weights = {**load_file(folder / file), name: tensor}
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, folder / file, metadata={"format": "pt"})

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            tensor_replaced(UNET, "conv_in.weight", None),
            "unet: weights are missing, the first of 1 is 'conv_in.weight'",
        ),
        (
            tensor_replaced(UNET, "extra", torch.zeros(1)),
            "are unexpected, the first of 1 is 'extra'",
        ),
        (tensor_replaced(UNET, "conv_in.bias", torch.zeros(9)), "conv_in.bias expected shape"),
        (
            tensor_replaced(CLIP, PROJECTION, torch.zeros(3, 3)),
            f"mismatched, the first of 1 is .*{PROJECTION}",
        ),
        (tensor_replaced(CLIP, PROJECTION, None), "weights are missing, the first"),
        (
            tensor_replaced(VAE, "quant_conv.bias", None),
            "are missing, the first of 1 is 'quant_conv.bias'",
        ),
        (
            tensor_replaced(UNET, "conv_in.bias", torch.zeros(32, dtype=torch.int8)),
            "unet has quantised weights of the dtype I8",
        ),
        (config("image_encoder/config.json", hidden_act="none"), "image_encoder cannot be loaded"),
        (
            config(CONFIG, down_block_types=["Non\x1bsense", "Nonsense"]),
            "unet cannot be loaded: ",
        ),
        (
            config("scheduler/scheduler_config.json", beta_schedule="nonsense"),
            "scheduler cannot be loaded: nonsense",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(folder: Path, change: Change, words: str) -> None:
    change(folder)
    with pytest.raises(ModelError, match=words) as caught:
        parts_of(folder)
    assert str(folder) in caught.value.message
    assert caught.value.message.isprintable()


def test_buffer_of_old_transformers_is_accepted(folder: Path) -> None:
    name = "vision_model.embeddings.position_ids"
    tensor_replaced(CLIP, name, torch.arange(17)[None])(folder)
    encoder = parts_of(folder, "E")["image_encoder"]
    assert name in dict(encoder.named_buffers())


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("to", MemoryError()),
        ("to", torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")),
        ("from_pretrained", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_too_little_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(UNetSpatioTemporalConditionModel, method, fail)
    with pytest.raises(OutOfMemoryError, match="unet needs more memory than cpu has") as caught:
        parts_of(tiny, "X")
    assert "`dtype` bf16 or fp16" in caught.value.hint
    details = caught.value.details
    assert details["device"] == "cpu"
    assert details["free_bytes"] > 0
    is_told = "3.00 GiB" in str(error)
    weights = (tiny / UNET).stat().st_size
    assert details["requested_bytes"] == (3 * 2**30 if is_told else pytest.approx(weights, rel=0.2))
