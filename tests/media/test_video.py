"""Clips on disk: written completely or not at all, and read back frame by frame."""

from __future__ import annotations

import os
import stat
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from svdpp.config import OutputConfig, VideoFormat
from svdpp.errors import InputError, OutputError
from svdpp.media import video
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.media.streams import read_streams
from svdpp.media.video import (
    FORMAT_SUFFIXES,
    clip_sha256,
    read_audio,
    read_frames,
    read_metadata,
    write_clip,
)
from tests.support.pictures import ffmpeg

FORMATS: list[VideoFormat] = ["mp4", "gif", "webp", "frames"]
METADATA = {"seed": 5, "odd ;=#\\ key": "é\n'\"%03d", "list": [1, None, {"a": 0.5}]}
ODD_NAMES = [
    *("-y.mp4", "%03d.mp4", "concat:x.mp4", "pipe:1.mp4", "a\nb.mp4", "é 你 [1]?*#.mp4"),
    *(os.fsdecode(b"\xff.mp4"), "x" * 250 + ".mp4"),
]


def smooth_frames(count: int = 6, height: int = 48, width: int = 64) -> video.Frames:
    """Return smooth frames with saturated red, which would reveal a wrong colour matrix."""
    index, y, x = np.mgrid[:count, :height, :width]
    pictures = np.stack([x * 0 + 230, y * 3, x * 2 + index * 8], -1)
    return pictures.clip(0, 255).astype(np.uint8)


def noise(count: int = 6, side: int = 128) -> video.Frames:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)


def write(
    path: Path | str, format: VideoFormat, frames: video.Frames, crf: int = 18, fps: float = 7
) -> None:
    output = OutputConfig(path=str(path), format=format, crf=crf)
    write_clip(frames, output, fps=fps, metadata=METADATA)


def distance(one: video.Frames, other: video.Frames) -> float:
    return float(np.abs(one.astype(int) - other).mean())


def contents(path: Path) -> bytes:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return b"".join(file.read_bytes() for file in files)


@pytest.mark.parametrize("channels", [1, 2])
def test_the_sound_of_an_mp4_comes_back(tmp_path: Path, channels: int) -> None:
    rate = 16000
    times = np.arange(rate) / rate
    tone = (np.sin(2 * np.pi * 440 * times) * 20000).astype(np.int16)
    samples = np.stack([tone] * channels, axis=1)
    path = tmp_path / "a.mp4"
    output = OutputConfig(path=str(path))
    write_clip(smooth_frames(7), output, fps=7, metadata=METADATA, audio=(samples, rate))
    back, back_rate = read_audio(path)
    spectrum = np.abs(np.fft.rfft(back[:back_rate, 0].astype(float)))
    assert spectrum.argmax() == 440  # Hz, because the sound lasts one second
    assert len(read_frames(path, "mp4")) == 7
    assert read_metadata(path) == METADATA


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(48, 64), (136, 72)])
def test_a_clip_comes_back(tmp_path: Path, format: VideoFormat, size: tuple[int, int]) -> None:
    frames = smooth_frames(9, *size)
    path = tmp_path / f"photo_3{FORMAT_SUFFIXES[format]}"
    write(path, format, frames)
    back = read_frames(path, format)
    assert back.dtype == np.uint8
    assert back.shape == frames.shape
    for index in range(9):
        limit = {"mp4": 1.5, "gif": 4, "webp": 3, "frames": 0}[format]
        assert distance(back[index], frames[index]) <= limit
    assert read_metadata(path) == METADATA
    assert os.listdir(tmp_path) == [path.name]


def test_mp4_is_what_players_expect(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", "mp4", smooth_frames(7))
    command = [find_ffmpeg(), "-hide_banner", "-i", str(tmp_path / "x.mp4")]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    assert "Video: h264" in text
    assert "yuv420p(tv, bt709, progressive), 64x48" in text  # printed once if all tags are equal
    assert "7 fps" in text
    assert "Duration: 00:00:01.00" in text
    data = (tmp_path / "x.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # the index comes first (faststart)


@pytest.mark.parametrize(
    ("fps", "rate"),
    [
        (24, Fraction(24)),
        (23.976, Fraction(24000, 1001)),
        (23.98, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (12.5, Fraction(25, 2)),
        (14.985, Fraction(2997, 200)),
    ],
)
def test_an_mp4_has_the_exact_rate_also_if_it_is_a_fraction(
    tmp_path: Path, fps: float, rate: Fraction
) -> None:
    write(tmp_path / "x.mp4", "mp4", smooth_frames(5), fps=fps)
    (stream,) = read_streams(tmp_path / "x.mp4")
    assert [time * rate for time in stream.times] == [0, 1, 2, 3, 4]
    assert stream.end * rate == 5


def test_crf_reaches_the_encoder(tmp_path: Path) -> None:
    sizes = []
    for crf in (0, 18, 51):
        write(tmp_path / "x.mp4", "mp4", noise(2), crf)
        sizes.append((tmp_path / "x.mp4").stat().st_size)
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("format", FORMATS)
def test_equal_neighbours_are_counted(tmp_path: Path, format: VideoFormat) -> None:
    frames = np.repeat(smooth_frames(4), [1, 3, 1, 2], axis=0)
    path = tmp_path / f"x_1{FORMAT_SUFFIXES[format]}"
    write(path, format, frames)
    back = read_frames(path, format)
    assert back.shape == frames.shape
    assert distance(back, frames) < 4
    write(path, format, np.repeat(frames[:1], 5, axis=0))
    assert len(read_frames(path, format)) == (5 if format in ("mp4", "frames") else 1)


@pytest.mark.parametrize(
    ("format", "fps", "milliseconds"), [("gif", 7, 140), ("gif", 240, 20), ("webp", 7, 143)]
)
def test_animations_run_for_ever_at_their_speed(
    tmp_path: Path, format: VideoFormat, fps: int, milliseconds: int
) -> None:
    write(tmp_path / "x", format, smooth_frames(5), fps=fps)
    with Image.open(tmp_path / "x") as image:
        assert (image.n_frames, image.info["loop"]) == (5, 0)
        image.load()
        assert image.info["duration"] == milliseconds


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(name, "mp4", smooth_frames(2))
    assert os.listdir() == [name]
    assert len(read_frames(Path(name), "mp4")) == 2
    assert read_metadata(Path(name)) == METADATA


@pytest.mark.parametrize("format", FORMATS)
def test_a_clip_that_lost_a_frame_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: VideoFormat
) -> None:
    path, check, more = tmp_path / "x", video._check_whole, smooth_frames(7)
    write(path, format, smooth_frames())
    before = contents(path)
    monkeypatch.setattr(
        video, "_check_whole", lambda path, format, _, fps: check(path, format, more, fps)
    )
    with pytest.raises(
        OutputError, match=r"x' cannot be written: the clip read back has the shape \(6"
    ):
        write(path, format, smooth_frames())
    assert contents(path) == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("echo first >&2; echo 'the cause' >&2; exit 3", "ffmpeg ended with 3: the cause"),
        ("echo what followed >&2; exit 228", "ffmpeg failed: No space left on device"),
        ("kill -9 $$", "ffmpeg was ended by SIGKILL"),  # as when memory runs out
        ("cat > /dev/null", "the clip has no frames"),
        ("exec sleep 60", "ffmpeg did not end within 1 s"),
    ],
)
def test_an_ffmpeg_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, cause: str
) -> None:
    fake, clip = tmp_path / "fake", tmp_path / "x.mp4"
    fake.touch(0o755)
    fake.write_text(f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    monkeypatch.setattr(video, "_WRITE_SECONDS", -5.0)  # 1 s is added for each of six frames
    clip.write_text("old")
    with pytest.raises(OutputError) as caught:
        write(clip, "mp4", noise(6, 256))  # more than a pipe can hold
    assert cause in caught.value.message
    assert repr(str(clip)) in caught.value.message
    assert sorted(os.listdir(tmp_path)) == ["fake", "x.mp4"]
    assert clip.read_text() == "old"


@pytest.mark.parametrize("format", FORMATS)
def test_unreadable_clips(tmp_path: Path, format: VideoFormat) -> None:
    path = tmp_path / f"x_1{FORMAT_SUFFIXES[format]}"
    with pytest.raises(InputError, match="x_1"):
        read_frames(path, format)
    with pytest.raises(InputError, match="x_1"):
        read_metadata(path)
    write(path, format, smooth_frames())
    file = path / "00002.png" if format == "frames" else path
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(InputError, match=f"cannot be read as {format}"):
        read_frames(path, format)
    wrong = FORMATS[FORMATS.index(format) - 1]
    with pytest.raises(InputError, match=f"cannot be read as {wrong}"):
        read_frames(path, wrong)


def test_frames_of_uneven_length_come_back_once_each(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", "mp4", smooth_frames(6))
    uneven = tmp_path / "uneven.mp4"
    ffmpeg("-i", tmp_path / "x.mp4", "-vf", "setpts=N*N/7/TB", "-fps_mode", "passthrough", uneven)
    assert len(read_frames(uneven, "mp4")) == 6


def test_a_damaged_picture_in_an_mp4_is_found(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", "mp4", noise(6))
    data = bytearray((tmp_path / "x.mp4").read_bytes())
    middle = (data.index(b"mdat") + len(data)) // 2
    data[middle : middle + 2000] = bytes(2000)
    (tmp_path / "x.mp4").write_bytes(data)
    with pytest.raises(InputError, match="ffmpeg ended with") as caught:
        read_frames(tmp_path / "x.mp4", "mp4")
    assert " @ 0x" not in caught.value.message, "an address in ffmpeg's memory"


def test_bytes_reach_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def note_replace(old: Path, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write(tmp_path / "x.mp4", "mp4", smooth_frames(2))
    write(tmp_path / "x", "frames", smooth_frames(2))
    assert done == ["file", "name", "folder", "file", "file", "folder", "name", "folder"]


def test_a_playlist_called_mp4_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "real.mp4", "mp4", smooth_frames())
    (tmp_path / "x.mp4").write_text("ffconcat version 1.0\nfile real.mp4\n")
    with pytest.raises(InputError):
        read_frames(tmp_path / "x.mp4", "mp4")


def test_a_time_that_stands_for_very_many_frames_is_refused(tmp_path: Path) -> None:
    first, *rest = (Image.fromarray(frame) for frame in smooth_frames(3))
    times = [10, 600_000, 10]
    first.save(tmp_path / "x.gif", save_all=True, append_images=rest, duration=times)
    with pytest.raises(InputError, match="more than 1024 frames"):
        read_frames(tmp_path / "x.gif", "gif")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("limit", "largest"), [("MAX_FRAMES", 6), ("MAX_CLIP_PIXELS", 18_432)])
def test_a_clip_beyond_the_limits_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: VideoFormat,
    limit: str,
    largest: int,
) -> None:
    path = tmp_path / f"x{video.FORMAT_SUFFIXES[format]}"
    write(path, format, smooth_frames(6))
    monkeypatch.setattr(video, limit, largest)
    assert len(read_frames(path, format)) == 6
    monkeypatch.setattr(video, limit, largest - 1)
    with pytest.raises(InputError, match=rf"more than .*\b{largest - 1} .*the limits of a clip"):
        read_frames(path, format)


@pytest.mark.parametrize("format", FORMATS)
def test_clip_sha256_is_of_what_lies_on_disk(tmp_path: Path, format: VideoFormat) -> None:
    path = tmp_path / f"x{video.FORMAT_SUFFIXES[format]}"
    output = OutputConfig(path=str(path), format=format)
    written = write_clip(smooth_frames(3), output, fps=7, metadata=METADATA)
    assert clip_sha256(path) == written
    by_hand = "sha256sum x.*" if path.is_file() else "cd x && sha256sum * | sha256sum"
    assert subprocess.check_output(by_hand, shell=True, cwd=tmp_path).decode().split()[0] == written
    with (path / "00001.png" if path.is_dir() else path).open("ab") as file:
        file.write(b"junk")
    assert clip_sha256(path) != written
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        clip_sha256(tmp_path / "pipe")


@pytest.mark.parametrize("format", FORMATS)
def test_metadata_of_any_length_come_back(tmp_path: Path, format: VideoFormat) -> None:
    """Metadata are read back, even if they exceed 128 KiB, the limit of an argument in Linux."""
    path, metadata = (
        tmp_path / f"x_1{FORMAT_SUFFIXES[format]}",
        {"prompt": "\u6d77" * 30_000, "b": "=;#\\"},
    )
    output = OutputConfig(path=str(path), format=format)
    write_clip(smooth_frames(1), output, fps=7, metadata=metadata)
    assert read_metadata(path) == metadata


def test_metadata_that_were_not_written_whole_take_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "read_metadata", lambda _: {"seed": 6})
    with pytest.raises(
        OutputError, match="the metadata read back from the clip differ from the written metadata"
    ):
        write(tmp_path / "x.mp4", "mp4", smooth_frames(1))
    assert os.listdir(tmp_path) == []


def test_many_complaints_of_ffmpeg_do_not_block_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long stderr of ffmpeg does not block, although a pipe holds only 64 KiB."""
    fake = tmp_path / "fake"
    fake.touch(0o755)
    fake.write_text("#!/bin/sh\necho the cause >&2\nhead -c 3000000 /dev/zero >&2\nexit 3\n")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    monkeypatch.setattr(video, "_READ_SECONDS", 10.0)
    with pytest.raises(InputError, match="ffmpeg ended with 3: the cause"):
        read_frames(tmp_path / "x.mp4", "mp4")


def test_clips_of_others_carry_no_metadata(tmp_path: Path) -> None:
    image = Image.fromarray(smooth_frames(1)[0])
    for name in ("x.gif", "x.webp", "00000.png"):
        image.save(tmp_path / name)
    write(tmp_path / "x.mp4", "mp4", smooth_frames(2))
    plain = tmp_path / "plain.mp4"
    ffmpeg("-i", tmp_path / "x.mp4", "-map_metadata", "-1", "-c", "copy", plain)
    for path in (tmp_path / "x.gif", tmp_path / "x.webp", tmp_path, plain):
        with pytest.raises(InputError, match="has no metadata"):
            read_metadata(path)
