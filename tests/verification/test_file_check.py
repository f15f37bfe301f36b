"""A clip's file is what its metadata describes, or the check says what is wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from svdpp.config import OutputConfig, VideoFormat
from svdpp.media import video
from svdpp.verification.clip_files import ClipCheck, _distance, check_file, read_clip
from tests.verification.clips import frames_of, put_clip, write_json

LOSSY: list[VideoFormat] = ["mp4", "gif", "webp"]


def _check(path: Path, seed: int = 1) -> ClipCheck:
    return check_file(read_clip(path), frames_of(seed))


@pytest.mark.parametrize("format", LOSSY)
def test_a_lossy_file_that_is_whole(format: VideoFormat, tmp_path: Path) -> None:
    record = put_clip(tmp_path, "a", format)
    check = _check(tmp_path / f"a.{format}.json")
    assert check.equal, check
    assert check.recorded == check.found == record["file_sha256"]
    assert check.detail == (
        f"{format} is lossy: its pixels against those of the recomputed frames, encoded here: "
        "every pixel equal"
    )
    assert _check(tmp_path / f"a.{format}").equal, "by its own metadata"


def test_frames_that_are_whole(tmp_path: Path) -> None:
    put_clip(tmp_path, "a", "frames")
    for path in (tmp_path / "a.json", tmp_path / "a"):
        check = _check(path)
        assert check.equal, check
        assert check.detail.startswith("lossless: its pixels are the recorded frames, bit for bit")


@pytest.mark.parametrize("format", [*LOSSY, "frames"])
def test_a_file_that_is_gone(format: VideoFormat, tmp_path: Path) -> None:
    put_clip(tmp_path, "a", format)
    path = tmp_path / f"a{video.SUFFIXES[format]}"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    check = _check(path.with_name(f"{path.name}.json"))
    assert (check.equal, check.found, check.detail) == (False, None, f"there is no {path.name!r}")


@pytest.mark.parametrize("format", [*LOSSY, "frames"])
def test_a_file_with_something_appended(format: VideoFormat, tmp_path: Path) -> None:
    put_clip(tmp_path, "a", format)
    path = tmp_path / f"a{video.SUFFIXES[format]}"
    with (path / "00002.png" if path.is_dir() else path).open("ab") as file:
        file.write(b"junk")
    check = _check(path.with_name(f"{path.name}.json"))
    assert not check.equal
    assert "its sha256 is not the recorded one: it was changed or replaced" in check.detail


@pytest.mark.parametrize("format", [*LOSSY, "frames"])
def test_another_clip_in_the_place(format: VideoFormat, tmp_path: Path) -> None:
    put_clip(tmp_path, "a", format)
    other = put_clip(tmp_path, "b", format, seed=2)
    suffix = video.SUFFIXES[format]
    a, b = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    shutil.rmtree(a) if a.is_dir() else a.unlink()
    b.rename(a)
    check = _check(a.with_name(f"{a.name}.json"))
    assert not check.equal
    assert check.found == other["file_sha256"]
    assert "its sha256 is not the recorded one" in check.detail
    assert f"the metadata inside says output {b.name!r}, the JSON {a.name!r}" in check.detail


@pytest.mark.parametrize("format", [*LOSSY, "frames"])
def test_a_forgery_that_is_right_in_all_but_the_video(format: VideoFormat, tmp_path: Path) -> None:
    """The embedded metadata, the JSON and the file's hash agree; the pixels are another clip's."""
    put_clip(tmp_path, "a", format, frames=frames_of(4))
    check = _check(tmp_path / f"a{video.SUFFIXES[format]}.json")
    assert check.found == check.recorded
    assert not check.equal
    if format == "frames":
        assert check.detail == "its pixels are not the recorded frames"
    else:
        assert f"{format} is lossy: its pixels against" in check.detail
        assert " dB, " in check.detail


def test_one_pixel_of_a_frame(tmp_path: Path) -> None:
    frames = frames_of(1)
    frames[2, 5, 7, 1] ^= 1
    put_clip(tmp_path, "a", "frames", frames=frames)
    assert _check(tmp_path / "a.json").detail == "its pixels are not the recorded frames"


@pytest.mark.parametrize("format", [*LOSSY, "frames"])
def test_a_frame_too_few(format: VideoFormat, tmp_path: Path) -> None:
    put_clip(tmp_path, "a", format, frames=frames_of(1)[:2])
    check = _check(tmp_path / f"a{video.SUFFIXES[format]}.json")
    assert not check.equal
    if format != "frames":
        assert "it holds 2 frames of 48x32 instead of 3 frames of 48x32" in check.detail


def test_a_json_that_was_edited(tmp_path: Path) -> None:
    record = put_clip(tmp_path, "a")
    output = OutputConfig(path=str(tmp_path / "a.mp4"))
    write_json(output, {**record, "num_inference_steps": 50})
    check = _check(tmp_path / "a.mp4.json")
    assert check.detail == "the metadata inside says num_inference_steps 2, the JSON 50"
    write_json(output, {**record, "remark": "mine"})
    assert (
        "the metadata inside says remark nothing, the JSON 'mine'"
        in _check(tmp_path / "a.mp4.json").detail
    )


def test_a_file_that_cannot_be_played(tmp_path: Path) -> None:
    put_clip(tmp_path, "a")
    (tmp_path / "a.mp4").write_bytes(b"no video")
    check = _check(tmp_path / "a.mp4.json")
    assert not check.equal
    assert "a.mp4' cannot be read as" in check.detail


def test_an_encoder_of_another_version_is_told_by_its_distance(tmp_path: Path) -> None:
    """Its pixels are similar but not equal, and the detail says how similar."""
    record = put_clip(tmp_path, "a")
    output = OutputConfig(path=str(tmp_path / "a.mp4"), crf=24)
    embedded = {name: value for name, value in record.items() if name != "file_sha256"}
    sha256 = video.write_clip(frames_of(1), output, fps=7, metadata=embedded)
    write_json(output, {**record, "file_sha256": sha256})
    check = _check(tmp_path / "a.mp4.json")
    assert check.equal, check
    assert " dB, " in check.detail


@pytest.mark.parametrize(
    ("levels", "psnr_db"), [(0, math.inf), (1, 20 * math.log10(255)), (255, 0.0)]
)
def test_the_distance_of_two_clips(levels: int, psnr_db: float) -> None:
    black = np.zeros((2, 4, 4, 3), np.uint8)
    assert _distance(black, black + np.uint8(levels)) == (pytest.approx(psnr_db), levels)


def test_a_clip_of_version_0_3_has_no_hash_of_its_file(tmp_path: Path) -> None:
    record = put_clip(tmp_path, "a", schema_version=1)
    (tmp_path / "a.mp4.json").unlink()
    old = {name: value for name, value in record.items() if name != "file_sha256"}
    (tmp_path / "a.json").write_text(json.dumps(old))
    for path in (tmp_path / "a.json", tmp_path / "a.mp4"):
        check = _check(path)
        assert check.equal, check
        assert check.recorded is None
        assert check.detail.endswith("; no sha256 of the file is recorded")


def test_a_still_whose_frames_are_all_alike(tmp_path: Path) -> None:
    """gif and webp merge its equal frames into one."""
    still = np.repeat(frames_of(1)[:1], 3, axis=0)
    for format in LOSSY:
        sha256 = video.frames_sha256(still)
        put_clip(tmp_path, "a", format, frames=still, frames_sha256=sha256)
        check = check_file(read_clip(tmp_path / f"a.{format}.json"), still)
        assert check.equal, check
