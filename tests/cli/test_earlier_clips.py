"""Clips that svdpp 0.3 (3e3b864) made, before there was one engine: `verify` and `--resume`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from svdpp.media.inputs import example_photos
from tests.cli.shell import svdpp_here
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan

CLIPS = Path(__file__).parents[1] / "golden/clips_of_0_3"
PROMPTED = ("--prompt", "the sea", "--max-prompt-tokens", "8")
#: Names of the clip, its other parameters, and what saves the model.
FAMILIES: dict[str, tuple[str, tuple[str, ...], Callable[[Path], Any] | None]] = {
    "svd": ("rocket_0", ("--height=64", "--width=64", "--frames=4"), None),
    "wan": (
        "the-sea_0",
        (*PROMPTED, "--height=32", "--width=32", "--frames=5"),
        partial(save_tiny_wan, boundary_ratio=0.875),
    ),
    "ltx": (
        "the-sea_0",
        (*PROMPTED, "--height=32", "--width=64", "--frames=9"),
        save_tiny_ltx,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_clip_of_version_0_3_is_kept_and_verified(tmp_path: Path, family: str) -> None:
    name, parameters, save = FAMILIES[family]
    out, home = tmp_path / "out", {"HOME": str(tmp_path)}  # the model is recorded as ~/wan
    out.mkdir()
    for suffix in ("mp4", "mp4.json"):
        shutil.copy(CLIPS / f"{family}_0.{suffix}", out / f"{name}.{suffix}")
    if save is None:
        photo = tmp_path / "rocket.jpg"
        (rocket,) = (each for each in example_photos() if each.stem == "rocket")
        shutil.copy(rocket, photo)
        model: tuple[str, ...] = (str(photo), "--model", "demo")
    else:
        save(tmp_path / family)
        model = ("--model", str(tmp_path / family))

    run = (
        *("run", *model, *parameters, "--steps", "4", "--device", "cpu", "--world", "2"),
        *("--threads", "1", "--out"),
    )
    kept = svdpp_here(*run, str(out), "--resume", env=home)
    assert kept.code == 0, kept
    assert "already finished: 1 clip" in kept.out + kept.err

    # Another CPU may give other bits than the one that made the clip in 0.3:
    # a clip made here tells what `verify` has to compute here.
    made = svdpp_here(*run, str(tmp_path / "made"), env=home)
    assert made.code == 0, made
    metadata = f"{name}.mp4.json"
    recorded = json.loads((out / metadata).read_text())
    here = json.loads((tmp_path / "made" / metadata).read_text())
    proof = svdpp_here("verify", str(out / f"{name}.mp4"), env=home)
    hashes = ("latents_sha256", "frames_sha256")
    assert all(here[each][:12] in proof.out for each in hashes)
    same_bits = all(here[each] == recorded[each] for each in hashes)
    assert proof.code == (0 if same_bits else 3), proof
    assert ("DIFFERENT" in proof.out) is not same_bits
