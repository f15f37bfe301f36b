"""Untrusted photographs: real files with defects of many kinds, created by the tests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from svdpp.errors import InputError
from svdpp.media import inputs as media
from svdpp.media.inputs import Photo, check_inputs, fit_photo, read_photo
from tests.media.pictures import encoded, gradient, png

ODD_NAMES = ["a b.png", "a\nb.png", "é你.png", "-y.png", "[x].png", "%03d.png", "concat:x.png"]


def settings_of_pillow() -> Any:
    return Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, [*warnings.filters]


def read(folder: Path, data: bytes) -> Image.Image:
    (folder / "x").write_bytes(data)
    before = settings_of_pillow()
    image, photo = read_photo(folder / "x")
    assert settings_of_pillow() == before
    assert image.mode == "RGB"
    assert image.size == (photo.width, photo.height)
    return image


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_photo(path)
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
    _, photo = read_photo(tmp_path / "x")
    assert photo == Photo(tmp_path / "x", hashlib.sha256(data).hexdigest(), 48, 32)


def test_the_limit_in_pixels_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(encoded(gradient(1000, 1001), "PNG"))
    assert read_photo(path, 1_001_000)[1].height == 1001
    with pytest.raises(InputError, match="1000x1001 pixels, the limit is 1 million") as caught:
        read_photo(path, 1_000_000)
    assert "raise --max-megapixels (at most 50)" in caught.value.hint
    for side in (8000, 2**31 - 1):  # also beyond the largest limit, and Pillow's own
        path.write_bytes(png(side, side, 8, 0, b""))
        with pytest.raises(InputError, match="the limit is 1 million"):
            read_photo(path, 1_000_000)


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
    # XResolution as text: ImageOps.exif_transpose raises TypeError on it.
    entries = struct.pack("<HHI4s", 0x0112, 3, 1, b"\6\0\0\0")
    entries += struct.pack("<HHI4s", 0x011A, 2, 3, b"72\0\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + bytes(4)
    assert read(tmp_path, encoded(gradient(), "JPEG", exif=exif)).size == (32, 48)


def filled(mode: str, colour: Any, dots: tuple[Any, ...] = ()) -> Image.Image:
    """One colour; the first pixels have others."""
    image = Image.new(mode, (20, 20), colour)
    if mode == "P":
        image.putpalette([0, 0, 255, 255, 0, 0])
    for x, dot in enumerate(dots):
        image.putpixel((x, 0), dot)
    return image


def deep(value: float, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((20, 20), value, dtype))


#: Pictures, their formats and options, and the first pixels of what is read.
PIXELS: dict[str, tuple[Image.Image, str, dict[str, Any], list[tuple[int, ...]]]] = {
    "alpha": (
        filled("RGBA", (255, 0, 0, 0), ((0, 0, 255, 255), (0, 0, 0, 128))),
        "PNG",
        {},
        [(0, 0, 255), (127, 127, 127), (255, 255, 255)],
    ),
    "grey with alpha": (filled("LA", (30, 0)), "PNG", {}, [(255, 255, 255)]),
    "palette with alpha": (filled("PA", (30, 0)), "TIFF", {}, [(255, 255, 255)]),
    "palette": (filled("P", 1, (0,)), "PNG", {"transparency": 1}, [(0, 0, 255), (255, 255, 255)]),
    **{
        f"{value} of 16 bits in {format}": (deep(value, np.uint16), format, {}, [(grey,) * 3])
        for format in ("PNG", "TIFF")
        for value, grey in ((40000, 156), (65535, 255), (0, 0), (128, 0), (129, 1))
    },
    "big-endian": (deep(40000, ">u2"), "TIFF", {}, [(156, 156, 156)]),
    "16 of 32 bits": (deep(40000, np.int32), "TIFF", {}, [(156, 156, 156)]),
    "float": (deep(40000 / 65535, np.float32), "TIFF", {}, [(156, 156, 156)]),
    "CMYK JPEG, inverted": (filled("CMYK", (0, 255, 255, 0)), "JPEG", {}, [(255, 0, 0)]),
    "CMYK TIFF": (filled("CMYK", (0, 255, 255, 0)), "TIFF", {}, [(255, 0, 0)]),
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
    **{
        mode: (Image.new("RGB", (20, 20), "white").convert(mode), "TIFF", {}, [(255, 255, 255)])
        for mode in ("1", "L", "P", "YCbCr")
    },
}


@pytest.mark.parametrize("name", PIXELS)
def test_every_kind_of_picture_becomes_rgb_over_white(tmp_path: Path, name: str) -> None:
    """Hidden colours vanish, deep grey is scaled, an animation gives its first frame."""
    image, format, options, expected = PIXELS[name]
    found = read(tmp_path, encoded(image, format, **options))
    assert [found.getpixel((x, 0)) for x in range(len(expected))] == expected


@pytest.mark.parametrize("value", [-5, 100, 70000, float("nan"), 1.5, -0.1])
def test_deep_greys_without_a_known_white_are_refused(tmp_path: Path, value: float) -> None:
    dtype = np.int32 if isinstance(value, int) else np.float32
    message = refused(tmp_path, encoded(deep(value, dtype), "TIFF"))
    assert "pixels from" in message
    assert "damaged" not in message


def test_transparent_16_bit_grey_is_white(tmp_path: Path) -> None:
    rows = (b"\0" + struct.pack(">HH", 40000, 20000) * 10) * 20
    result = read(tmp_path, png(20, 20, 16, 0, rows, struct.pack(">H", 40000)))
    assert result.getpixel((0, 0)) == (255, 255, 255)
    assert result.getpixel((1, 0)) == (78, 78, 78)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.8, 0.95])
def test_truncated_files_are_refused(tmp_path: Path, format: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), format)
    refused(tmp_path, data[: int(len(data) * part)])


def test_a_flipped_byte_in_a_png_never_changes_the_picture(tmp_path: Path) -> None:
    good = encoded(gradient(), "PNG")
    missed_by_pillow = 0
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 4
        (tmp_path / "x.png").write_bytes(data)
        try:
            image = read_photo(tmp_path / "x.png")[0]
        except InputError:
            with contextlib.suppress(Exception):
                plain = Image.open(io.BytesIO(bytes(data))).convert("RGB")
                missed_by_pillow += plain.tobytes() != gradient().tobytes()
        else:
            assert image.tobytes() == gradient().tobytes()
    assert missed_by_pillow  # otherwise the check by verify() would not be needed


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"hello, I am a text\n", "is not an image in PNG, JPEG, WEBP, BMP, TIFF or GIF"),
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's own warning about the size must not be printed
        assert words in refused(tmp_path, data)


def test_limits_are_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (256, 16)), "PNG")
    monkeypatch.setattr(media, "MAX_FILE_BYTES", len(data))
    assert read(tmp_path, data).size == (256, 16)
    assert "is larger than" in refused(tmp_path, data + b"\0")


def test_decompression_bomb_stays_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png(9500, 9500, 8, 0, bytes(9501 * 9500)))
    (tmp_path / "small.png").write_bytes(encoded(gradient(), "PNG"))
    assert (tmp_path / "bomb.png").stat().st_size < 200_000
    script = """
import sys
from pathlib import Path
from svdpp.errors import InputError
from svdpp.media.inputs import read_photo
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
read_photo(Path(sys.argv[1]))
before = peak()
try:
    read_photo(Path(sys.argv[2]))
except InputError as error:
    print(error.message, file=sys.stderr)
    print(peak() - before)
"""
    names = [str(tmp_path / "small.png"), str(tmp_path / "bomb.png")]
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True)
    assert "9500x9500" in done.stderr
    assert int(done.stdout) < 20_000  # kB; decoded it has 90_000


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


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.png").write_bytes(encoded(gradient(), "PNG"))

    def denied(*_: object) -> int:  # root can read everything, so the refusal is simulated
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "cannot be read: Permission denied" in refusal(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "does not fit in memory"),
        (OverflowError("\x1b[31mboo\n"), "is damaged or truncated: ?[31mboo"),
        (KeyError(), "is damaged or truncated: KeyError"),
    ],
)
def test_whatever_a_decoder_raises_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert words in refused(tmp_path, encoded(gradient(), "BMP"))


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(encoded(gradient(), "PNG"))
    assert found([name]) == [Path(name)]
    assert found(["."]) == [Path(name)]
    assert read_photo(Path(name))[0].size == (48, 32)
    Path(name).write_bytes(b"text")
    refusal(Path(name))


def found(inputs: Sequence[str], videos: int | None = None) -> list[Path]:
    return [photo.path for photo in check_inputs(inputs, videos)]


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
    literal = str(folder / "[ab].jpg")  # a literal name goes before a pattern
    assert found([literal]) == [Path(literal)]
    Path(literal).unlink()
    assert found([literal]) == expected[:1]
    (tmp_path / "twin.jpg").symlink_to(folder / "a.jpg")
    assert found([str(folder), str(tmp_path / "twin.jpg")]) == expected
    assert found([]) == []


def test_every_bad_input_is_listed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    os.mkfifo(tmp_path / "full" / "fifo.png")
    for name, data in (("good", encoded(gradient(), "PNG")), ("text", b"text"), ("none", b"")):
        (tmp_path / f"{name}.png").write_bytes(data)
    words = {
        "gone.png": "does not exist",
        "empty": "without images",
        "*.bmp": "matches no",
        "full": "regular",
        "a\0*": "null",
        "text.png": "is not an image",
        "none.png": "is empty",
    }
    with pytest.raises(InputError) as caught:
        found(["", *(str(tmp_path / name) for name in ("good.png", *words))])
    first, *lines = caught.value.message.splitlines()
    assert first == "8 inputs cannot be used:"
    for word, line in zip(("empty name", *words.values()), lines, strict=True):
        assert word in line
    with pytest.raises(InputError, match=r"^'.*text\.png' is not an image") as caught:
        found([str(tmp_path / "text.png")])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("fit", "width", "height", "size"),
    [
        ("stretch", 10, 10, (48, 32)),
        ("crop", 64, 64, (32, 32)),
        ("crop", 128, 64, (48, 24)),
        ("crop", 8, 8000, (1, 32)),
        ("crop", 96, 64, (48, 32)),
        ("pad", 64, 64, (48, 48)),
        ("pad", 128, 64, (64, 32)),
        ("pad", 96, 64, (48, 32)),
    ],
)
def test_fit_gives_the_shape(fit: str, width: int, height: int, size: tuple[int, int]) -> None:
    result = fit_photo(gradient(), width, height, fit)
    assert result.size == size
    assert result.mode == "RGB"


def test_fit_is_centred() -> None:
    image = gradient()
    crop = fit_photo(image, 64, 64, "crop")
    assert crop.tobytes() == image.crop((8, 0, 40, 32)).tobytes()
    pad = fit_photo(image, 64, 64, "pad")
    assert pad.crop((0, 8, 48, 40)).tobytes() == image.tobytes()
    assert not any(pad.crop((0, 0, 48, 8)).tobytes() + pad.crop((0, 40, 48, 48)).tobytes())
    assert fit_photo(image, 1, 99, "stretch") is image


def test_padding_has_a_limit() -> None:
    with pytest.raises(InputError, match="would take"):
        fit_photo(Image.new("RGB", (16000, 1000)), 8, 800, "pad")


SAMPLES = [encoded(gradient(), name) for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")]
SAMPLES.append(
    encoded(gradient().convert("RGBA"), "PNG", save_all=True, append_images=[gradient()])
)
SAMPLES.append(encoded(gradient().convert("P"), "TIFF", compression="tiff_lzw"))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SAMPLES)))
    places = st.integers(0, min(len(data), draw(st.sampled_from([60, 10**6]))) - 1)
    for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        data[place] = byte
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.long
@settings(max_examples=4 * settings.default.max_examples)
@given(st.one_of(damaged(), damaged(), st.binary(max_size=200)))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.png")
        path.write_bytes(data)
        try:
            image, photo = read_photo(path)
        except InputError:
            return
        assert image.mode == "RGB"
        assert len(image.tobytes()) == photo.width * photo.height * 3
