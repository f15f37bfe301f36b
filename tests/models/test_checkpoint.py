"""Finding a checkpoint, and naming each defect of one before any weight is read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.safetensors_header import weight_headers
from tests.models.builders import edit_json, save_tiny_checkpoint

UNET = "unet/diffusion_pytorch_model.safetensors"
INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"


SHARD = "unet/diffusion_pytorch_model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


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


def test_published_sizes_are_within_the_limits(folder: Path) -> None:
    """The sizes of stabilityai/stable-video-diffusion-img2vid-xt and its ViT-H image encoder."""
    edit_json(
        folder / "unet/config.json",
        addition_time_embed_dim=256,
        block_out_channels=[320, 640, 1280, 1280],
        cross_attention_dim=1024,
        layers_per_block=2,
        num_attention_heads=[5, 10, 20, 20],
        num_frames=25,
        projection_class_embeddings_input_dim=768,
    )
    edit_json(
        folder / "vae/config.json", block_out_channels=[128, 256, 512, 512], layers_per_block=2
    )
    edit_json(
        folder / "image_encoder/config.json",
        hidden_size=1280,
        intermediate_size=5120,
        num_attention_heads=16,
        num_hidden_layers=32,
        patch_size=14,
        projection_dim=1024,
    )
    found = find_checkpoint(ModelConfig(name=str(folder)))
    assert found.model_frames == 25


def test_demo_is_built_in() -> None:
    found = find_checkpoint(ModelConfig(name="demo"))
    assert found.model_frames == 14
    assert (found.folder / "README.md").is_file()


def test_shards_and_variants_are_found(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, variant="fp16", max_shard_size="500KB")
    found = find_checkpoint(ModelConfig(name=str(tmp_path), variant="fp16"))
    headers = weight_headers(found.folder, "unet", "fp16")
    assert len(headers) > 2
    assert all(".fp16-0000" in path.name for path in headers)


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


def replace_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def defect(name: str, change: Callable[[Path], Any], *phrases: str) -> Any:
    return pytest.param(change, phrases, id=name)


HTML = b"\n<!DOCTYPE html><html><title>Sign in</title></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


def replace_by_folder(folder: Path) -> None:
    (folder / UNET).unlink()
    (folder / UNET).mkdir()


def rename_to_pickle(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.bin")


def rename_to_variant(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.fp16.safetensors")


def write_index(**weight_map: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / UNET).rename(folder / SHARD)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index))

    return change


def set_component(**entries: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "model_index.json", **entries)


def set_config(part: str, **values: object) -> Callable[[Path], None]:
    file = "scheduler_config.json" if part == "scheduler" else "config.json"
    return lambda folder: edit_json(folder / part / file, **values)


DEFECTS = [
    defect("no index", lambda f: (f / "model_index.json").unlink(), "model_index.json is missing"),
    defect(
        "index is not JSON",
        lambda f: replace_bytes(f / "model_index.json", b"{"),
        "model_index.json does not hold valid JSON",
    ),
    defect(
        "index is deeply nested",
        lambda f: replace_bytes(f / "model_index.json", b'{"a":' + b"[" * 100_000),
        "model_index.json does not hold valid JSON",
    ),
    defect(
        "index is not an object",
        lambda f: replace_bytes(f / "model_index.json", b"[]"),
        "model_index.json does not hold a JSON object",
    ),
    defect(
        "index is not UTF-8",
        lambda f: replace_bytes(f / "model_index.json", b'{"\xff": 1}'),
        "model_index.json does not hold valid JSON",
    ),
    defect(
        "index is huge",
        lambda f: replace_bytes(f / "model_index.json", b" " * (16 * 2**20 + 1)),
        "model_index.json is too long",
    ),
    defect(
        "index is a web page",
        lambda f: replace_bytes(f / "model_index.json", HTML),
        "model_index.json is a web page",
    ),
    defect(
        "other pipeline",
        set_component(_class_name="StableDiffusionPipeline"),
        "model_index.json: the pipeline is 'StableDiffusionPipeline'",
    ),
    defect(
        "custom pipeline",
        set_component(_class_name=["pipeline", "Mine"]),
        "model_index.json: the pipeline is ['pipeline', 'Mine']",
    ),
    defect("component missing", set_component(vae=None), "model_index.json", "vae"),
    defect("component null", set_component(vae=[None, None]), "the component vae is missing"),
    defect("component odd", set_component(vae="x\n\x1b[2J" * 999), "the vae is of class"),
    defect(
        "component of another class",
        set_component(unet=["diffusers", "UNet2DConditionModel"]),
        "model_index.json: the unet is of class 'UNet2DConditionModel'",
    ),
    defect(
        "component of its own module",
        set_component(unet=["my_unet", "UNetSpatioTemporalConditionModel"]),
        "model_index.json: 'unet' is from the module 'my_unet'",
        "svdpp runs no code from a checkpoint",
    ),
    defect(
        "code beside the index",
        lambda f: (f / "pipeline.py").write_text("1"),
        "'pipeline.py'",
        "svdpp runs no code from a checkpoint",
    ),
    defect(
        "code in a component",
        lambda f: (f / "unet/modeling.py").write_text("1"),
        "'unet/modeling.py'",
        "svdpp runs no code from a checkpoint",
    ),
    defect(
        "key that loads code",
        set_config("image_encoder", auto_map={"AutoModel": "a.B"}),
        "image_encoder/config.json: the key 'auto_map'",
    ),
    defect(
        "key that loads a kernel",
        set_config("image_encoder", attn_implementation="someone/kernel"),
        "image_encoder/config.json: the key 'attn_implementation'",
    ),
    defect(
        "config missing", lambda f: (f / "vae/config.json").unlink(), "vae/config.json is missing"
    ),
    defect("scipy sigmas", set_config("scheduler", use_beta_sigmas=True), "use_beta_sigmas"),
    defect(
        "training steps above the limit",
        set_config("scheduler", num_train_timesteps=10**9),
        "scheduler/scheduler_config.json: num_train_timesteps is 1000000000",
    ),
    defect(
        "width above the limit",
        set_config("unet", block_out_channels=[32, 10**9]),
        "unet/config.json: block_out_channels is [32, 1000000000]",
    ),
    defect(
        "frames true", set_config("unet", num_frames=True), "unet/config.json: num_frames is True"
    ),
    defect(
        "frames missing",
        set_config("unet", num_frames=None),
        "unet/config.json: num_frames is None",
    ),
    defect(
        "channels differ", set_config("unet", in_channels=9), "unet/config.json: in_channels is 9"
    ),
    defect(
        "embedding differs",
        set_config("unet", cross_attention_dim=1024),
        "unet/config.json: cross_attention_dim is 1024 but must be 16",
    ),
    defect(
        "time ids differ",
        set_config("unet", projection_class_embeddings_input_dim=64),
        "unet/config.json: projection_class_embeddings_input_dim is 64 but must be 96",
    ),
    defect(
        "image size differs",
        set_config("image_encoder", image_size=336),
        "image_encoder/config.json: image_size is 336 but must be 224",
    ),
    defect("weights missing", lambda f: (f / UNET).unlink(), f"{UNET} is missing"),
    defect("weights are a folder", replace_by_folder, UNET),
    defect(
        "weights truncated",
        lambda f: replace_bytes(f / UNET, (f / UNET).read_bytes()[:-1]),
        f"{UNET} is damaged or truncated",
    ),
    defect(
        "weights truncated in the header",
        lambda f: replace_bytes(f / UNET, (f / UNET).read_bytes()[:900]),
        f"{UNET} is damaged or truncated",
    ),
    defect(
        "weights too long",
        lambda f: replace_bytes(f / UNET, (f / UNET).read_bytes() + b"0"),
        f"{UNET} is damaged or truncated",
    ),
    defect("weights empty", lambda f: replace_bytes(f / UNET, b""), f"{UNET} is empty (0 bytes)"),
    defect(
        "weights are a web page", lambda f: replace_bytes(f / UNET, HTML), f"{UNET} is a web page"
    ),
    defect(
        "weights are a pointer",
        lambda f: replace_bytes(f / UNET, LFS),
        f"{UNET} is a git-lfs pointer",
    ),
    defect("pickle only", rename_to_pickle, UNET, "'diffusion_pytorch_model.bin' is a pickle"),
    defect("variant only", rename_to_variant, UNET, "available variants: fp16"),
    defect(
        "shard outside the folder",
        write_index(a="../../x.safetensors"),
        INDEX,
        "'../../x.safetensors'",
    ),
    defect("shard with absolute path", write_index(a="/x.safetensors"), INDEX, "'/x.safetensors'"),
    defect("shard is a pickle", write_index(a="part.bin"), INDEX, "'part.bin'"),
    defect("shard is a list", write_index(a=[1]), INDEX, "[1]"),
    defect(
        "shard missing",
        lambda f: (f / UNET).rename(f / INDEX),
        f"{INDEX}: 1 of 1 shards miss",
    ),
    defect(
        "index of shards without map",
        lambda f: (write_index()(f), (f / INDEX).write_text("{}")),
        f"{INDEX}: not an index of shards",
    ),
]


@pytest.mark.parametrize(("change", "phrases"), DEFECTS)
def test_defect_is_named(
    folder: Path, change: Callable[[Path], Any], phrases: tuple[str, ...]
) -> None:
    change(folder)
    message = error_of(folder).message
    assert all(phrase in message for phrase in phrases), message


@pytest.mark.parametrize("name", ["PNDMScheduler", "EulerAncestralDiscreteScheduler", {"a": []}])
def test_another_scheduler_is_refused_by_name(folder: Path, name: object) -> None:
    edit_json(folder / "model_index.json", scheduler=["diffusers", name])
    message = error_of(folder).message
    assert "is not supported: this family's steps are proven with EulerDiscreteScheduler" in message


def test_hint_names_the_option(folder: Path) -> None:
    rename_to_variant(folder)
    assert error_of(folder).hint == "use --variant fp16"


def test_missing_variant(folder: Path) -> None:
    error = error_of(folder, variant="fp16")
    assert "model.fp16.safetensors is missing" in error.message
    assert error.hint == "omit --variant"


def test_hint_for_a_pointer_is_git_lfs(folder: Path) -> None:
    (folder / UNET).write_bytes(LFS)
    assert error_of(folder).hint == "git lfs pull"


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "x\\y"])
def test_missing_folder(name: str) -> None:
    assert "there is no folder" in error_of(name).message


@pytest.mark.parametrize("name", ["https://huggingface.co/org/model", "a b", "--x", "n" * 5000])
def test_invalid_name(name: str) -> None:
    assert "hub id" in error_of(name).message


def test_file_instead_of_a_folder(folder: Path) -> None:
    assert "is a file, not a diffusers folder" in error_of(folder / UNET).message


def test_contradictory_request(tiny: Path) -> None:
    with pytest.raises(RequestError, match="--revision"):
        find_checkpoint(ModelConfig(name=str(tiny), revision="main"))
    with pytest.raises(RequestError, match="--variant"):
        find_checkpoint(ModelConfig(name=str(tiny), variant="../fp16"))
    with pytest.raises(ValueError, match="dummy"):
        find_checkpoint(ModelConfig(name="dummy"))
