"""Tests of the search for finished clips and their images, and of the checks that find damaged or
forged clip files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from svdpp.config import ModelConfig, OutputConfig, PipelineConfig, SvdSampling, VideoFormat
from svdpp.driver.clip_metadata import clip_metadata
from svdpp.errors import InputError, RequestError
from svdpp.media import video
from svdpp.media.images import read_image
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import find_checkpoint
from svdpp.verification.clip_files import (
    ClipCheck,
    check_file,
    find_clips,
    find_input_file,
    read_clip,
)
from tests.support.builders import edit_json
from tests.support.pictures import ffmpeg
from tests.support.shell import PHOTO

FORMATS: list[VideoFormat] = ["mp4", "gif", "webp", "frames"]


def frames_of(seed: int) -> video.Frames:
    """Return smooth frames for a clip, different ones for each seed."""
    index, y, x = np.mgrid[:3, :32, :48]
    pictures = np.stack([x * 3 + 20 * seed, y * 5, 40 * seed + 30 * index], -1)
    return pictures.clip(0, 255).astype(np.uint8)


def put_clip(
    folder: Path,
    name: str,
    format: VideoFormat = "mp4",
    *,
    seed: int = 1,
    frames: video.Frames | None = None,
    crf: int = 18,
    **changes: Any,
) -> Path:
    """Write a clip and its metadata as a run would; return the path of the metadata.

    The metadata describe the frames of `seed` at crf 18, except for `changes`. The video file is
    encoded at `crf`. If `frames` are given, the file has these frames, not those of `seed`.
    """
    pixels = frames_of(seed)
    size = {"height": 32, "width": 48, "num_frames": 3, "decode_chunk_size": 3}
    sampling = SvdSampling(num_inference_steps=2, **size)
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)
    output = OutputConfig(
        path=str(folder / f"{name}{video.FORMAT_SUFFIXES[format]}"), format=format
    )
    _, media_file = read_image(Path(PHOTO))
    record = clip_metadata(
        ClipInput(media_file), seed, output, config, find_checkpoint(config.model)
    )
    latent = hashlib.sha256(bytes([seed])).hexdigest()
    record |= {"latents_sha256": latent, "frames_sha256": video.frames_sha256(pixels), **changes}
    shown, file = pixels if frames is None else frames, replace(output, crf=crf)
    record["file_sha256"] = video.write_clip(shown, file, fps=7, metadata=record)
    Path(output.json_path).write_text(json.dumps(record))
    return Path(output.json_path)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Output folder as `svdpp run` writes it, with a finished clip of each format."""
    folder = tmp_path / "out"
    folder.mkdir()
    for format in FORMATS:
        put_clip(folder, "a", format)
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
    for name in ("still.webp", "00000.png"):
        Image.open(PHOTO).resize((64, 48)).save(photos / name)
    for inputs in (["photos"], ["photos/rocket.jpg"], ["photos/*.webp"], ["photos/still.webp"]):
        assert _found(*inputs) == []
    assert _found() == []
    with pytest.raises(RequestError, match=r"' is a finished clip, but 'photos' is not"):
        find_clips(["photos", "out"])
    for missing in ("out/no.json", "out/deleted.mp4"):
        assert _found(missing) == [missing]


def test_what_is_not_there_is_an_error(out: Path) -> None:
    os.mkfifo(out / "pipe.mp4.json")
    for name in ("gone.mp4", "gone.json", "run.json", "pipe.mp4.json"):
        with pytest.raises(InputError):
            read_clip(out / name)
    plain = OutputConfig(path=str(out / "plain.mp4"))
    video.write_clip(frames_of(1), plain, fps=7, metadata={"seed": 1})
    with pytest.raises(InputError, match=r"the metadata in .*plain.mp4' is not a clip's"):
        read_clip(out / "plain.mp4")


def test_a_json_vouches_for_the_file_beside_it_alone(out: Path) -> None:
    """A clip's JSON describes only the file beside it. A copy of the JSON in another folder does
    not lead to the original video.
    """
    shutil.copy(out / "a.mp4.json", out / "b.mp4.json")
    assert read_clip(out / "b.mp4.json").path == out / "b.mp4"


def test_the_image_is_found_where_it_was_beside_the_clip_or_where_an_option_says(
    out: Path, tmp_path: Path
) -> None:
    clip = read_clip(out / "a.mp4")
    assert find_input_file(clip, None).samefile(PHOTO)
    assert find_input_file(clip, Path(PHOTO)) == Path(PHOTO)
    other = tmp_path / "other.jpg"
    other.write_bytes(Path(PHOTO).read_bytes() + b"\0")
    for named in (other, tmp_path):
        with pytest.raises(InputError, match=r"the image of 'a.mp4' is not at '.*'") as caught:
            find_input_file(clip, named)
        assert clip.metadata["input_sha256"] in caught.value.hint
    edit_json(out / "a.mp4.json", input="pipe.jpg")
    os.mkfifo(out / "pipe.jpg")  # a pipe, which must not be opened
    clip = read_clip(out / "a.mp4.json")
    with pytest.raises(InputError, match=r"the image of 'a.mp4' is not at '.*pipe.jpg'"):
        find_input_file(clip, None)
    shutil.copy(PHOTO, out / "renamed.jpeg")
    assert find_input_file(clip, None) == find_input_file(clip, out) == out / "renamed.jpeg"


# --- check that a clip's file is what its metadata describe ---------------------------------------


def _check(path: Path) -> ClipCheck:
    return check_file(read_clip(path), frames_of(1))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_whole(format: VideoFormat, tmp_path: Path) -> None:
    path = put_clip(tmp_path, "a", format)
    check = _check(path)
    assert check.equal, check
    assert check.recorded == check.found == json.loads(path.read_text())["file_sha256"]
    assert check.detail == (
        "lossless: the pixels are the recorded frames, bit for bit"
        if format == "frames"
        else f"{format} is lossy: pixels compared with those of the recomputed frames, encoded "
        "here: "
        "every pixel equal"
    )
    assert _check(path.with_suffix("")).equal, "by its own metadata"


@pytest.mark.parametrize("format", FORMATS)
def test_another_clip_in_the_place(format: VideoFormat, tmp_path: Path) -> None:
    path, other = put_clip(tmp_path, "a", format), put_clip(tmp_path, "b", format, seed=2)
    a, b = path.with_suffix(""), other.with_suffix("")
    shutil.rmtree(a) if a.is_dir() else a.unlink()
    assert _check(path).detail == f"there is no {a.name!r}"
    b.rename(a)
    check = _check(path)
    assert (check.equal, check.found) == (False, json.loads(other.read_text())["file_sha256"])
    assert "sha256 is not the recorded one: the file was changed or replaced" in check.detail
    assert (
        f"the metadata in the file says output {b.name!r}, the JSON says {a.name!r}" in check.detail
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_forgery_that_is_right_in_all_but_the_video(format: VideoFormat, tmp_path: Path) -> None:
    """Verification reports a forged file with the pixels of another clip.

    The forged file's embedded metadata, JSON and hash agree.
    """
    other = _check(put_clip(tmp_path, "a", format, frames=frames_of(4)))
    short = _check(put_clip(tmp_path, "b", format, frames=frames_of(1)[:2]))
    for check in (other, short):
        assert (check.equal, check.found) == (False, check.recorded)
    if format == "frames":
        assert other.detail == "the pixels are not the recorded frames"
        assert short.detail == "it lacks: 00002.png"
    else:
        assert f"{format} is lossy: pixels compared" in other.detail
        assert " dB, " in other.detail
        assert "the file has 2 frames of 48x32 instead of 3 frames of 48x32" in short.detail


def test_a_file_that_cannot_be_played(tmp_path: Path) -> None:
    path = put_clip(tmp_path, "a")
    (tmp_path / "a.mp4").write_bytes(b"no video")
    check = _check(path)
    assert not check.equal
    assert "a.mp4' cannot be read as" in check.detail


def test_an_encoder_of_another_version_is_told_by_its_distance(tmp_path: Path) -> None:
    """A file from another encoder, with similar pixels, passes.

    The check's detail says how similar the pixels are.
    """
    check = _check(put_clip(tmp_path, "a", crf=24))
    assert check.equal, check
    assert " dB, " in check.detail


def test_a_clip_of_version_0_3_has_no_hash_of_its_file(tmp_path: Path) -> None:
    path = put_clip(tmp_path, "a", schema_version=1).rename(tmp_path / "a.json")
    edit_json(path, file_sha256=None)
    assert find_clips([str(tmp_path / "a.mp4")]) == [path]
    for named in (path, tmp_path / "a.mp4"):
        check = _check(named)
        assert check.equal, check
        assert check.recorded is None
        assert check.detail.endswith("; no sha256 of the file is recorded")


_SINE = ("-f", "lavfi", "-i", "sine=d=1")
_OTHER = ("-f", "lavfi", "-i", "testsrc=d=1:s=48x32:r=7")
_LABELS = ("-disposition:v:0", "0", "-disposition:v:1", "default")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (("-itsscale", "0.1"), (), "its video lasts 0.1714 s (17.5 frames a second) instead of"),
        ((), (*_SINE, "-map", "0", "-map", "1"), "its streams are video and audio instead of"),
        ((), ("-aspect", "4:1"), "the pixel aspect of its video is 8/3 instead of 1"),
        (("-display_rotation", "180"), (), "the rotation of its video is rotation of"),
        (
            (),
            (*_OTHER, "-map", "0", "-map", "1", "-c:v:1", "libx264", *_LABELS),
            "its streams are video and video instead of video",
        ),
        (
            (),
            ("-bsf:v", "setts=pts=PTS+if(eq(N\\,1)\\,40\\,0)"),
            "its frames are shifted in time by up to",
        ),
        (("-itsoffset", "2"), (), "its frames are shifted in time by up to 2 s"),
        ((), ("-color_trc", "smpte2084"), "the colours of its container are not those of"),
        ((), ("-bsf:v", "h264_metadata=transfer_characteristics=16"), "color_trc:smpte2084"),
        ((), ("-bsf:v", "h264_metadata=matrix_coefficients=5"), "color_space:bt470bg"),
        ((), ("-bsf:v", "h264_metadata=video_full_range_flag=1"), "color_range:pc"),
    ],
)
def test_an_mp4_that_is_shown_otherwise(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], words: str
) -> None:
    """Verification reports an mp4 that players do not show as the clip was made.

    The mp4's pixels, metadata and hash are right.
    """
    path = put_clip(tmp_path, "a")
    file, kept = tmp_path / "a.mp4", tmp_path / "kept.mp4"
    file.rename(kept)
    inputs = [*before, "-i", kept, *after]
    ffmpeg(*inputs, "-c:v:0", "copy", "-movflags", "use_metadata_tags", file)
    kept.unlink()
    edit_json(path, file_sha256=video.clip_sha256(file))
    check = _check(path)
    assert not check.equal
    assert words in check.detail
    assert "sha256" not in check.detail
    assert "metadata" not in check.detail


def test_an_mp4_for_other_eyes(tmp_path: Path) -> None:
    """Verification reports an mp4 with a stereo tag.

    Players show such an mp4 in stereo, but ffmpeg ignores the tag.
    """
    path = put_clip(tmp_path, "a")
    file, box = tmp_path / "a.mp4", b"\0\0\0\x0dst3d\0\0\0\0\2"
    data = bytearray(file.read_bytes())
    at = data.find(b"colrnclx") - 4
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1"):
        _add(data, data.find(kind) - 4, len(box))
    data[at:at] = box
    offsets = data.find(b"stco")
    for index in range(int.from_bytes(data[offsets + 8 : offsets + 12])):
        _add(data, offsets + 12 + 4 * index, len(box))
    file.write_bytes(data)
    edit_json(path, file_sha256=video.clip_sha256(file))
    check = _check(path)
    assert not check.equal
    assert check.detail == "its video has these further boxes: st3d"


def _add(data: bytearray, at: int, number: int) -> None:
    data[at : at + 4] = (int.from_bytes(data[at : at + 4]) + number).to_bytes(4)


def test_an_mp4_that_was_only_packed_and_named_otherwise(tmp_path: Path) -> None:
    """An mp4 that was only repackaged passes the check of its pixels.

    Added tags do not matter, even if they look like svdpp's metadata.
    """
    path = put_clip(tmp_path, "a")
    file, kept = tmp_path / "a.mp4", tmp_path / "kept.mp4"
    file.rename(kept)
    flags = "use_metadata_tags+frag_keyframe+empty_moov"
    tags = ["-metadata", 'artist=me\nsvdpp={"seed": 2}\\', "-metadata", "comment=x"]
    ffmpeg("-i", kept, "-c", "copy", "-movflags", flags, *tags, file)
    kept.unlink()
    assert "changed or replaced" in _check(path).detail, "its bytes are others"
    edit_json(path, file_sha256=video.clip_sha256(file))
    check = _check(path)
    assert check.equal, check


@pytest.mark.parametrize(
    ("num_frames", "size", "place", "words"),
    [
        (24, 32, np.s_[12], "dB in one frame"),
        (3, 160, np.s_[:, 34:46, 66:78], "dB in 32x32 pixels of one frame"),
    ],
    ids=["flash", "logo"],
)
def test_a_change_of_one_place(
    tmp_path: Path, num_frames: int, size: int, place: Any, words: str
) -> None:
    """Verification reports a change of one frame or of a small area.

    The mean PSNR of the whole clip is still above 30 dB.
    """
    frames = np.full((num_frames, size, size, 3), 90, np.uint8)
    altered = frames.copy()
    altered[place] = 120 if num_frames == 24 else 170
    check = check_file(read_clip(put_clip(tmp_path, "a", frames=altered)), frames)
    assert not check.equal
    assert words in check.detail
    assert check_file(read_clip(put_clip(tmp_path, "b", frames=frames)), frames).equal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"icc_profile": b"profile"},
            "00000.png has metadata by which viewers change its colours (icc_profile)",
        ),
        ({"dpi": (72, 144)}, "00000.png has pixels that are not square"),
        ({"orientation": 6}, "00000.png has an orientation by which viewers rotate or mirror it"),
        ({"transparency": (20, 0, 40)}, "00000.png is transparent"),
        ({"save_all": True, "append_images": [Image.new("RGB", (48, 32))]}, "is animated"),
        ({"gamma": 200000}, "00000.png has metadata by which viewers change its colours (gamma)"),
    ],
    ids=["profile", "aspect", "orientation", "transparency", "animation", "gamma"],
)
def test_frames_that_are_shown_otherwise(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Verification reports PNG frames that viewers do not show as the clip was made.

    The frames' pixels, metadata and hash are right.
    """
    path = put_clip(tmp_path, "a", "frames")
    for file in sorted((tmp_path / "a").iterdir()):
        with Image.open(file) as image:
            image.load()
            info, exif = PngImagePlugin.PngInfo(), Image.Exif()
            info.add_text("svdpp", image.info["svdpp"])
            options = dict(changes)
            if orientation := options.pop("orientation", None):
                exif[ExifTags.Base.Orientation] = orientation
                options["exif"] = exif
            if gamma := options.pop("gamma", None):
                info.add(b"gAMA", gamma.to_bytes(4))
            image.save(file, pnginfo=info, **options)
    edit_json(path, file_sha256=video.clip_sha256(tmp_path / "a"))
    check = _check(path)
    assert not check.equal
    assert words in check.detail
    assert "pixels are not" not in check.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # as a number, 10 comes after 2
        (
            "mv 00001.png 000010.png",
            "lacks: 00001.png; it has frames after its last frame: 000010.png",
        ),
        ("mv 00001.png 1.png", "lacks: 00001.png; it has entries that are not frames: 1.png"),
        ("rm 00002.png", "it lacks: 00002.png"),
        ("rm *.png", "it lacks: 00000.png, 00001.png, 00002.png"),
        ("cp 00000.png 00003.png", "it has frames after its last frame: 00003.png"),
        ("touch a b c d e", "it has entries that are not frames: a, b, c and 2 more"),
        ("mkdir sub", "it has entries that are not frames: sub/"),
        (
            "rm 00001.png; mkdir 00001.png",
            "it lacks: 00001.png; it has entries that are not frames: 000",
        ),
    ],
)
def test_a_folder_of_frames_with_other_names(tmp_path: Path, change: str, words: str) -> None:
    path = put_clip(tmp_path, "a", "frames")
    subprocess.run(change, shell=True, check=True, cwd=tmp_path / "a")
    check = _check(path)
    assert not check.equal
    assert words in check.detail
    assert ("sha256 is not the recorded one" in check.detail) == ("mkdir" not in change)
    assert find_clips([str(tmp_path / "a")]) == [path], "it is still called a clip"


@pytest.mark.parametrize(
    ("alpha", "orientation", "words"),
    [(40, 1, "its transparency is some"), (255, 6, "its orientation is 6 instead of 1")],
)
def test_a_webp_that_is_shown_otherwise(
    tmp_path: Path, alpha: int, orientation: int, words: str
) -> None:
    path = put_clip(tmp_path, "a", "webp")
    file, exif = tmp_path / "a.webp", Image.Exif()
    exif[ExifTags.Base.ImageDescription] = json.dumps(video.read_metadata(file))
    exif[ExifTags.Base.Orientation] = orientation
    images = [Image.fromarray(frame) for frame in video.read_frames(file, "webp")]
    for image in images:
        image.putalpha(alpha)
    options = {"lossless": True, "exact": True, "exif": exif, "loop": 0, "duration": 143}
    images[0].save(file, save_all=True, append_images=images[1:], **options)
    edit_json(path, file_sha256=video.clip_sha256(file))
    check = _check(path)
    assert not check.equal
    assert check.detail.startswith(words)
    assert check.detail.count("its ") == 1


@pytest.mark.parametrize("format", ["gif", "webp"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"duration": 20}, "its duration is 60 ms instead of 4"), ({"loop": 1}, "its repetition is")],
)
def test_an_animation_that_is_shown_otherwise(
    tmp_path: Path, format: VideoFormat, changes: dict[str, int], words: str
) -> None:
    path = put_clip(tmp_path, "a", format)
    file = path.with_suffix("")
    inside = video.read_metadata(file)
    first, *rest = map(Image.fromarray, video.read_frames(file, format))
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = json.dumps(inside)
    same = {"duration": 1000 // 7, "loop": 0, "exif": exif, "comment": json.dumps(inside).encode()}
    first.save(file, save_all=True, append_images=rest, **{**same, **changes})
    edit_json(path, file_sha256=video.clip_sha256(file))
    check = _check(path)
    assert not check.equal
    assert words in check.detail
