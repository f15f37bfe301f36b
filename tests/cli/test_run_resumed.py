"""Killed runs that are resumed, file names with control characters, and full disks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdpp.driver import manifest
from svdpp.media.inputs import example_images
from svdpp.media.output_files import lock_folder
from svdpp.media.video import read_frames
from tests.support.builders import save_tiny_checkpoint
from tests.support.dummies import HANG_SECONDS
from tests.support.processes import wait_until
from tests.support.shell import (
    DEMO,
    PHOTO,
    PYTHONPATH,
    TINY,
    Answer,
    assert_error,
    svdpp_and_modules,
    svdpp_here,
)
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.slow

KNOBS = ["--steps", "6", "--height", "64", "--width", "64", "--frames", "2", "--threads", "1"]
PHOTOS = [str(photo) for photo in example_images()[:2]]


def _command(*arguments: object) -> list[str]:
    return ["run", *map(str, arguments), *DEMO, *KNOBS]


def _run(*arguments: object) -> Answer:
    return svdpp_here(*_command(*arguments))


def _latents(out: Path) -> dict[str, str]:
    records = [json.loads(p.read_text()) for p in out.glob("*.json") if p.name != "run.json"]
    return {record["output"]: record["latents_sha256"] for record in records}


def test_a_killed_run_goes_on_from_its_hand_overs(tmp_path: Path) -> None:
    whole, out, kept = tmp_path / "whole", tmp_path / "out", tmp_path / "saved"
    uninterrupted = _run(*PHOTOS, "--world", 1, "--out", whole)
    assert uninterrupted.code == 0, uninterrupted.err
    keeping = ("--out", out, "--latents-dir", kept)
    plan = tmp_path / "plan.json"
    stop = {"kind": "hang", "rank": 2, "clip": 0, "place": "decode"}
    plan.write_text(json.dumps({"events": str(tmp_path / "events"), "stop": stop}))
    command = _command(*PHOTOS, "--world", 3, *keeping)
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.support.injected", str(plan), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    # Wait until the first transfer of any clip has left a latent checkpoint.
    wait_until(lambda: list(kept.glob("*_step*.safetensors")), HANG_SECONDS, "no checkpoint")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    states = [clip["state"] for clip in json.loads((out / "run.json").read_text())["clips"]]
    assert len(states) == 2
    assert set(states) <= {"pending", "running", "done"}
    resumed = _run(*PHOTOS, "--world", 2, *keeping, "--resume", "-v")
    assert resumed.code == 0, resumed.err
    assert "of them continued from an earlier run" in resumed.err
    assert _latents(out) == _latents(whole)
    assert list(kept.iterdir()) == []
    manifest = json.loads((out / "run.json").read_text())
    assert [clip["state"] for clip in manifest["clips"]] == ["done", "done"]
    assert max(clip.get("from_step", 0) for clip in manifest["clips"]) >= 2
    assert all(len(read_frames(clip, "mp4")) == 2 for clip in out.glob("*.mp4"))


@pytest.mark.full
def test_a_jobs_file_is_killed_changed_resumed_and_proven(tmp_path: Path) -> None:
    """After a kill and a change of the jobs file, only new, changed and missing clips are made.

    The lines have two sizes and two numbers of steps. All clips are verified.
    """
    shutil.copy(PHOTOS[0], tmp_path / "a.jpg")
    jobs, out, plan = tmp_path / "jobs.csv", tmp_path / "out", tmp_path / "plan.json"
    head, *lines = ("image,seed,size,steps", "a.jpg,1,,", "a.jpg,1,96x64,", "a.jpg,2,96x64,5")
    jobs.write_text("\n".join([head, *lines]))
    stop = {"kind": "hang", "rank": 1, "clip": 2, "place": "decode"}
    plan.write_text(json.dumps({"events": str(tmp_path / "events"), "stop": stop}))
    asked = ("--jobs", jobs, "--world", 2, "--out", out)
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.support.injected", str(plan), *_command(*asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    wait_until(lambda: len(list(out.glob("*.mp4.json"))) == 2, HANG_SECONDS, "no two clips")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = _latents(out)
    # A new first line is inserted, and another line is changed. The other clips keep their names.
    jobs.write_text("\n".join([head, "a.jpg,1,64x96,", lines[0], "a.jpg,1,96x64,4", lines[2]]))
    resumed = _run(*asked, "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.out.count("(was finished)") == 1
    rows = [json.loads(line) for line in (out / "clips.jsonl").read_text().splitlines()]
    names = [row["output"] for row in rows]
    assert {row["state"] for row in rows} == {"done"}
    assert names[1] == "a_1.mp4"
    assert len({*names}) == 4
    assert [(row["line"], row["width"], row["height"], row["steps"]) for row in rows] == [
        (2, 64, 96, 6),
        (3, 64, 64, 6),
        (4, 96, 64, 4),
        (5, 96, 64, 5),
    ]
    after = _latents(out)
    assert after == {row["output"]: row["latents_sha256"] for row in rows}
    assert after["a_1.mp4"] == before["a_1.mp4"]
    proof = svdpp_here("verify", str(out))
    assert proof.code == 0, proof.err
    assert "4 of 4 clips are bitwise equal" in proof.out


def test_a_second_run_into_the_folder_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with lock_folder(out):
        for options in ([out], [out, "--overwrite"], [out, "--resume"], [out / "single.mp4"]):
            second = _run(PHOTOS[0], "--world", 1, "--out", *options)
            assert_error(second, 2, f"another svdpp run is writing into {str(out)!r}")
    assert not out.exists()


def test_what_is_lost_ends_with_the_highest_code(tmp_path: Path) -> None:
    """If clips are lost for several reasons, the highest exit code counts.

    One clip's image cannot be read (code 7); the other clip's latents are not finite (code 9).
    """
    model = save_tiny_checkpoint(tmp_path / "model")
    weights = model / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["conv_in.bias"][0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n")
    inputs, out = (PHOTOS[0], tmp_path / "torn.png"), tmp_path / "out"
    command = _command(*inputs, "--world", 1, "--out", out, "--keep-going")
    done = svdpp_here(*command, "--model", str(model))
    assert done.code == 9, done.err
    assert "error: 2 of 2 clips failed: the latent is not finite after step 0" in done.err
    assert done.out.count("(failed: ") == 2


def test_clips_whose_folder_is_deleted_during_the_run_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, look = tmp_path / "out", manifest.find_missing_outputs

    def look_too_late(*given: Any) -> Any:
        shutil.rmtree(out)
        return look(*given)

    monkeypatch.setattr(manifest, "find_missing_outputs", look_too_late)
    done = _run(PHOTOS[0], "--world", 1, "--out", out)
    assert done.code == 8, done
    assert "is gone: the file was removed during the run" in done.err
    assert "svdpp verify" not in done.err


def test_control_characters_in_a_name_reach_neither_terminal_nor_log(tmp_path: Path) -> None:
    name = "a\x1b]0;title\x07\r\n12:00:00.000 INFO  rank 9 forged \x9b31m\u202egpj.jpg"
    photo = tmp_path / name
    shutil.copy(PHOTOS[0], photo)
    log = tmp_path / "log.jsonl"
    out = tmp_path / "out"
    done = _run(photo, "--world", 1, "--out", out, "-v", "--log-file", log)
    assert done.code == 0, done.err
    (tmp_path / "torn\x1b[2J.png").write_bytes(b"\x89PNG\r\n")
    lost = _run(photo, tmp_path / "torn\x1b[2J.png", "--out", out, "--resume", "--keep-going", "-v")
    assert lost.code == 7
    refused = _run(photo, "--out", out, "--dry-run")
    assert refused.code == 2
    for text in (done.out, done.err, lost.out, lost.err, refused.err):
        assert not set(text) & set("\x1b\x07\r\x9b\u202e"), text
        assert not [line for line in text.splitlines() if line.startswith("12:00:00.000")]
    assert "a\\x1b]0;title\\x07\\r\\n12:00" in done.err
    assert all(json.loads(line) for line in log.read_text().splitlines())
    assert [
        ord(char) for file in out.iterdir() for char in file.name if not char.isprintable()
    ] == []


def test_a_closed_folder_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run = ("run", PHOTO, *DEMO, *TINY, "--out", "/proc/svdpp", "--log-file", str(log))
    answer, loaded = svdpp_and_modules(*run)

    assert_error(answer, 8, "'/proc/svdpp'")
    assert log.read_text() == ""  # no rank has started, because a rank logs that it is ready
    assert "svdpp.media.output_files" in loaded
    assert "diffusers" not in loaded


@pytest.mark.full
def test_a_disk_that_fills_up_keeps_the_clips_that_are_whole(tmp_path: Path) -> None:
    plan, gate = tmp_path / "plan.json", tmp_path / "gate"
    stop = {"kind": "hang", "rank": 0, "clip": 4, "place": "encode", "until": str(gate)}
    plan.write_text(json.dumps({"events": str(tmp_path / "events"), "stop": stop}))
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        run = ("run", PHOTO, *DEMO, *TINY, "--seeds", "1-20", "--out", str(disk), "-q")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.injected", str(plan), *run, "--world", "2"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                wait_until((disk / "rocket_2.mp4.json").exists, HANG_SECONDS, "no second clip")
                _fill(disk / "filler")
                gate.touch()
                out, err = process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        clips = sorted(disk.glob("*.mp4"))

        assert_error(Answer(process.returncode, out, err), 8, "No space left on device")
        assert {disk / "rocket_1.mp4", disk / "rocket_2.mp4"} <= set(clips)
        assert len(clips) < 20
        for clip in clips:
            assert len(read_frames(clip, "mp4")) == 2
        assert [name for name in os.listdir(disk) if name.startswith(".")] == []


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
