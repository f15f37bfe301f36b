"""Clips from a video or with LoRAs, on the command line: made, verified and resumed as others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from svdpp.config import OutputConfig
from svdpp.media.video import write_clip
from tests.cli.shell import PHOTO, ROOT, assert_error, svdpp_here
from tests.models.builders import save_tiny_lora
from tests.models.tiny_families import save_tiny, save_tiny_wan

SIZES = ("--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Wan for text."""
    return str(save_tiny_wan(tmp_path_factory.mktemp("wan")))


def save_video(path: Path, seed: int = 0) -> str:
    """Seven frames of 64 x 48."""
    frames = np.random.default_rng(seed).integers(0, 256, (7, 48, 64, 3), dtype=np.uint8)
    write_clip(frames, OutputConfig(path=str(path)), fps=16, metadata={})
    return str(path)


def given(model: str, *more: str, family: tuple[str, ...] = ("--family", "wan_v2v")) -> list[str]:
    asked = ("--steps", "4", "--device", "cpu", "--threads", "1", "--gpus", "2", *SIZES)
    return ["--model", model, *family, *asked, "--prompt", "the sea", *more]


@pytest.mark.processes
@pytest.mark.long
def test_a_clip_from_a_video_is_made_and_verified(model: str, tmp_path: Path) -> None:
    video, out = save_video(tmp_path / "talk.mp4"), tmp_path / "out"
    asked = given(model, "--param", "strength=0.6", "--out", str(out))
    answer = svdpp_here("run", video, *asked)
    assert answer.code == 0, answer.err
    clip = out / "talk_0.mp4"
    record = json.loads(Path(f"{clip}.json").read_text())
    assert (record["family"], record["strength"], record["num_inference_steps"]) == (
        *("wan_v2v", 0.6, 4),
    )
    answer = svdpp_here("verify", str(clip), "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["checks"]
    save_video(tmp_path / "talk.mp4", seed=1)
    assert_error(svdpp_here("verify", str(clip)), 7, "is not at")
    assert_error(svdpp_here("run", video, *asked, "--resume"), 2, "input_sha256")


def test_what_no_clip_can_be_made_of_is_refused(model: str, tmp_path: Path) -> None:
    video, out = save_video(tmp_path / "talk.mp4"), ("--out", str(tmp_path / "out"), "--dry-run")
    nine = ("--frames", "9")
    for arguments, code, words in (
        ((video, *given(model, family=()), *out), 7, "is not an image in PNG"),
        ((video, *given(model, *nine), *out), 7, "has 7 of the 9 frames"),
        ((*given(model), *out), 2, "needs a video"),
        ((video, *given("demo"), *out), 2, "--family 'wan_v2v' does not run"),
        ((PHOTO, *given(model, family=("--family", "ltx")), *out), 2, "does not run"),
        ((video, *given(model, "--param", "strength=0.001"), *out), 2, "the limit is 1000"),
        ((video, *given(model, "--param", "strength=0"), *out), 2, "strength must be above 0"),
    ):
        assert_error(svdpp_here("run", *arguments), code, words)


@pytest.mark.parametrize("changes", [{"boundary_ratio": 0.875}, {"expand_timesteps": True}])
def test_models_that_the_pipeline_cannot_run_are_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = str(save_tiny_wan(tmp_path, **changes))  # type: ignore[arg-type]
    answer = svdpp_here("run", PHOTO, *given(folder), "--dry-run", "--out", str(tmp_path / "out"))
    assert_error(answer, 5, "only Wan 2.1 for text makes clips from a video")


@pytest.fixture(scope="module")
def animate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Wan Animate."""
    return str(save_tiny("wan_animate", tmp_path_factory.mktemp("animate")))


@pytest.mark.processes
@pytest.mark.long
def test_a_clip_with_further_videos_is_made_verified_and_resumed(
    animate: str, tmp_path: Path
) -> None:
    inputs, out = tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    pose = save_video(inputs / "pose.mp4")
    videos = ("--video", f"pose_video={pose}", "--video", f"face_video={PHOTO}")
    asked = given(animate, *videos, "--out", str(out), family=())
    assert (answer := svdpp_here("run", PHOTO, *asked)).code == 0, answer.err
    (clip,) = out.glob("*.mp4")
    record = json.loads(Path(f"{clip}.json").read_text())
    assert record["videos"]["pose_video"] == "../inputs/pose.mp4"
    assert (answer := svdpp_here("verify", str(clip), "--json")).code == 0, answer.err
    assert all(check["equal"] for check in json.loads(answer.out)["checks"])
    again = svdpp_here("run", PHOTO, *asked, "--resume")
    assert again.code == 0, again.err
    assert json.loads(Path(f"{clip}.json").read_text()) == record
    (inputs / "pose.mp4").rename(inputs / "moved.mp4")
    assert_error(svdpp_here("verify", str(clip)), 7, "the pose_video of", "--image FOLDER")
    (inputs / "photo.jpg").write_bytes(Path(PHOTO).read_bytes())
    assert svdpp_here("verify", str(clip), "--image", str(inputs)).code == 0
    save_video(inputs / "pose.mp4", seed=1)
    refused = svdpp_here("run", PHOTO, *asked, "--resume")
    assert_error(refused, 2, "videos_sha256")
    again = svdpp_here("run", PHOTO, *asked, "--overwrite")
    assert again.code == 0, again.err
    other = json.loads(Path(f"{clip}.json").read_text())
    assert other["videos_sha256"]["face_video"] == record["videos_sha256"]["face_video"]
    assert other["latents_sha256"] != record["latents_sha256"]


def test_videos_that_a_family_does_not_take_are_refused(animate: str, tmp_path: Path) -> None:
    pose, face = f"--video=pose_video={PHOTO}", f"--video=face_video={PHOTO}"
    few = save_video(tmp_path / "few.mp4")
    for videos, code, words in (
        ((pose,), 2, "needs the video face_video\nhint: give --video face_video=FILE"),
        (
            (pose, f"--video=face_vdeo={PHOTO}"),
            2,
            "no video 'face_vdeo'\nhint: pose_video, face_video",
        ),
        ((pose, face, f"--video=mask_video={PHOTO}"), 2, "takes no video 'mask_video'"),
        ((pose, "--video=face_video"), 2, "--video takes NAME=FILE, got 'face_video'"),
        ((pose, f"--video=face_video={tmp_path / 'gone.mp4'}"), 7, "does not exist"),
        ((pose, f"--video=face_video={few}", "--frames", "9"), 7, "has 7 of the 9 frames"),
        ((pose, face, "--frames", "81"), 2, "5 to 77, one segment"),
    ):
        asked = given(animate, *videos, "--dry-run", "--out", str(tmp_path / "out"), family=())
        assert_error(svdpp_here("run", PHOTO, *asked), code, words)
    other = svdpp_here("run", PHOTO, pose, "--model", "demo", "--dry-run", "--out", str(tmp_path))
    assert_error(other, 2, "the family svd takes no video 'pose_video'")
    about = json.loads(svdpp_here("models", "wan_replace", "--json").out)["families"][0]
    assert about["inputs"] == ["an image, pose_video, face_video, background_video, mask_video"]


# --- LoRAs ----------------------------------------------------------------------------------------

ASKED = ("--prompt", "the sea", "--steps", "4", "--world", "2", "--split", "balanced")


def test_the_forecast_of_four_steps_on_four_ranks_is_what_plan_prints() -> None:
    table = (ROOT / "docs/lora.md").read_text(encoding="utf-8").split("| 100 clips on 4 ranks |")[1]
    rows = [line.split("|")[2:5] for line in table.splitlines()[2:6]]
    asked = ("plan", "--gpus", "4", "--clips", "100", "--encode-seconds", "1", "--json")
    few = ("--steps", "4", "--step-seconds", "6", "--expert-boundary", "2")
    many = ("--steps", "40", "--step-seconds", "12", "--expert-boundary", "17")
    told = [
        json.loads(svdpp_here(*asked, "--decode-seconds", "3", *steps, "--split", split).out)
        for steps, split in ((many, "balanced"), (few, "balanced"), (few, "alternating"))
    ]
    told = [plan["forecast"] for plan in told]
    told.append(told[1]["data_parallel"])
    for row, forecast in zip(rows, told, strict=True):
        names = ("seconds_per_clip", "first_clip_seconds", "makespan_seconds")
        written = [float(cell.strip().removesuffix(" s").replace(",", "")) for cell in row]
        assert written == pytest.approx([forecast[name] for name in names], rel=0.001)


@pytest.mark.processes
@pytest.mark.long
def test_clips_with_loras_are_made_verified_and_told_apart(tmp_path: Path) -> None:
    folder, out = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875), tmp_path / "out"
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    model = ("--model", str(folder), "--device", "cpu", "--threads", "1", *SIZES, *ASKED)
    loras = ("--lora", f"{high}:0.5:high", "--lora", f"{low}:low")

    made = svdpp_here("run", *model, *loras, "--out", str(out))
    assert made.code == 0, made
    (clip,) = out.glob("*.mp4")
    metadata = json.loads(Path(f"{clip}.json").read_text())
    assert [(each["weight"], each["expert"]) for each in metadata["lora"]] == [
        (0.5, "high"),
        (1.0, "low"),
    ]
    proof = svdpp_here("verify", str(clip))
    assert (proof.code, "bitwise equal" in proof.out) == (0, True), proof

    again = svdpp_here("run", *model, *loras, "--out", str(out), "--resume")
    assert (again.code, "was finished" in again.out) == (0, True), again
    for others in ((), (*loras[:2], "--lora", f"{low}:0.9:low")):
        other = svdpp_here("run", *model, *others, "--out", str(out), "--resume")
        assert_error(other, 2, "exists with another lora")

    save_tiny_lora(folder, high, seed=3)
    changed = svdpp_here("verify", str(clip))
    assert "has changed since the clip was made" in changed.out + changed.err
    assert changed.code != 0
