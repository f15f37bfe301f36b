"""Reading an untrusted image safely and fitting it to a shape; knows no torch.

A file is read once, so the hashed bytes are the decoded bytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from svdpp.config import Fit
from svdpp.config.limits import MAX_MEGAPIXELS
from svdpp.errors import InputError, first_line

#: The only decoders that are used. Others, such as EPS, start external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
# ffmpeg's demuxers of videos, by bytes of a file and their place. Playlists could name other files.
_DEMUXERS = (
    *((4, kind, "mov") for kind in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)
MAX_FILE_BYTES = 256 * 2**20
MAX_PIXELS = MAX_MEGAPIXELS * 10**6
MIN_SIDE = 16
MAX_ASPECT = 16

#: Padding a narrow image to a wide shape multiplies its pixels; more than this is refused.
_MAX_PADDED_PIXELS = 4 * MAX_PIXELS

_SMALLER = f"make it smaller, or raise --max-megapixels (at most {MAX_MEGAPIXELS})"
_BAND_ROWS = 64
_ORIENTATION = ExifTags.Base.Orientation


@dataclass(frozen=True)
class Photo:
    """Path, hash and upright size in pixels of an image that was read."""

    path: Path
    sha256: str
    """SHA-256 of the file, in hex."""
    width: int
    height: int


def read_photo(path: Path, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, Photo]:
    """Read an image as an upright 8-bit RGB image.

    An animation gives its first frame. Transparent images are composited over white: most cut-outs
    are made for light pages, and over black their dark outlines and shadows would vanish. 16-bit
    grey is scaled, never clipped. Colour profiles are not applied, because diffusers applies none.
    """
    return photo_of(read_bytes(path), path, max_pixels)


def photo_of(data: bytes, path: Path, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, Photo]:
    """As `read_photo`, from bytes in memory; `path` names them in messages."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of invalid metadata, and of sizes that are refused below anyway.
            warnings.simplefilter("ignore")
            image = _decode(data, max_pixels)
    except InputError as error:
        raise InputError(f"{_name(path)} {error.message}", error.hint) from None
    except UnidentifiedImageError:
        raise InputError(
            f"{_name(path)} is not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
            "give a --family that takes a video, such as wan_v2v: svdpp models lists them"
            if demuxer_of(data)
            else "convert it to PNG or JPEG first",
        ) from None
    except Image.DecompressionBombError:
        limit = max_pixels // 10**6
        raise InputError(
            f"{_name(path)} is too large: the limit is {limit} million pixels",
            _SMALLER if limit < MAX_MEGAPIXELS else "make it smaller",
        ) from None
    except MemoryError:
        raise InputError(f"{_name(path)} does not fit in memory") from None
    except Exception as error:  # on hostile bytes Pillow raises nearly any type
        raise InputError(f"{_name(path)} is damaged or truncated: {first_line(error)}") from error
    return image, Photo(path, hashlib.sha256(data).hexdigest(), image.width, image.height)


def demuxer_of(data: bytes) -> str | None:
    """ffmpeg's name of the format of a video; None if the bytes are no video that is taken."""
    known = (name for place, magic, name in _DEMUXERS if data.startswith(magic, place))
    return next(known, None)


def fit_photo(image: Image.Image, width: int, height: int, fit: Fit) -> Image.Image:
    """Fit the image to the aspect ratio `width`:`height` without resampling; diffusers resizes it.

    Args:
        fit: `stretch` returns the image unchanged, and diffusers stretches it; `crop` keeps the
            largest centred part with that ratio; `pad` adds black bars on both sides.
    """
    if fit == "stretch":
        return image
    # The side that a crop keeps is the side that a pad extends.
    too_wide = image.width * height > image.height * width
    across = max(1, round(image.height * width / height))
    down = max(1, round(image.width * height / width))
    keep_height = too_wide if fit == "crop" else not too_wide
    size = (across, image.height) if keep_height else (image.width, down)
    if size[0] * size[1] > _MAX_PADDED_PIXELS:
        raise InputError(
            f"padding {image.width}x{image.height} to the shape of {width}x{height} would take "
            f"{size[0]}x{size[1]} pixels, which is too large",
            "use --fit crop",
        )
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    if fit == "crop":
        return image.crop((-left, -top, size[0] - left, size[1] - top))
    canvas = Image.new("RGB", size)
    canvas.paste(image, (left, top))
    return canvas


def check_file(path: Path) -> None:
    """Refuses what cannot be read as a file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{_name(path)} does not exist") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"{_name(path)} cannot be read: {cause}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{_name(path)} is a folder, not an image file")
    if not stat.S_ISREG(mode):
        raise InputError(f"{_name(path)} is not a regular file")


def read_bytes(path: Path) -> bytes:
    """The file's content."""
    check_file(path)
    try:
        # Non-blocking, so that a fifo that replaced the file after the check cannot hang the run.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            data = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as error:
        raise InputError(f"{_name(path)} cannot be read: {error.strerror}") from None
    if not data:
        raise InputError(f"{_name(path)} is empty (0 bytes)")
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{_name(path)} is larger than {MAX_FILE_BYTES // 2**20} MiB")
    return data


def _decode(data: bytes, max_pixels: int) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_size(*image.size, max_pixels)
        if image.format == "PNG":
            # load() does not check the checksums of chunks: a flipped byte could change pixels.
            with Image.open(io.BytesIO(data), formats=FORMATS) as copy:
                copy.verify()
        image.load()
        # After load(), because there Pillow turns a TIFF upright and drops the tag.
        orientation = image.getexif().get(_ORIENTATION)
        rgb = _to_rgb(image)
    rgb.info.clear()  # Pillow would write all other tags again, and some have odd types
    rgb.getexif()[_ORIENTATION] = orientation if isinstance(orientation, int) else 1
    return ImageOps.exif_transpose(rgb)


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuses a picture that is too large, too small or too narrow."""
    if width * height > max_pixels:
        raise InputError(
            f"is too large: {width}x{height} pixels, the limit is {max_pixels // 10**6} million",
            _SMALLER if width * height <= MAX_PIXELS else "make it smaller",
        )
    if min(width, height) < MIN_SIDE:
        raise InputError(
            f"is too small: {width}x{height} pixels, each side must have at least {MIN_SIDE}"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(f"is too narrow: {width}x{height} pixels, the limit is {MAX_ASPECT}:1")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey_to_8_bits(image)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    over_white = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_ROWS):  # in bands, because each step makes a copy
        box = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        rgba = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        over_white.paste(Image.alpha_composite(white, rgba).convert("RGB"), box)
    return over_white


def _grey_to_8_bits(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Scale grey of more than 8 bits to shape (H, W) with white at 255; Pillow would clip it."""
    grey = np.asarray(image)
    low, high = float(grey.min()), float(grey.max())
    if image.mode == "F":
        if not 0 <= low <= high <= 1:  # also false for NaN
            raise InputError(f"has float pixels from {low:g} to {high:g}: they must be 0 to 1")
        return np.asarray(np.rint(grey * 255), dtype=np.uint8)
    # Mode I has 32 bits. It commonly holds 16-bit values; for others white is not defined.
    if image.mode == "I" and not (low >= 0 and 255 < high <= 65535):
        raise InputError(f"has 32-bit pixels from {low:g} to {high:g}: only 16 bits can be read")
    eight = np.asarray((grey.astype(np.uint32) + 128) // 257, dtype=np.uint8)
    if isinstance(key := image.info.get("transparency"), int):
        eight[grey == key] = 255
    return eight


def _name(path: Path) -> str:
    return repr(str(path))
