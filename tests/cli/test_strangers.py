"""Hostile images and model folders give one error sentence, fast and with little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import PHOTO, Answer, assert_error, python
from tests.models.builders import edit_json, save_tiny_checkpoint

pytestmark = pytest.mark.long

MAX_CPU_SECONDS = 5
MAX_BYTES = 300 * 2**20
#: Bytes of a file, or a function that creates something else in its place.
Content = bytes | Callable[[Path], Any]


def put(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


# One process for all commands, because the start of Python takes seconds. Of each the answer, the
# seconds of the CPU, and the largest resident memory until then.
BATCH = """
import json, resource, sys, time
import svdpp.driver.pipeline
from tests.cli.shell import svdpp_here
for command in json.load(sys.stdin):
    begun = time.process_time()
    answer = svdpp_here(*command)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([vars(answer), time.process_time() - begun, peak]))
"""


def change_json(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda model: edit_json(model / name, **values)


def replace(name: str, content: Content) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink()
        put(model / name, content)

    return change


def cut(model: Path) -> None:
    os.truncate(model / UNET, (model / UNET).stat().st_size // 2)


def empty(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


UNET = "unet/diffusion_pytorch_model.safetensors"
ENDLESS = (2**62).to_bytes(8, "little") + b"{"
MODEL_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "unet missing": (lambda model: (model / UNET).unlink(), f"{UNET} is missing"),
    "unet truncated": (cut, f"{UNET} is damaged or truncated"),
    "unet of endless header": (replace(UNET, ENDLESS), f"{UNET} is damaged or truncated"),
    "unet a pipe": (replace(UNET, os.mkfifo), f"{UNET} is missing"),
    "unet a link outside": (
        replace(UNET, lambda path: path.symlink_to("/etc/passwd")),
        f"{UNET} is damaged or truncated",
    ),
    "another pipeline": (
        change_json("model_index.json", _class_name="StableDiffusionPipeline"),
        "the pipeline is 'StableDiffusionPipeline'",
    ),
    "code by module": (
        change_json("model_index.json", unet=["evil", "UNetSpatioTemporalConditionModel"]),
        "is from the module 'evil'",
    ),
    "endless JSON": (
        replace("unet/config.json", lambda path: path.symlink_to("/dev/zero")),
        "unet/config.json is missing",
    ),
    "config missing": (lambda model: (model / "vae/config.json").unlink(), "is missing"),
    "no frames": (change_json("unet/config.json", num_frames=0), "num_frames is 0"),
    "a width for all memory": (
        change_json("unet/config.json", block_out_channels=[32, 10**9]),
        "block_out_channels is [32, 1000000000]",
    ),
    "empty folder": (empty, "model_index.json is missing"),
}


def test_faults_of_model_folders(tmp_path: Path) -> None:
    sound = save_tiny_checkpoint(tmp_path / "sound")
    models = [tmp_path / name for name in MODEL_FAULTS]
    for model, (change, _) in zip(models, MODEL_FAULTS.values(), strict=True):
        shutil.copytree(sound, model)
        change(model)
    commands = [
        ("run", PHOTO, "--device", "cpu", "--model", f"./{model.name}")
        for model in (tmp_path / "gone", *models)
    ]
    done = python("-c", BATCH, cwd=tmp_path, stdin=json.dumps(commands))
    assert done.code == 0, done
    (gone, _, base), *outcomes = (json.loads(line) for line in done.out.splitlines())

    assert_error(Answer(**gone), 5, "there is no folder './gone'")
    for (name, (_, words)), outcome in zip(MODEL_FAULTS.items(), outcomes, strict=True):
        answer, cpu_seconds, peak_bytes = outcome
        assert_error(Answer(**answer), 5, repr(f"./{name}"), words)
        assert cpu_seconds < MAX_CPU_SECONDS
        assert peak_bytes - base < MAX_BYTES
    assert not (tmp_path / "out").exists()
