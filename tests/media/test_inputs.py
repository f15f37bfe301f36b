"""Input images and videos: formats, orientation, colours, and untrusted files with defects."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils import load_video
from diffusers.video_processor import VideoProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from svdpp.config import SAMPLING_CLASSES, OutputConfig
from svdpp.errors import InputError
from svdpp.media import images, inputs, video_frames
from svdpp.media.ffmpeg import probe_log
from svdpp.media.video import read_frames, write_clip
from tests.support.pictures import encoded, ffmpeg, gradient, png


def read(folder: Path, data: bytes) -> Image.Image:
    (folder / "x").write_bytes(data)
    image, media_file = images.read_image(folder / "x")
    assert image.mode == "RGB"
    assert image.size == (media_file.width, media_file.height)
    return image


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        images.read_image(path)
    assert repr(str(path)) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def refused(folder: Path, data: bytes) -> str:
    (folder / "x.png").write_bytes(data)
    return refusal(folder / "x.png")


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_give_their_pixels_back(tmp_path: Path, format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(gradient(), format, **options)
    assert read(tmp_path, data).tobytes() == gradient().tobytes()
    _, media_file = images.read_image(tmp_path / "x")
    assert media_file == images.MediaFile(tmp_path / "x", hashlib.sha256(data).hexdigest(), 48, 32)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_every_orientation_is_applied_once(tmp_path: Path, format: str) -> None:
    for orientation in range(1, 9) if format == "PNG" else (6,):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(gradient(), format, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert upright.size == ((32, 48) if orientation > 4 else (48, 32))
        assert read(tmp_path, data).tobytes() == upright.tobytes()


def test_odd_exif_beside_the_rotation_does_no_harm(tmp_path: Path) -> None:
    # The tag XResolution is a text, on which ImageOps.exif_transpose raises TypeError.
    entries = struct.pack("<HHI4s", 0x0112, 3, 1, b"\6\0\0\0")
    entries += struct.pack("<HHI4s", 0x011A, 2, 3, b"72\0\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + bytes(4)
    assert read(tmp_path, encoded(gradient(), "JPEG", exif=exif)).size == (32, 48)


def filled(mode: str, colour: Any, dots: tuple[Any, ...] = ()) -> Image.Image:
    """Return an image filled with one colour, whose first pixels have the colours `dots`."""
    image = Image.new(mode, (20, 20), colour)
    for x, dot in enumerate(dots):
        image.putpixel((x, 0), dot)
    return image


def deep(value: float, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((20, 20), value, dtype))


#: By name: image, file format, options to save the image, and the expected first pixels.
PIXELS: dict[str, tuple[Image.Image, str, dict[str, Any], list[tuple[int, ...]]]] = {
    "alpha": (
        filled("RGBA", (255, 0, 0, 0), ((0, 0, 255, 255), (0, 0, 0, 128))),
        "PNG",
        {},
        [(0, 0, 255), (127, 127, 127), (255, 255, 255)],
    ),
    **{
        f"{value} of 16 bits in {format}": (deep(value, np.uint16), format, {}, [(grey,) * 3])
        for format in ("PNG", "TIFF")
        for value, grey in ((40000, 156), (65535, 255), (0, 0), (128, 0), (129, 1))
    },
    "big-endian": (deep(40000, ">u2"), "TIFF", {}, [(156, 156, 156)]),
    **{
        f"animated {format}": (
            filled("RGB", (255, 0, 0)),
            format,
            {"save_all": True, "append_images": [filled("RGB", (0, 0, 255))], "duration": 100}
            | ({"lossless": True} if format == "WEBP" else {}),
            [(255, 0, 0)],
        )
        for format in ("GIF", "WEBP", "PNG")
    },
}


@pytest.mark.parametrize("name", PIXELS)
def test_every_kind_of_picture_becomes_rgb_over_white(tmp_path: Path, name: str) -> None:
    """Every kind of image is read as RGB over white.

    Colours of transparent pixels vanish, 16-bit grey is scaled, and an animation gives its first
    frame.
    """
    image, format, options, expected = PIXELS[name]
    found = read(tmp_path, encoded(image, format, **options))
    assert [found.getpixel((x, 0)) for x in range(len(expected))] == expected


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_deep_greys_without_a_known_white_are_refused(tmp_path: Path, dtype: Any) -> None:
    assert "whose white is not defined" in refused(tmp_path, encoded(deep(1, dtype), "TIFF"))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.8, 0.95])
def test_truncated_files_are_refused(tmp_path: Path, format: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), format)
    refused(tmp_path, data[: int(len(data) * part)])


def test_a_flipped_byte_in_a_png_never_changes_the_picture(tmp_path: Path) -> None:
    """A PNG with a flipped bit is refused, or gives the same image.

    Pillow alone would decode some of these files to another image.
    """
    good = encoded(gradient(), "PNG")
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 4
        (tmp_path / "x.png").write_bytes(data)
        try:
            image = images.read_image(tmp_path / "x.png")[0]
        except InputError:
            continue
        assert image.tobytes() == gradient().tobytes()


@pytest.mark.filterwarnings("error")  # Pillow must not warn about the size
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"hello, I am a text\n", "is not an image in PNG, JPEG, WEBP, BMP, TIFF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n", "is not an image in"),
        (encoded(Image.new("RGB", (1, 1)), "PNG"), "is too small: 1x1"),
        (encoded(Image.new("RGB", (15, 40)), "PNG"), "is too small: 15x40"),
        (encoded(Image.new("L", (60000, 1)), "PNG"), "is too small: 60000x1"),
        (encoded(Image.new("L", (16 * 20 + 1, 20)), "PNG"), "is too narrow: 321x20"),
        (png(8000, 6251, 8, 0, b""), "is too large: 8000x6251 pixels, the limit is 50 million"),
        (png(9500, 9500, 8, 0, b""), "is too large: 9500x9500"),
        (png(2**31 - 1, 2**31 - 1, 8, 0, b""), "is too large"),
    ],
)
def test_refusals_say_what_the_file_is(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(tmp_path, data)


def test_limits_are_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (256, 16)), "PNG")
    monkeypatch.setattr(images, "MAX_FILE_BYTES", len(data))
    assert read(tmp_path, data).size == (256, 16)
    assert "is larger than" in refused(tmp_path, data + b"\0")


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock.png"))
    for path, words in (
        (tmp_path / "fifo.png", "is not a regular file"),
        (tmp_path / "sock.png", "cannot be read: No such device"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "link.png", "does not exist"),
        (tmp_path / "gone.png", "does not exist"),
        (Path("/etc/passwd/x.png"), "Not a directory"),
        (Path("a\0b.png"), "null"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        assert words in refusal(path)


def found(names: Sequence[str], videos: int | None = None) -> list[Path]:
    return [file.path for file in inputs.check_inputs(names, videos)]


def test_inputs_are_expanded_and_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "sub.png").mkdir(parents=True)
    data = encoded(gradient(), "PNG")
    for name in ("b.PNG", "a.jpg", ".hidden.png", "notes.txt", "c.tiff"):
        (folder / name).write_bytes(data)
    (tmp_path / "last.dat").write_bytes(data)
    expected = [folder / name for name in ("a.jpg", "b.PNG", "c.tiff")]
    assert found([str(folder)]) == expected
    assert found([f"{folder}/*"]) == expected
    assert found([f"{tmp_path}/**/[bc].*"]) == expected[1:]
    mixed = [str(tmp_path / "last.dat"), str(folder / "c.tiff"), str(folder)]
    assert found(mixed) == [tmp_path / "last.dat", expected[2], *expected[:2]]
    (folder / "[ab].jpg").write_bytes(data)
    literal = str(folder / "[ab].jpg")  # an existing file name is not read as a pattern
    assert found([literal]) == [Path(literal)]
    Path(literal).unlink()
    assert found([literal]) == expected[:1]
    (tmp_path / "twin.jpg").symlink_to(folder / "a.jpg")
    assert found([str(folder), str(tmp_path / "twin.jpg")]) == expected
    for nothing, words in (("", "empty"), ("a\0*", "null"), (f"{folder}/*.bmp", "matches no")):
        with pytest.raises(InputError, match=words):
            found([nothing])


@pytest.mark.parametrize(
    ("fit", "shape", "size"),
    [
        ("crop", (64, 64), (32, 32)),
        ("crop", (128, 64), (48, 24)),
        ("crop", (8, 8000), (1, 32)),
        ("crop", (96, 64), (48, 32)),
        ("pad", (128, 64), (64, 32)),
        ("pad", (96, 64), (48, 32)),
    ],
)
def test_fit_gives_the_shape(fit: Any, shape: tuple[int, int], size: tuple[int, int]) -> None:
    assert images.fit_image(gradient(), *shape, fit).size == size


def test_fit_is_centred() -> None:
    image = gradient()
    crop = images.fit_image(image, 64, 64, "crop")
    assert crop.tobytes() == image.crop((8, 0, 40, 32)).tobytes()
    pad = images.fit_image(image, 64, 64, "pad")
    assert pad.crop((0, 8, 48, 40)).tobytes() == image.tobytes()
    assert not any(pad.crop((0, 0, 48, 8)).tobytes() + pad.crop((0, 40, 48, 48)).tobytes())
    assert images.fit_image(image, 1, 99, "stretch") is image
    with pytest.raises(InputError, match="would take"):
        images.fit_image(Image.new("RGB", (16000, 1000)), 8, 800, "pad")


SAMPLES = [
    *(encoded(gradient(), name) for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")),
    encoded(gradient().convert("RGBA"), "PNG", save_all=True, append_images=[gradient()]),
    encoded(gradient().convert("P"), "TIFF", compression="tiff_lzw"),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SAMPLES)))
    places = st.integers(0, min(len(data), draw(st.sampled_from([60, 10**6]))) - 1)
    for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        data[place] = byte
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.slow
@settings(max_examples=4 * settings.default.max_examples)
@given(st.one_of(damaged(), damaged(), st.binary(max_size=200)))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.png")
        path.write_bytes(data)
        try:
            image, media_file = images.read_image(path)
        except InputError:
            return
        assert image.mode == "RGB"
        assert len(image.tobytes()) == media_file.width * media_file.height * 3


# --- videos: a clip's input has the frames that ffmpeg decodes ------------------------------------

SIZE = {"height": 32, "width": 48}


def sampling(**changes: Any) -> Any:
    return SAMPLING_CLASSES["wan_v2v"](**{**SIZE, "num_frames": 5, "from_image": True, **changes})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input video, an mp4 file of seven frames of 96 x 64 pixels."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    index, y, x = np.mgrid[:7, :64, :96]
    frames = np.stack([x * 2, y * 3, x + y + index * 9], -1)
    write_clip(frames.astype(np.uint8), OutputConfig(path=str(path)), fps=16, metadata={})
    return path


def fitted(path: Path, asked: Any) -> Any:
    return inputs.decode_input(images.read_bytes(path), path, asked)[0]


def pixels(frames: Any) -> Any:
    return np.stack([np.asarray(frame) for frame in frames])


def test_the_frames_are_the_first_ones_resized_as_diffusers_does(clip: Path) -> None:
    whole = read_frames(clip, "mp4")[:5]
    assert np.array_equal(pixels(fitted(clip, sampling(height=64, width=96))), whole)
    processor = VideoProcessor(vae_scale_factor=8)
    both = fitted(clip, sampling()), [Image.fromarray(frame) for frame in whole]
    assert torch.equal(*(processor.preprocess_video(each, **SIZE) for each in both))


def test_a_clip_takes_as_many_frames_as_its_parameter_says(clip: Path) -> None:
    sizes: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 18, "from_image": True}
    asked = SAMPLING_CLASSES["skyreels_v2_df_v2v"](**sizes, video_frames=5)
    assert np.array_equal(pixels(fitted(clip, asked)), read_frames(clip, "mp4")[:5])


@pytest.mark.parametrize(("fit", "corner"), [("crop", 96), ("pad", 0)])
def test_frames_are_fitted(clip: Path, fit: str, corner: int) -> None:
    frames = fitted(clip, sampling(height=32, width=32, fit=fit))
    assert {frame.size for frame in frames} == {(32, 32)}
    assert (pixels(frames)[0, 0, -1].max() > 0) == (corner > 0)


def test_an_image_stands_for_a_video_that_shows_nothing_else(tmp_path: Path) -> None:
    still = tmp_path / "still.png"
    still.write_bytes(encoded(gradient(**SIZE), "PNG"))
    assert np.array_equal(pixels(fitted(still, sampling())), pixels([gradient(**SIZE)] * 5))


@pytest.mark.parametrize("name", ["a.mkv", "a.mov", "pipe:1.mp4", "no suffix"])
def test_containers_are_told_by_their_content(clip: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = "matroska" if name.endswith("mkv") else "mov"
    ffmpeg("-i", clip, "-c", "copy", "-f", kind, f"file:{path}")
    assert np.array_equal(pixels(fitted(path, sampling())), pixels(fitted(clip, sampling())))


def test_a_video_is_upright_and_hashed_as_its_file(clip: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned.mp4"
    ffmpeg("-display_rotation", "90", "-i", clip, "-c", "copy", turned)
    sha256 = hashlib.sha256(turned.read_bytes()).hexdigest()
    assert video_frames.probe_video(turned, 7, images.MAX_PIXELS) == images.MediaFile(
        turned, sha256, 64, 96
    )
    made = inputs.decode_input(clip.read_bytes(), clip, sampling())[1]
    assert made == video_frames.probe_video(clip, 5, images.MAX_PIXELS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda data: data[: len(data) // 2],
            r"cut off after frame|be decoded as a vi",
        ),
        (lambda data: data[:12] + bytes(len(data) - 12), "cannot be decoded as a video: "),
        (lambda _: b"ffconcat version 1.0\nfile /etc/passwd\n", "is not an image in "),
        (lambda _: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is not an image in "),
        (lambda _: b"", "is empty"),
    ],
)
def test_damaged_and_hostile_videos_are_refused(
    clip: Path, tmp_path: Path, change: Any, words: str
) -> None:
    path = tmp_path / "bad.mp4"
    path.write_bytes(change(clip.read_bytes()))
    for read in (
        lambda: video_frames.probe_video(path, 5, images.MAX_PIXELS),
        lambda: fitted(path, sampling()),
    ):
        with pytest.raises(InputError, match=words) as caught:
            read()
        assert caught.value.message.startswith(f"'{path}' ")
        assert "\n" not in caught.value.message


def test_a_video_beyond_the_limits_is_refused(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"clip.mp4' cannot be decoded as a video: .*max"):
        video_frames.probe_video(clip, 5, 96 * 64 - 1)
    narrow, raw = tmp_path / "narrow.mp4", tmp_path / "raw.mov"
    ffmpeg("-f", "lavfi", "-i", "color=s=640x32:d=0.2", narrow)
    with pytest.raises(InputError, match=r"narrow.mp4' is too narrow: 640x32"):
        video_frames.probe_video(narrow, 1, images.MAX_PIXELS)
    ffmpeg("-i", clip, "-c:v", "qtrle", raw)  # a codec that svdpp does not use
    with pytest.raises(InputError, match=r"raw.mov' cannot be decoded as a video: "):
        video_frames.probe_video(raw, 5, images.MAX_PIXELS)


def test_a_decode_has_a_deadline(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_frames, "_DECODE_SECONDS", 0.0)
    with pytest.raises(InputError, match=r"clip.mp4' cannot be decoded .* not end within 0 s$"):
        video_frames.probe_video(clip, 5, images.MAX_PIXELS)


def test_videos_are_found_by_their_suffixes(clip: Path, tmp_path: Path) -> None:
    still, video = tmp_path / "a.png", tmp_path / "b.MP4"
    still.write_bytes(encoded(gradient(), "PNG"))
    video.write_bytes(clip.read_bytes())
    assert found([str(tmp_path), str(still)], 7) == [video, still]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"is a folder without videos \(\.mp4 "):
        found([str(tmp_path / "empty")], 7)


# --- files with misleading names or other formats -------------------------------------------------


def _box(brand: bytes, *more: bytes) -> bytes:
    brands = b"".join(more)
    return (16 + len(brands)).to_bytes(4, "big") + b"ftyp" + brand + bytes(4) + brands + bytes(99)


@pytest.mark.parametrize(
    ("data", "words", "hint"),
    [
        (_box(b"heic", b"mif1"), "is a HEIC image", "heif-convert"),
        (_box(b"mif1", b"heic"), "is a HEIC image", "heif-convert"),
        (b"RIFF\0\0\0\0AVI LIST" + bytes(99), "is an AVI video", "ffmpeg -i"),
        ((b"G" + bytes(187)) * 3, "is an MPEG transport stream", "ffmpeg -i"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "is a JPEG XL image", "djxl"),
        (_box(b"isom"), "is a video, but an image is needed", "`family` that takes a video"),
        (b"text", "is not an image in PNG", "convert it to PNG or JPEG"),
    ],
)
def test_files_that_are_not_read_are_called_by_what_they_are(
    tmp_path: Path, data: bytes, words: str, hint: str
) -> None:
    path = tmp_path / "my photo.jpg"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        images.read_image(path)
    assert words in caught.value.message
    assert hint in caught.value.hint
    if b"isom" not in data:  # models that take videos refuse these files with the same error
        with pytest.raises(InputError) as caught:
            video_frames.probe_video(path, 5, images.MAX_PIXELS)
        assert words in caught.value.message


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_an_avif_image_is_read_by_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(gradient(), "AVIF", quality=95))
    image, media_file = images.read_image(path)
    assert (media_file.width, media_file.height) == gradient().size
    assert np.abs(np.asarray(image, int) - np.asarray(gradient(), int)).mean() < 4


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_a_video_of_its_stored_frames(tmp_path: Path, format: str) -> None:
    """An animation is read as a video of its stored frames, however long each is shown.

    diffusers' `load_video` reads a GIF in this way too.
    """
    frames = [Image.new("RGB", (48, 32), (40 * index, 0, 255 - 40 * index)) for index in range(6)]
    path = tmp_path / "a"
    times = [100, 50, 100, 900, 20, 20]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(
        frames[0], format, save_all=True, append_images=frames[1:], duration=times, **options
    )
    path.write_bytes(data)
    found = pixels(fitted(path, sampling()))
    expected = pixels(frames[:5])
    assert np.abs(found.astype(int) - expected).max() <= (12 if format == "GIF" else 0)
    if format == "GIF":
        theirs = load_video(str(path.rename(tmp_path / "a.gif")))
        assert np.array_equal(found, pixels([frame.convert("RGB") for frame in theirs[:5]]))
        path = tmp_path / "a.gif"
    with pytest.raises(InputError, match="has 6 of the 7 frames") as caught:
        video_frames.probe_video(path, 7, images.MAX_PIXELS)
    assert caught.value.details == {"frames": 6, "wanted": 7}


def test_a_variable_frame_rate_repeats_and_drops_no_frame(clip: Path, tmp_path: Path) -> None:
    """With a variable frame rate, each stored frame is read once.

    Frame n is shown at n * n / 16 s.
    """
    varied = tmp_path / "varied.mkv"
    times = ("-vf", "setpts=N*N/16/TB", "-fps_mode", "passthrough")
    ffmpeg("-i", clip, *times, "-c:v", "libx264", "-qp", "0", varied)
    asked = sampling(num_frames=5)
    assert np.array_equal(pixels(fitted(varied, asked)), pixels(fitted(clip, asked)))


def test_hdr_is_read_without_tone_mapping(clip: Path, tmp_path: Path) -> None:
    """An HDR video is read without tone mapping: its transfer function, PQ, changes no pixel."""
    frames = []
    for transfer in ("smpte2084", "bt709"):
        path = tmp_path / f"{transfer}.mkv"
        named = f"color_trc={transfer}:color_primaries=bt2020:colorspace=bt2020nc"
        change = f"format=yuv420p10le,setparams={named}"
        ffmpeg("-i", clip, "-vf", change, "-c:v", "libx264", "-qp", "0", path)
        log = probe_log(["-i", str(path)], seconds=60)
        assert "yuv420p10le" in log
        assert f"bt2020nc/bt2020/{transfer}" in log
        frames.append(pixels(fitted(path, sampling())))
    assert np.array_equal(*frames)


def test_a_cover_is_not_the_video(clip: Path, tmp_path: Path) -> None:
    """A cover image is not read as the video.

    It is marked as a cover in an mp4, and is an unmarked first stream in an mkv.
    """
    cover = tmp_path / "cover.jpg"
    cover.write_bytes(encoded(gradient(), "JPEG"))
    marked, plain = tmp_path / "marked.mp4", tmp_path / "plain.mkv"
    both = ("-i", cover, "-i", clip, "-map", "0", "-map", "1", "-c", "copy")
    ffmpeg(*both, "-disposition:v:0", "attached_pic", marked)
    ffmpeg(*both, plain)
    for path in (marked, plain):
        assert np.array_equal(pixels(fitted(path, sampling())), pixels(fitted(clip, sampling())))


def test_a_file_without_a_video_says_what_it_holds(clip: Path, tmp_path: Path) -> None:
    sound, cut = tmp_path / "sound.mp4", tmp_path / "cut.mp4"
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", sound)
    with pytest.raises(InputError, match="has no video: it holds only audio"):
        video_frames.probe_video(sound, 5, images.MAX_PIXELS)
    data = clip.read_bytes()
    cut.write_bytes(data[: data.index(b"mdat") + 400])
    with pytest.raises(InputError, match=r"cut off|cannot be decoded") as caught:
        video_frames.probe_video(cut, 7, images.MAX_PIXELS)
    assert "download it again" in caught.value.hint
    cut.write_bytes(data[:60])
    with pytest.raises(InputError, match="is cut off, or its index is damaged"):
        video_frames.probe_video(cut, 7, images.MAX_PIXELS)


def test_a_photo_that_the_frame_distorts_is_remarked_once() -> None:
    shapes = ((600, 800), (800, 600), (1024, 576), (500, 900))
    found = [
        images.MediaFile(Path(f"{width}.jpg"), "0" * 64, width, height)
        for width, height in shapes
        for _ in ("a prompt", "another")
    ]
    wide = SAMPLING_CLASSES["svd"](width=1024, height=576)
    assert inputs.input_remarks(found, SAMPLING_CLASSES["wan_vace"](height=32, width=512)) == []
    (remark,) = inputs.input_remarks(found, wide)
    assert "'600.jpg' (600x800) and 2 more are stretched to 1024x576" in remark
    assert "`fit` crop" in remark
    assert inputs.input_remarks(found[4:6], wide) == []
    assert inputs.input_remarks(found, replace(wide, fit="crop")) == []
    (remark,) = inputs.input_remarks(found, SAMPLING_CLASSES["ltx2_condition"]())
    assert "1 more are cropped to 768x512, as by diffusers; `fit` pad keeps all of it" in remark


@pytest.mark.parametrize(
    ("mode", "fill", "words"),
    [
        ("RGBA", (10, 20, 30, 128), "laid over white; if diffusers' load_image read it, its trans"),
        ("LA", (10, 0), "laid over white"),
        (
            "I;16",
            40000,
            "scaled from 16 bits to 8; if diffusers' load_image read it, its greys above",
        ),
        ("RGBA", (10, 20, 30, 255), ""),
        ("LA", (10, 255), ""),
        ("L", 10, ""),
        ("RGB", (10, 20, 30), ""),
        ("P", 3, ""),
    ],
)
def test_an_image_is_what_load_image_reads_or_a_remark_says_how_it_differs(
    tmp_path: Path, mode: str, fill: Any, words: str
) -> None:
    from diffusers.utils import load_image

    path = tmp_path / "a.png"
    Image.new(mode, (64, 36), fill).save(path)
    image, file = images.read_image(path)
    same = np.array_equal(np.asarray(image), np.asarray(load_image(str(path))))
    remarks = inputs.input_remarks([file], SAMPLING_CLASSES["svd"](width=1024, height=576))
    assert same == (remarks == []) == (not words)
    assert words in " ".join(remarks)


def test_references_that_are_narrower_than_the_model_takes_are_refused() -> None:
    narrow = images.MediaFile(Path("narrow.png"), "0" * 64, 400, 90)
    sampling = SAMPLING_CLASSES["minimax_h3_references"](height=32, width=32)
    for allowed in (sampling, SAMPLING_CLASSES["wan_vace"]()):
        inputs.check_image_shapes([replace(narrow, height=100)], allowed)
    with pytest.raises(InputError, match="400x90, and the model takes images up to 4:1") as caught:
        inputs.check_image_shapes([narrow], sampling)
    assert caught.value.details == {"width": 400, "height": 90, "max_aspect": 4}
    inputs.check_image_shapes([narrow], replace(sampling, fit="crop"))
