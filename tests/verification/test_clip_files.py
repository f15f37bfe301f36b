"""Clips are found by JSON, file and folder, and their photographs by hash."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from svdpp.config import OutputConfig, VideoFormat
from svdpp.errors import InputError, RequestError
from svdpp.media import video
from svdpp.verification.clip_files import (
    ClipCheck,
    _distance,
    check_file,
    find_clips,
    find_photo,
    read_clip,
)
from tests.cli.shell import PHOTO
from tests.verification.clips import frames_of, put_clip, write_json


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as `run` writes it, with a clip of each format."""
    folder = tmp_path / "out"
    folder.mkdir()
    for format in ("mp4", "gif", "webp", "frames"):
        put_clip(folder, "a", format)  # type: ignore[arg-type]
    (folder / "run.json").write_text('{"schema_version": 1, "clips": []}')
    monkeypatch.chdir(tmp_path)
    return folder


def _found(*inputs: str) -> list[str]:
    return [str(path) for path in find_clips(inputs)]


ALL = ["out/a.gif.json", "out/a.json", "out/a.mp4.json", "out/a.webp.json"]


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize(
    ("inputs", "clips"),
    [
        (["out"], ALL),
        (["out/"], ALL),
        ([*ALL, "out/run.json"], ALL),
        (["out/a.mp4"], ["out/a.mp4.json"]),
        (["out/a"], ["out/a.json"]),
        (["out/a.webp", "out/a.webp.json"], ["out/a.webp.json"]),
        (["out/a.mp4", "out/a.gif"], ["out/a.gif.json", "out/a.mp4.json"]),
    ],
)
def test_what_inputs_name(inputs: list[str], clips: list[str]) -> None:
    assert sorted(_found(*inputs)) == clips


def test_a_clip_without_its_json_is_found_by_its_file(out: Path) -> None:
    for path in out.glob("a*.json"):
        path.unlink()
    found = _found("out")
    assert found == ["out/a", "out/a.gif", "out/a.mp4", "out/a.webp"]
    for path in found:
        clip = read_clip(Path(path))
        assert (clip.json_path, clip.metadata["seed"]) == (None, 1)
        assert clip.metadata["file_sha256"] is None


def test_what_is_no_clip_is_passed_over_and_what_is_damaged_is_not(out: Path) -> None:
    (out / "costs.json").write_text('{"step_seconds": 1}')
    (out / "holiday.mp4").write_bytes(b"no clip")
    (out / "b.mp4.json").write_text('{"cut sh')
    assert sorted(_found("out")) == sorted([*ALL, "out/b.mp4.json"])
    with pytest.raises(InputError, match=r"b\.mp4\.json' is not a clip's JSON"):
        read_clip(out / "b.mp4.json")


@pytest.mark.usefixtures("out")
def test_folders_of_photographs_are_none(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    shutil.copy(PHOTO, photos)
    Image.open(PHOTO).resize((64, 48)).save(photos / "still.webp")
    Image.open(PHOTO).resize((64, 48)).save(photos / "00000.png")
    for inputs in (["photos"], ["photos/rocket.jpg"], ["photos/*.webp"], ["photos/still.webp"]):
        assert _found(*inputs) == []
    assert _found() == []
    with pytest.raises(RequestError, match=r"' is a finished clip, 'photos' is not"):
        find_clips(["photos", "out"])
    for missing in ("out/no.json", "out/deleted.mp4"):
        assert _found(missing) == [missing]


def test_what_is_not_there_is_an_error(out: Path) -> None:
    with pytest.raises(InputError, match="is not a clip's JSON"):
        read_clip(out / "run.json")
    (out.parent / "empty").mkdir()
    (out.parent / "empty" / "run.json").write_text('{"clips": []}')
    with pytest.raises(InputError, match="there is no clip in the folder 'empty'"):
        find_clips(["empty"])
    with pytest.raises(InputError, match=r"run.json' is a run's manifest, not a clip"):
        find_clips(["out/run.json"])
    for name in ("gone.mp4", "gone.json"):
        with pytest.raises(InputError):
            read_clip(out / name)
    plain = OutputConfig(path=str(out / "plain.mp4"))
    video.write_clip(frames_of(1), plain, fps=7, metadata={"seed": 1})
    with pytest.raises(InputError, match=r"the metadata in .*plain.mp4' is not a clip's"):
        read_clip(out / "plain.mp4")


def test_a_json_vouches_for_the_file_beside_it_alone(out: Path) -> None:
    """A JSON copied beside another video does not lead back to its own video."""
    shutil.copy(out / "a.mp4.json", out / "b.mp4.json")
    assert read_clip(out / "b.mp4.json").path == out / "b.mp4"
    renamed = [(out / f"a.mp4{end}").rename(out / f"c.mp4{end}") for end in ("", ".json")]
    assert read_clip(renamed[1]).path == renamed[0]


@pytest.mark.parametrize("output", ["../a.mp4", "/etc/passwd", "", "..", "a/b.mp4", "\0"])
def test_a_json_names_no_file_outside_its_folder(output: str, out: Path) -> None:
    record = json.loads((out / "a.mp4.json").read_text())
    (out / "x.json").write_text(json.dumps({**record, "output": output}))
    with pytest.raises(InputError, match=r"output is refused: not a file name"):
        read_clip(out / "x.json")


# --- photographs --------------------------------------------------------------------------------


def test_the_photograph_is_found_where_it_was_then_beside_the_clip(out: Path) -> None:
    clip = read_clip(out / "a.mp4")
    assert find_photo(clip, None).samefile(PHOTO)
    moved = out.parent / "moved"
    moved.mkdir()
    for end in ("", ".json"):
        shutil.copy(out / f"a.mp4{end}", moved)
    record = json.loads((moved / "a.mp4.json").read_text())
    (moved / "a.mp4.json").write_text(json.dumps({**record, "input": "photos/rocket.jpg"}))
    clip = read_clip(moved / "a.mp4.json")
    with pytest.raises(InputError, match=r"the image of 'a\.mp4' is not at '.*rocket.jpg'"):
        find_photo(clip, None)
    Image.open(PHOTO).save(moved / "another.png")
    shutil.copy(PHOTO, moved / "renamed.jpeg")
    assert find_photo(clip, None) == moved / "renamed.jpeg"


def test_image_names_the_photograph_or_its_folder(out: Path, tmp_path: Path) -> None:
    clip = read_clip(out / "a.mp4")
    other = tmp_path / "other.jpg"
    other.write_bytes(Path(PHOTO).read_bytes() + b"\0")
    assert find_photo(clip, Path(PHOTO)) == Path(PHOTO)
    with pytest.raises(InputError, match=r"the image of 'a.mp4' is not at '.*other.jpg'"):
        find_photo(clip, other)
    with pytest.raises(InputError, match=r"the image of 'a.mp4' is not at '.*'") as caught:
        find_photo(clip, tmp_path)
    assert clip.metadata["input_sha256"] in caught.value.hint
    shutil.copy(PHOTO, tmp_path / "same.jpg")
    assert find_photo(clip, tmp_path) == tmp_path / "same.jpg"


def test_a_pipe_beside_a_clip_is_not_waited_for(out: Path) -> None:
    record = json.loads((out / "a.mp4.json").read_text())
    (out / "a.mp4.json").write_text(json.dumps({**record, "input": "pipe.jpg"}))
    os.mkfifo(out / "pipe.jpg")
    with pytest.raises(InputError, match=r"the image of 'a.mp4' is not at '.*pipe.jpg'"):
        find_photo(read_clip(out / "a.mp4.json"), None)
    os.mkfifo(out / "b.mp4.json")
    with pytest.raises(InputError, match="is not a regular file"):
        read_clip(out / "b.mp4.json")


# A clip's file is what its metadata describes, or the check says what is wrong.


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
        "the metadata inside says remark None, the JSON 'mine'"
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
