"""Clips are found by JSON, file and folder, and their photographs by hash."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from svdpp.config import OutputConfig
from svdpp.errors import InputError, RequestError
from svdpp.media import video
from svdpp.verification.clip_files import find_clips, find_photo, read_clip
from tests.cli.shell import PHOTO
from tests.verification.clips import frames_of, put_clip


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


def _found(*inputs: str) -> tuple[list[str], list[str]]:
    clips, passed_over = find_clips(inputs)
    return [str(path) for path in clips], [str(path) for path in passed_over]


ALL = ["out/a.gif.json", "out/a.json", "out/a.mp4.json", "out/a.webp.json"]


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize(
    ("inputs", "clips", "passed_over"),
    [
        (["out"], ALL, []),
        (["out/"], ALL, []),
        ([*ALL, "out/run.json"], ALL, ["out/run.json"]),
        (["out/a.mp4"], ["out/a.mp4.json"], []),
        (["out/a"], ["out/a.json"], []),
        (["out/a.webp", "out/a.webp.json"], ["out/a.webp.json"], []),
        (["out/a.mp4", "out/a.gif"], ["out/a.mp4.json", "out/a.gif.json"], []),
    ],
)
def test_what_inputs_name(inputs: list[str], clips: list[str], passed_over: list[str]) -> None:
    found, others = _found(*inputs)
    assert (sorted(found), others) == (sorted(clips), passed_over)


def test_a_clip_without_its_json_is_found_by_its_file(out: Path) -> None:
    for path in out.glob("a*.json"):
        path.unlink()
    found, _ = _found("out")
    assert found == ["out/a", "out/a.gif", "out/a.mp4", "out/a.webp"]
    for path in found:
        clip = read_clip(Path(path))
        assert (clip.json_path, clip.metadata["seed"]) == (None, 1)
        assert clip.metadata["file_sha256"] is None


def test_what_is_no_clip_is_passed_over_and_what_is_damaged_is_not(out: Path) -> None:
    (out / "costs.json").write_text('{"step_seconds": 1}')
    (out / "holiday.mp4").write_bytes(b"no clip")
    (out / "b.mp4.json").write_text('{"cut sh')
    found, passed_over = _found("out")
    assert sorted(found) == sorted([*ALL, "out/b.mp4.json"])
    assert passed_over == ["out/costs.json", "out/holiday.mp4"]
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
        assert _found(*inputs) == ([], [])
    assert _found() == ([], [])
    with pytest.raises(RequestError, match=r"'out' is a finished clip, 'photos' is not"):
        find_clips(["photos", "out"])
    for missing in ("out/no.json", "out/deleted.mp4"):
        assert _found(missing) == ([missing], [])


def test_what_is_not_there_is_an_error(out: Path) -> None:
    with pytest.raises(InputError, match="is not a clip's JSON"):
        read_clip(out / "run.json")
    (out.parent / "empty").mkdir()
    (out.parent / "empty" / "run.json").write_text('{"clips": []}')
    with pytest.raises(InputError, match="there is no clip in the folder 'empty'"):
        find_clips(["empty"])
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
    with pytest.raises(InputError, match=r"the image of 'a\.mp4', is missing"):
        find_photo(clip, None)
    Image.open(PHOTO).save(moved / "another.png")
    shutil.copy(PHOTO, moved / "renamed.jpeg")
    assert find_photo(clip, None) == moved / "renamed.jpeg"


def test_image_names_the_photograph_or_its_folder(out: Path, tmp_path: Path) -> None:
    clip = read_clip(out / "a.mp4")
    other = tmp_path / "other.jpg"
    other.write_bytes(Path(PHOTO).read_bytes() + b"\0")
    assert find_photo(clip, Path(PHOTO)) == Path(PHOTO)
    with pytest.raises(InputError, match=r"other.jpg' is not the image that 'a.mp4' was made"):
        find_photo(clip, other)
    with pytest.raises(InputError, match=r"there is no image of 'a.mp4' at '.*'") as caught:
        find_photo(clip, tmp_path)
    assert clip.metadata["input_sha256"] in caught.value.hint
    shutil.copy(PHOTO, tmp_path / "same.jpg")
    assert find_photo(clip, tmp_path) == tmp_path / "same.jpg"


def test_a_pipe_beside_a_clip_is_not_waited_for(out: Path) -> None:
    record = json.loads((out / "a.mp4.json").read_text())
    (out / "a.mp4.json").write_text(json.dumps({**record, "input": "pipe.jpg"}))
    os.mkfifo(out / "pipe.jpg")
    with pytest.raises(InputError, match=r"pipe.jpg', the image of .a.mp4."):
        find_photo(read_clip(out / "a.mp4.json"), None)
    os.mkfifo(out / "b.mp4.json")
    with pytest.raises(InputError, match="is not a regular file"):
        read_clip(out / "b.mp4.json")
