"""Commands from end to end: real input files, real clips, which are read back frame by frame."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.driver import pipeline
from svdpp.errors import recorded_path
from svdpp.media.inputs import example_images
from svdpp.media.video import clip_sha256, read_frames, read_metadata
from svdpp.verification.reference import stack_frames
from svdpp.verification.verify import verify
from tests.support.builders import edit_json, save_tiny_checkpoint
from tests.support.damage import Damage
from tests.support.shell import PHOTO, Answer, assert_error, python, svdpp_here
from tests.support.trace_format import check_trace

#: Values in a clip's JSON that come from its request.
RECORDED = {
    **{"schema_version": 2, "resumed_from_step": 0, "output": "astronaut_3.mp4", "seed": 3},
    **{"dtype": "fp32", "device": "cpu", "world_size": 2, "split": "uniform", "num_threads": 1},
    **{"num_inference_steps": 4, "num_frames": 3, "decode_chunk_size": 3, "height": 64},
    **{"width": 64, "fps": 7, "fit": "stretch", "format": "mp4", "crf": 18},
}
PHOTOS = example_images()[:2]
NAMES = [(photo.stem, seed) for photo in PHOTOS for seed in (3, 4)]
KNOBS = ["--steps", "4", "--height", "64", "--width", "64", "--frames", "3", "--threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def _diffusers_sha256(pipe: Any, photo: Path, seed: int) -> tuple[str, str]:
    """Make a clip with diffusers alone; return the sha256 of its final latent and of its frames."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    last: dict[str, Any] = {}

    def keep(_pipe: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        last.update(tensors)
        return {}

    frames = pipe(
        Image.open(photo).convert("RGB"),
        height=64,
        width=64,
        num_frames=3,
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(seed),
        callback_on_step_end=keep,
    ).frames[0]
    torch.set_num_threads(threads)
    latent = last["latents"].contiguous().numpy().tobytes()
    pixels = stack_frames(frames).tobytes()
    return hashlib.sha256(latent).hexdigest(), hashlib.sha256(pixels).hexdigest()


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Answer]:
    """Finished `svdpp run` with two clips of each of two images: command, output folder, result.

    The command runs in this process; tests/serve/test_run_at_server.py runs one in a new process.
    """
    out = tmp_path_factory.mktemp("made") / "out"
    command = ["run", *PHOTOS, "--device", "cpu", "--world", "2", "--model", tiny, *KNOBS]
    whole = [*map(str, command), "--seeds", "3-4"]
    return whole, out, svdpp_here(*whole, "--out", str(out), "--json", "-q")


def test_run_makes_clips_that_are_diffusers_own(
    made: tuple[list[str], Path, Answer], tiny: Path
) -> None:
    _, out, done = made
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    records = result["clips"]
    assert result["folder"] == str(out)
    assert {name: records[0][name] for name in RECORDED} == RECORDED
    assert [record["output"] for record in records] == [f"{n}_{seed}.mp4" for n, seed in NAMES]
    pipe = StableVideoDiffusionPipeline.from_pretrained(tiny, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for record, (stem, seed) in zip(records, NAMES, strict=True):
        clip = out / f"{stem}_{seed}.mp4"
        frames = read_frames(clip, "mp4")
        assert frames.shape == (3, 64, 64, 3)
        assert json.loads(clip.with_suffix(".mp4.json").read_text()) == record
        assert {**read_metadata(clip), "file_sha256": clip_sha256(clip)} == record
        photo = next(p for p in PHOTOS if p.stem == stem)
        assert record["input_sha256"] == hashlib.sha256(photo.read_bytes()).hexdigest()
        assert (record["seed"], record["input"]) == (seed, recorded_path(photo, out))
        assert 0 < record["compute_seconds"] <= record["wall_seconds"] + 0.01
        latents, pixels = _diffusers_sha256(pipe, photo, seed)
        assert record["latents_sha256"] == latents
        assert record["frames_sha256"] == pixels


def test_a_run_leaves_its_clips_their_json_and_a_manifest(
    made: tuple[list[str], Path, Answer],
) -> None:
    _, out, _ = made
    suffixes = ("mp4", "mp4.json")
    clip_files = [f"{stem}_{seed}.{suffix}" for stem, seed in NAMES for suffix in suffixes]
    assert sorted(p.name for p in out.iterdir()) == sorted([*clip_files, "run.json", "clips.jsonl"])
    manifest = json.loads((out / "run.json").read_text())
    assert [clip["output"] for clip in manifest["clips"]] == clip_files[::2]
    assert {clip["state"] for clip in manifest["clips"]} == {"done"}
    assert (out / "run.json").stat().st_size < 10_000


def test_the_report_of_a_run_has_the_figures_of_its_ranks(
    made: tuple[list[str], Path, Answer],
) -> None:
    _, out, _ = made
    report = json.loads(svdpp_here("report", str(out), "--json").out)
    assert report["clips"] == {"done": 4}
    assert report["findings"]
    first, last = report["measured"]["ranks"]
    assert (first["step"]["count"], last["step"]["count"]) == (8, 8)
    assert (last["decode"]["count"], last["write"]["count"]) == (4, 4)
    assert first["peak_bytes"] > 2**20


def test_the_same_run_again_makes_only_what_is_missing(
    made: tuple[list[str], Path, Answer], tmp_path: Path
) -> None:
    """A repeated run is refused without `--resume`; with it, only missing clips are made.

    With another setting, `--resume` is refused.
    """
    command, out, _ = made
    again = Path(shutil.copytree(out, tmp_path / "out"))
    before = {path: path.read_bytes() for path in again.iterdir()}
    whole = (*command, "--out", str(again))
    assert_error(svdpp_here(*whole), 2, "--resume")
    missing = again / f"{PHOTOS[0].stem}_4.mp4"
    missing.unlink()
    skipping = svdpp_here(*whole, "--resume")
    assert skipping.code == 0, skipping
    assert skipping.out.count("was finished") == 3
    assert np.array_equal(read_frames(missing, "mp4").shape, (3, 64, 64, 3))
    for path, content in before.items():
        if path.name.partition(".")[0] not in (missing.stem, "run", "clips"):
            assert path.read_bytes() == content, path
    quiet = ("--quiet",)  # no remark about the images' aspect ratio
    assert_error(
        svdpp_here(*whole, "--resume", "--crf", "30", *quiet),
        2,
        "another value of crf: 18 instead of 30",
    )


def test_verify_catches_a_planted_fault_with_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = partial(verify, fault=Damage("ulp", 1, 1))
    monkeypatch.setattr("svdpp.verification.verify.verify", damaged)
    shape = ("--latent-shape", "1", "4", "2", "8", "8")
    done = svdpp_here("verify", "--model", "dummy", *shape, "--steps", "4", "--json")
    assert done.code == 3
    report = json.loads(done.out)
    assert (report["equal"], report["bitwise"]) == (False, False)
    bad = [check for check in report["checks"] if not check["equal"]]
    assert [(check["clip"], check["step"], check["rank"]) for check in bad] == [(1, 4, 1)]
    where = "first at frame 0, channel 2, row 0, column 0 (index [0, 2, 0, 0, 0])"
    assert f"clip 1, the final latent, computed by rank 1: {where}, max difference" in done.err


@pytest.mark.slow
@pytest.mark.full  # other tests use torchrun with two and three ranks
def test_torchrun_joins_its_world(tmp_path: Path) -> None:
    done = python(
        *("-m", "torch.distributed.run", "--nproc-per-node=4", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=localhost:0", "--log-dir", str(tmp_path)),
        *("-m", "svdpp", "simulate", "--total-steps", "28", "--device", "cpu"),
        *("--dtype", "fp32", "--latent-shape", "1", "4", "2", "8", "8", "--json"),
    )
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["world_size"], report["clips"], report["num_steps"]) == (4, 8, 28)
    assert [rank["steps_done"] for rank in report["ranks"]] == [56] * 4


#: Values in the JSON of a simulation that come from its plan.
REHEARSED = {
    **{"schema_version": 1, "num_steps": 4, "world_size": 2, "split": "uniform", "replicas": 1},
    **{"decoders": 1, "cfg_parallel": 1, "decode_ranks": 1, "model": "dummy", "dtype": "fp32"},
    **{"backend": "gloo", "clips": 3},
}


@pytest.mark.slow
def test_a_rehearsal_says_what_it_measured_and_leaves_trace_and_log(tmp_path: Path) -> None:
    trace, log = tmp_path / "new/trace.json", tmp_path / "new/log.jsonl"
    done = svdpp_here(
        *("simulate", "--world", "2", "--clips", "3", "--steps", "4", "--json", "--quiet", "-v"),
        *("--latent-shape", "1", "4", "2", "8", "8"),
        *("--trace", str(trace), "--log-file", str(log)),
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert {name: result[name] for name in REHEARSED} == REHEARSED
    for times in (result["measured"], result["forecast"]):
        assert times["makespan_seconds"] >= times["first_clip_seconds"] > 0
        assert 0 <= times["bubble"] < 1
    shares = [(rank["start"], rank["end"], rank["steps_done"]) for rank in result["ranks"]]
    assert shares == [(0, 2, 6), (2, 4, 6)]
    assert all(rank["compute_seconds"] > 0 for rank in result["ranks"])

    events = json.loads(trace.read_text())
    check_trace(events)
    assert events[0]["args"]["world_size"] == 2
    assert sum(event.get("cat") == "step" for event in events) == 3 * 4

    records = [json.loads(line)["record"] for line in log.read_text().splitlines()]
    said = [(record["extra"]["rank"], record["message"]) for record in records]
    assert {rank for rank, text in said if text.startswith("ready: steps")} == {0, 1}
    sends = [text for rank, text in said if rank == 0 and text.startswith("send")]
    receives = [text for rank, text in said if rank == 1 and text.startswith("recv")]
    assert len(sends) == len(receives) == 3
    assert "send clip 0 at step 2 to rank 1: 2048 bytes in" in sends[0]
    assert sum("step" in text and text.startswith("clip") for _, text in said) == 12


@pytest.mark.slow
def test_a_verified_dummy_has_no_word_of_diffusers() -> None:
    answer = svdpp_here(
        *("verify", "--model", "dummy", "--device", "cpu", "--latent-shape", "1", "4", "2", "8"),
        *("8", "--steps", "2", "--threads", "1"),
    )
    assert answer.code == 0, answer
    assert "comparisons with the sequential result" in answer.out
    assert "diffusers" not in answer.out + answer.err


@pytest.mark.slow
@pytest.mark.parametrize("checked", ["before the start", "by a rank"])
def test_a_config_that_lacks_a_key_is_the_checkpoints_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: str
) -> None:
    """A config without a required key is reported as a fault of the checkpoint.

    diffusers uses a default instead of the key. The memory estimate finds the fault before the
    start; if the estimate is skipped, a rank finds the fault.
    """
    model, out = save_tiny_checkpoint(tmp_path / "model"), tmp_path / "out"
    edit_json(model / "unet/config.json", cross_attention_dim=None)
    if checked == "by a rank":
        monkeypatch.setattr(pipeline, "check_memory", lambda *_: None)
    answer = svdpp_here(
        "run", PHOTO, "--model", str(model), "--device", "cpu", "--out", str(out), *KNOBS
    )
    assert answer.code == 5, answer
    assert "unet" in answer.err
    assert "Traceback" not in answer.err
    assert "--height" not in answer.err
    assert not (out / "run.json").exists()
