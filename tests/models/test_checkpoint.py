"""Finding and loading a checkpoint: each defect is named, most before any weight is read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel
from diffusers.models.attention import BasicTransformerBlock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from svdpp.config import ModelConfig, SvdSampling
from svdpp.errors import ModelError, OutOfMemoryError, RequestError
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.load import load_pipeline
from svdpp.models.files import read_safetensors_header
from svdpp.plan.layout import Roles
from tests.models.builders import edit_json, save_tiny_checkpoint

UNET = "unet/diffusion_pytorch_model.safetensors"
INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"
SHARD = "unet/diffusion_pytorch_model-00001-of-00001.safetensors"


def error_of(name: str | Path, **options: Any) -> ModelError:
    """The error for checkpoint `name`; checks what every such error must have."""
    with pytest.raises(ModelError) as caught:
        find_checkpoint(ModelConfig(name=str(name), **options))
    error = caught.value
    assert error.exit_code == 5
    for text in (error.message, error.hint):
        assert text
        assert text.isprintable()
        assert len(text) < 400
    return error


# Valid checkpoints.


def test_demo_is_built_in() -> None:
    found = find_checkpoint(ModelConfig(name="demo"))
    assert found.model_frames == 14
    assert (found.folder / "README.md").is_file()


def test_relative_paths_and_home_are_resolved(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setenv("HOME", str(tiny.parent))
    for name in ("tiny", "./tiny", "~/tiny"):
        found = find_checkpoint(ModelConfig(name=name))
        assert (found.name, found.folder) == (name, tiny)


def test_finding_needs_no_torch() -> None:
    code = (
        "import sys; from svdpp.config import ModelConfig;"
        "from svdpp.models.checkpoint import find_checkpoint;"
        "find_checkpoint(ModelConfig(name='demo'));"
        "heavy = {'torch', 'diffusers', 'transformers', 'huggingface_hub'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Checkpoints with one defect each.

MODEL_INDEX = "model_index.json"


def content(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def replace_by_folder(folder: Path) -> None:
    (folder / UNET).unlink()
    (folder / UNET).mkdir()


def rename_to_variant(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.fp16.safetensors")


def write_index(index: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / UNET).rename(folder / SHARD)
        (folder / INDEX).write_text(json.dumps(index))

    return change


def shards(name: object) -> Callable[[Path], None]:
    return write_index({"metadata": {}, "weight_map": {"a": name}})


NOT_JSON = f"{MODEL_INDEX} does not hold valid JSON"
#: Those that no user of `tests/cli/test_strangers.py` has.
DEFECTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "index deeply nested": (content(MODEL_INDEX, b'{"a":' + b"[" * 100_000), NOT_JSON),
    "index not an object": (content(MODEL_INDEX, b"[]"), "does not hold a JSON object"),
    "index not UTF-8": (content(MODEL_INDEX, b'{"\xff": 1}'), NOT_JSON),
    "index huge": (content(MODEL_INDEX, b" " * (16 * 2**20) + b"{}"), NOT_JSON),
    "code beside the index": (content("pipeline.py", b"1"), "'pipeline.py'"),
    "weights a folder": (replace_by_folder, UNET),
    "weights empty": (content(UNET, b""), f"{UNET} is damaged or truncated"),
    "shard with absolute path": (shards("/x.safetensors"), "'/x.safetensors'"),
    "shard a pickle": (shards("part.bin"), "'part.bin'"),
    "shard a list": (shards([1]), "[1]"),
    "index of shards without map": (write_index({}), f"{INDEX}: lists None"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(folder: Path, defect: str) -> None:
    change, words = DEFECTS[defect]
    change(folder)
    assert words in error_of(folder).message


@pytest.mark.parametrize("name", ["PNDMScheduler", "EulerAncestralDiscreteScheduler", {"a": []}])
def test_another_scheduler_is_refused_by_name(folder: Path, name: object) -> None:
    edit_json(folder / "model_index.json", scheduler=["diffusers", name])
    message = error_of(folder).message
    assert "is not supported: this family's steps are proven with EulerDiscreteScheduler" in message


@pytest.mark.parametrize(
    ("change", "options", "message", "hint"),
    [
        (rename_to_variant, {}, "model.fp16.safetensors'", "--variant fp16 reads"),
        (str, {"variant": "fp16"}, "model.fp16.safetensors is missing", "--variant fp16 reads"),
    ],
)
def test_the_hint_says_what_to_do(
    folder: Path, change: Callable[[Path], Any], options: dict[str, Any], message: str, hint: str
) -> None:
    change(folder)
    error = error_of(folder, **options)
    assert message in error.message
    assert error.hint.startswith(hint)


URL = "https://huggingface.co/org/model"
NO_FOLDER = ("./nowhere", "/no/where", "~/nowhere", "a/b/c", "x\\y", URL, __file__)
NO_NAME = ("a b", "--x", "n" * 5000)


@pytest.mark.parametrize("name", [*NO_FOLDER, *NO_NAME])
def test_a_name_of_nothing(name: str) -> None:
    assert ("no folder" if name in NO_FOLDER else "neither a local folder") in error_of(
        name
    ).message


def test_contradictory_request(tiny: Path) -> None:
    with pytest.raises(RequestError, match="--revision"):
        find_checkpoint(ModelConfig(name=str(tiny), revision="main"))


# Headers are read as the safetensors library reads them; hostile files give a `ModelError`.


@pytest.mark.parametrize("part", ["unet", "vae", "image_encoder"])
def test_header_equals_that_of_the_library(part: str) -> None:
    checkpoint = find_checkpoint(ModelConfig(name="demo"))
    ((path, header),) = checkpoint.weight_files(part).items()
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        theirs = {key: (each.get_dtype(), tuple(each.get_shape())) for key, each in slices.items()}
    assert header == theirs


def header_or_none(path: Path, content: bytes) -> dict[str, Any] | None:
    """The header, or None for a `ModelError`. Any other exception fails the test."""
    path.write_bytes(content)
    try:
        return read_safetensors_header(path)
    except ModelError as error:
        message = error.message
    assert message.isprintable()
    assert len(message) < 400
    return None


def wrap(text: bytes, num_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


SIZES = st.one_of(st.integers(-2, 9), st.integers(), st.booleans(), st.floats(), st.none())
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "X", "", 1, None]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, max_size=3),
    },
)
FUZZ = settings(
    max_examples=max(150, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(entries=st.dictionaries(st.text(max_size=20), st.one_of(ENTRIES, SIZES), max_size=4))
def test_any_json_gives_a_header_or_an_error(tmp_path: Path, entries: dict[str, Any]) -> None:
    header_or_none(tmp_path / "x.safetensors", wrap(json.dumps(entries).encode(), 8))


@pytest.mark.parametrize(
    "content",
    [
        wrap(b'{"a":' + b"[" * 100_000),
        wrap(b'{"a":' * 100_000),
        wrap(b'{"a":1' + b"0" * 9000 + b"}"),
        wrap(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8),
        wrap(b'{"a":{"dtype":"U8","shape":[' + b"281474976710655," * 9999 + b"1]}}"),
        wrap(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_999_999) + b"{}",
    ],
    ids=["deep list", "deep object", "huge number", "gap", "huge shape", "misfit", "2^63", "short"],
)
def test_hostile_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is damaged or truncated") as caught:
        read_safetensors_header(path)
    assert len(caught.value.message) < 400


def test_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_safetensors_header(tmp_path / "absent.safetensors")


# A rank loads the components it needs, with the same bits as diffusers' own pipeline.


VAE = "vae/diffusion_pytorch_model.safetensors"
CLIP = "image_encoder/model.safetensors"
PROJECTION = "visual_projection.weight"


def parts_of(checkpoint: Checkpoint | Path, roles: str = "EXD", **options: Any) -> Any:
    """Loads the parts for roles given as letters: E encode, X denoise, D decode."""
    if isinstance(checkpoint, Path):
        checkpoint = find_checkpoint(ModelConfig(name=str(checkpoint)))
    device = options.pop("device", "cpu")
    model = ModelConfig(name=checkpoint.name, **options)
    held = Roles(encode="E" in roles, denoise="X" in roles, decode="D" in roles)
    pipe = load_pipeline(checkpoint, model, sampling=SvdSampling(), roles=held, device=device)
    return SimpleNamespace(
        **{
            part: None if getattr(each, "is_skeleton", False) else each
            for part, each in pipe.components.items()
        }
    )


# Loaded components.


def test_shards_and_variants_are_loaded(tiny: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, variant="fp16", max_shard_size="500KB")
    sharded = find_checkpoint(ModelConfig(name=str(tmp_path), variant="fp16"))
    parts, whole = parts_of(sharded), parts_of(tiny)
    for name in ("unet", "vae", "image_encoder"):
        ours, expected = (getattr(each, name).state_dict() for each in (parts, whole))
        assert expected
        assert ours.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("roles", "present"),
    [
        ("E", {"image_encoder", "feature_extractor", "vae"}),
        ("X", {"unet"}),
        ("D", {"vae"}),
        ("XD", {"vae", "unet"}),
        ("ED", {"image_encoder", "feature_extractor", "vae"}),
        ("", set()),
    ],
)
def test_a_rank_loads_only_what_its_roles_need(tiny: Path, roles: str, present: set[str]) -> None:
    parts = parts_of(tiny, roles)
    names = {"image_encoder", "feature_extractor", "vae", "unet"}
    assert {name for name in names if getattr(parts, name) is not None} == present
    uses = Roles(encode="E" in roles, denoise="X" in roles, decode="D" in roles)
    checkpoint = find_checkpoint(ModelConfig(name=str(tiny)), weights=False)
    assert checkpoint.components_of(uses, SvdSampling()) == present - {"feature_extractor"}
    if parts.vae is not None:
        halves = {name for name, _ in parts.vae.named_children()}
        encode = {"encoder", "quant_conv"} if "E" in roles else set()
        assert halves == encode | ({"decoder"} if "D" in roles else set())


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "CLIPImageProcessorPil"])
def test_the_image_processor_is_that_of_the_pipeline(folder: Path, name: str) -> None:
    edit_json(folder / "model_index.json", feature_extractor=["transformers", name])
    pipeline = StableVideoDiffusionPipeline.from_pretrained(folder)
    ours, theirs = parts_of(folder, "E").feature_extractor, pipeline.feature_extractor
    assert type(ours) is type(theirs)
    assert ours.to_dict() == theirs.to_dict()


def test_memory_opt_turns_on_chunking_in_the_unet(tiny: Path) -> None:
    for memory_opt, size in ((False, None), (True, 1)):
        unet = parts_of(tiny, "X", memory_opt=memory_opt).unet
        blocks = [each for each in unet.modules() if isinstance(each, BasicTransformerBlock)]
        assert {each._chunk_size for each in blocks} == {size}


@pytest.mark.long
def test_loading_prints_nothing() -> None:
    code = """
from svdpp.config import ModelConfig, SvdSampling
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import load_model
from svdpp.plan.layout import Roles
model = ModelConfig(name="demo", dtype="fp16")
found = find_checkpoint(model)
load_model(found, model, SvdSampling(), "cpu", Roles(encode=True, denoise=True, decode=True))
import diffusers
diffusers.StableVideoDiffusionPipeline.from_pretrained(found.folder)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_scheduler_config_that_the_class_rejects(folder: Path) -> None:
    edit_json(folder / "scheduler/scheduler_config.json", beta_schedule="nonsense")
    with pytest.raises(ModelError, match="scheduler cannot be loaded: nonsense"):
        find_checkpoint(ModelConfig(name=str(folder))).new_scheduler(None)


# Weights that do not fit.


def change_weight(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = {**load_file(path), name: tensor}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("file", "name", "tensor", "phrase"),
    [
        (UNET, "conv_in.weight", None, "unet: weights are missing, .* is 'conv_in.weight' of 1"),
        (UNET, "extra", torch.zeros(1), "are unexpected, the first is 'extra'"),
        (UNET, "conv_in.bias", torch.zeros(9), "conv_in.bias expected shape"),
        (CLIP, PROJECTION, torch.zeros(3, 3), f"are mismatched, the first is .*{PROJECTION}"),
        (CLIP, PROJECTION, None, "weights are missing, the first"),
        (VAE, "quant_conv.bias", None, "weights are missing, the first is 'quant_conv.bias'"),
        (
            *(UNET, "conv_in.bias", torch.zeros(32, dtype=torch.int8)),
            "unet has weights of the dtype I8: quantised",
        ),
    ],
)
def test_weights_of_another_model(
    folder: Path, file: str, name: str, tensor: torch.Tensor | None, phrase: str
) -> None:
    change_weight(folder / file, name, tensor)
    with pytest.raises(ModelError, match=phrase) as caught:
        parts_of(folder)
    assert caught.value.exit_code == 5
    assert str(folder) in caught.value.message
    assert caught.value.message.isprintable()


def test_buffer_of_old_transformers_is_accepted(folder: Path) -> None:
    name = "vision_model.embeddings.position_ids"
    change_weight(folder / CLIP, name, torch.arange(17)[None])
    encoder = parts_of(folder, "E").image_encoder
    assert name in dict(encoder.named_buffers())


@pytest.mark.parametrize(
    ("config", "changes", "component"),
    [
        ("image_encoder/config.json", {"hidden_act": "no such thing"}, "image_encoder"),
        ("unet/config.json", {"down_block_types": ["Non\x1bsense", "Nonsense"]}, "unet"),
    ],
)
def test_config_that_the_library_rejects(
    folder: Path, config: str, changes: dict[str, Any], component: str
) -> None:
    edit_json(folder / config, **changes)
    with pytest.raises(ModelError, match=f"{component} cannot be loaded: ") as caught:
        parts_of(folder)
    assert caught.value.__cause__ is not None
    assert caught.value.message.isprintable()


# Machines that cannot load the model.


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    unet_class = UNetSpatioTemporalConditionModel
    for name in ("from_pretrained", "to"):
        with monkeypatch.context() as patch:
            patch.setattr(unet_class, name, fail)
            with pytest.raises(
                OutOfMemoryError, match="unet needs more memory than cpu has free"
            ) as caught:
                parts_of(tiny, "X")
        assert caught.value.exit_code == 4
        assert "--dtype bf16 or fp16" in caught.value.hint
        assert caught.value.__cause__ is error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_device(tiny: Path) -> None:
    with pytest.raises(RequestError, match="cuda:7 cannot be used: "):
        parts_of(tiny, "X", device="cuda:7")
