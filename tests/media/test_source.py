"""What clips start from: an image, or frames of a video, which are those that ffmpeg decodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image

from svdpp.config import SAMPLING_CLASSES, OutputConfig
from svdpp.errors import InputError
from svdpp.media import inputs
from svdpp.media.inputs import MAX_PIXELS, check_inputs, read_bytes, read_video, source_of
from svdpp.media.video import read_frames, write_clip
from tests.media.pictures import encoded, ffmpeg, gradient
from tests.media.test_image import found

SIZE = {"height": 32, "width": 48}


def sampling(**changes: Any) -> Any:
    return SAMPLING_CLASSES["wan_v2v"](**{**SIZE, "num_frames": 5, "from_image": True, **changes})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven frames of 96 x 64."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    y, x = np.mgrid[:64, :96]
    frames = np.stack([np.stack([x * 2, y * 3, x + y + i * 9], -1) for i in range(7)])
    write_clip(frames.astype(np.uint8), OutputConfig(path=str(path)), fps=16, metadata={})
    return path


def fitted(path: Path, asked: Any) -> Any:
    return source_of(read_bytes(path), path, asked)[0]


def pixels(frames: Any) -> Any:
    return np.stack([np.asarray(frame) for frame in frames])


def test_the_frames_are_the_first_ones_of_the_video(clip: Path) -> None:
    frames = fitted(clip, sampling(height=64, width=96))
    assert np.array_equal(pixels(frames), read_frames(clip, "mp4")[:5])


def test_frames_are_resized_as_diffusers_does(clip: Path) -> None:
    processor = VideoProcessor(vae_scale_factor=8)
    whole = [Image.fromarray(frame) for frame in read_frames(clip, "mp4")[:5]]
    ours = fitted(clip, sampling())
    resized = (processor.preprocess_video(each, **SIZE) for each in (ours, whole))
    assert torch.equal(*resized)


@pytest.mark.parametrize(("fit", "corner"), [("crop", 96), ("pad", 0)])
def test_frames_are_fitted(clip: Path, fit: str, corner: int) -> None:
    frames = fitted(clip, sampling(height=32, width=32, fit=fit))
    assert {frame.size for frame in frames} == {(32, 32)}
    assert (pixels(frames)[0, 0, -1].max() > 0) == (corner > 0)


def test_an_image_stands_for_a_video_that_shows_nothing_else(tmp_path: Path) -> None:
    still = tmp_path / "still.png"
    still.write_bytes(encoded(gradient(**SIZE), "PNG"))
    frames = fitted(still, sampling())
    assert np.array_equal(pixels(frames), pixels([gradient(**SIZE)] * 5))
    image = fitted(still, SAMPLING_CLASSES["svd"](height=32, width=48, num_frames=2))
    assert isinstance(image, Image.Image)


@pytest.mark.parametrize("name", ["a.mkv", "a.mov", "pipe:1.mp4", "no suffix"])
def test_containers_are_told_by_their_content(clip: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = "matroska" if name.endswith("mkv") else "mov"
    ffmpeg("-i", clip, "-c", "copy", "-f", kind, f"file:{path}")
    assert np.array_equal(pixels(fitted(path, sampling())), pixels(fitted(clip, sampling())))


def test_frames_are_upright(clip: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned.mp4"
    ffmpeg("-display_rotation", "90", "-i", clip, "-c", "copy", turned)
    photo = read_video(turned, 7, MAX_PIXELS)
    assert (photo.width, photo.height) == (64, 96)
    assert read_video(clip, 1, MAX_PIXELS).width == 96


def test_a_video_is_hashed_as_its_file(clip: Path) -> None:
    made = source_of(clip.read_bytes(), clip, sampling())[1]
    assert made == read_video(clip, 5, MAX_PIXELS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[: len(data) // 2], "cannot be decoded as a video: "),
        (lambda data: data[:12] + bytes(len(data) - 12), "cannot be decoded as a video: "),
        (lambda _: b"ffconcat version 1.0\nfile /etc/passwd\n", "is not an image in "),
        (lambda _: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is not an image in "),
        (lambda _: b"", "is empty"),
    ],
)
def test_damaged_and_hostile_files_are_refused(
    clip: Path, tmp_path: Path, change: Any, words: str
) -> None:
    path = tmp_path / "bad.mp4"
    path.write_bytes(change(clip.read_bytes()))
    for read in (
        lambda: read_video(path, 5, MAX_PIXELS),
        lambda: fitted(path, sampling()),
    ):
        with pytest.raises(InputError, match=words) as caught:
            read()
        assert caught.value.message.startswith(f"'{path}' ")


def test_any_damage_is_one_sentence_or_shows_in_the_frames(clip: Path) -> None:
    random, refused = np.random.default_rng(0), list[str]()
    for _ in range(20):
        data = bytearray(clip.read_bytes())
        for place in random.integers(len(data), size=10):
            data[place] = random.integers(256)
        try:
            frames = source_of(bytes(data), clip, sampling())[0]
        except InputError as error:
            refused.append(error.message)
        else:
            assert pixels(frames).shape == (5, 32, 48, 3)
    assert refused
    assert not any("\n" in message for message in refused)


def test_a_video_that_does_not_fit_is_refused(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"clip.mp4' has 7 of the 9 frames that the clip takes$"):
        read_video(clip, 9, MAX_PIXELS)
    with pytest.raises(InputError, match=r"clip.mp4' cannot be decoded as a video: .*max"):
        read_video(clip, 5, 96 * 64 - 1)
    narrow = tmp_path / "narrow.mp4"
    ffmpeg("-f", "lavfi", "-i", "color=s=640x32:d=0.2", narrow)
    with pytest.raises(InputError, match=r"narrow.mp4' is too narrow: 640x32"):
        read_video(narrow, 1, MAX_PIXELS)


def test_only_known_decoders_are_used(clip: Path, tmp_path: Path) -> None:
    path = tmp_path / "raw.mov"
    ffmpeg("-i", clip, "-c:v", "qtrle", path)
    with pytest.raises(InputError, match=r"raw.mov' cannot be decoded as a video: "):
        read_video(path, 5, MAX_PIXELS)


def test_a_decode_has_a_deadline(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_DECODE_SECONDS", 0.0)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"clip.mp4' cannot be decoded .* not end within 0 s$"):
        read_video(clip, 5, MAX_PIXELS)
    assert time.monotonic() - began < 30


def test_videos_are_found_by_their_suffixes(clip: Path, tmp_path: Path) -> None:
    still, video = tmp_path / "a.png", tmp_path / "b.MP4"
    still.write_bytes(encoded(gradient(), "PNG"))
    video.write_bytes(clip.read_bytes())
    assert found([str(tmp_path)], 7) == [video]
    assert [photo.path for photo in check_inputs([str(tmp_path), str(still)], 7)] == [video, still]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"is a folder without videos \(\.mp4 "):
        found([str(tmp_path / "empty")], 7)
