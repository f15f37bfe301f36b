"""Hostile model folders give one error sentence, fast and with little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import PHOTO, Answer, assert_error, python
from tests.models.builders import edit_json, save_tiny_checkpoint

MAX_CPU_SECONDS = 5
MAX_BYTES = 300 * 2**20

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


def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Replaces a file by what `make` creates."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


INDEX, CONFIG = "model_index.json", "unet/config.json"
UNET = "unet/diffusion_pytorch_model.safetensors"
DAMAGED = f"{UNET} is damaged or truncated"
ENDLESS = (2**62).to_bytes(8, "little") + b"{"
PASSWORDS = instead(lambda path: path.symlink_to("/etc/passwd"))
ENDLESS_JSON = instead(lambda path: path.symlink_to("/dev/zero"))
EVIL = partial(edit_json, unet=["evil", "UNetSpatioTemporalConditionModel"])
WIDE = partial(edit_json, block_out_channels=[32, 10**9])
#: The file that is changed, how, and words of the error.
MODEL_FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "unet missing": (UNET, os.unlink, f"{UNET} is missing"),
    "unet truncated": (UNET, lambda path: os.truncate(path, 100_000), DAMAGED),
    "unet of endless header": (UNET, lambda path: path.write_bytes(ENDLESS), DAMAGED),
    "unet a pipe": (UNET, instead(os.mkfifo), f"{UNET} is missing"),
    "unet a link outside": (UNET, PASSWORDS, DAMAGED),
    "another pipeline": (INDEX, partial(edit_json, _class_name="Other"), "pipeline is 'Other'"),
    "code by module": (INDEX, EVIL, "is from the module 'evil'"),
    "index missing": (INDEX, os.unlink, f"{INDEX} is missing"),
    "config missing": ("vae/config.json", os.unlink, "is missing"),
    "endless JSON": (CONFIG, ENDLESS_JSON, f"{CONFIG} is missing"),
    "no frames": (CONFIG, partial(edit_json, num_frames=0), "num_frames is 0"),
    "a width for all memory": (CONFIG, WIDE, "block_out_channels is [32, 1000000000]"),
}


@pytest.mark.long
def test_faults_of_model_folders(tmp_path: Path) -> None:
    sound = save_tiny_checkpoint(tmp_path / "sound")
    for name, (file, change, _) in MODEL_FAULTS.items():
        change(shutil.copytree(sound, tmp_path / name) / file)
    commands = [
        ("run", PHOTO, "--device", "cpu", "--model", f"./{name}")
        for name in ("gone", *MODEL_FAULTS)
    ]
    done = python("-c", BATCH, cwd=tmp_path, stdin=json.dumps(commands))
    assert done.code == 0, done
    (gone, _, base), *outcomes = (json.loads(line) for line in done.out.splitlines())

    assert_error(Answer(**gone), 5, "there is no folder './gone'")
    for (name, (*_, words)), outcome in zip(MODEL_FAULTS.items(), outcomes, strict=True):
        answer, cpu_seconds, peak_bytes = outcome
        assert_error(Answer(**answer), 5, repr(f"./{name}"), words)
        assert cpu_seconds < MAX_CPU_SECONDS
        assert peak_bytes - base < MAX_BYTES
    assert not (tmp_path / "out").exists()
