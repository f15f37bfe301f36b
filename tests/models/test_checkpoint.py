"""Finding a checkpoint, and naming each defect of one before any weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from tests.models.builders import edit_json

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

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
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
        (content(UNET, LFS), {}, f"{UNET} is a git-lfs pointer", "git lfs pull"),
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
