"""Owns one photograph from a stranger: reads it safely, cuts it to a shape.

Knows Pillow; knows no torch and no model. A file is read once: what is hashed is what is decoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from svdpp.config import Fit
from svdpp.errors import InputError

#: The only decoders that are ever tried. Others (EPS) start programs of their own.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
MAX_FILE_BYTES = 256 * 2**20
MAX_PIXELS = 50_000_000
MIN_SIDE = 16
MAX_ASPECT = 16

#: Padding a thin photograph to an opposite shape multiplies its pixels; more than this is refused.
_MAX_PADDED_PIXELS = 4 * MAX_PIXELS

_BAND_ROWS = 64

#: Held by whoever has process-wide stderr turned away: two at once would not put it back.
_STDERR = threading.Lock()

# EXIF 2.32, tag 0x0112. ImageOps.exif_transpose does the same but also writes the EXIF block anew,
# which raises on tags of an odd type that do the picture itself no harm.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Photo:
    """One photograph as it was read: its place, its bytes' identity, its upright size in pixels."""

    path: Path
    sha256: str
    """Of the file's bytes."""
    width: int
    height: int


def read_photo(path: Path) -> tuple[Image.Image, Photo]:
    """The photograph as an upright 8-bit RGB image, and what was read.

    Of an animation it is the first frame. Transparency is laid over white: cut-outs are mostly made
    for light pages, and over black their dark outlines and shadows would vanish. 16-bit grey is
    scaled, never clipped. Colour profiles are not applied, as diffusers applies none.

    Raises:
        InputError: the file cannot be read, is not whole, is none of `FORMATS`, or its size in
            pixels or bytes is outside the limits; one sentence with the file's name.
    """
    return photo_of(read_bytes(path), path)


def photo_of(data: bytes, path: Path) -> tuple[Image.Image, Photo]:
    """As `read_photo`, of bytes that were read elsewhere; `path` names them in messages.

    Raises:
        InputError: as `read_photo`.
    """
    try:
        with warnings.catch_warnings(), _libtiff_silenced(data):
            # Pillow warns of odd metadata and of sizes that are refused below anyway.
            warnings.simplefilter("ignore")
            image = _decode(data)
    except InputError as error:
        raise InputError(f"{_name(path)} {error.message}", error.hint) from None
    except UnidentifiedImageError:
        raise InputError(
            f"{_name(path)} is not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
            "convert it to PNG or JPEG first",
        ) from None
    except Image.DecompressionBombError:
        raise InputError(f"{_name(path)} is too large: {_limit_text()}") from None
    except MemoryError:
        raise InputError(f"{_name(path)} needs more memory than there is") from None
    except Exception as error:  # on hostile bytes Pillow raises nearly every type there is
        reason = "".join(c if c.isprintable() else " " for c in str(error))[:200]
        reason = reason or type(error).__name__
        raise InputError(f"{_name(path)} is damaged or truncated: {reason}") from error
    return image, Photo(path, hashlib.sha256(data).hexdigest(), image.width, image.height)


def fit_photo(image: Image.Image, width: int, height: int, fit: Fit) -> Image.Image:
    """The image in the shape `width`:`height` without resampling; diffusers resizes afterwards.

    Args:
        image: RGB, any size.
        width: of the clip, pixels.
        height: of the clip, pixels.
        fit: `stretch` leaves the image as it is, and diffusers stretches it; `crop` keeps the
            largest centred part of that shape; `pad` adds centred black bars.

    Raises:
        InputError: the padded image would be far larger than any photograph that is read.
    """
    if fit == "stretch":
        return image
    # The side that stays when cropped is the one that grows when padded.
    too_wide = image.width * height > image.height * width
    across = max(1, round(image.height * width / height))
    down = max(1, round(image.width * height / width))
    keep_height = too_wide if fit == "crop" else not too_wide
    size = (across, image.height) if keep_height else (image.width, down)
    if size[0] * size[1] > _MAX_PADDED_PIXELS:
        raise InputError(
            f"padding {image.width}x{image.height} to the shape of {width}x{height} would take "
            f"{size[0]}x{size[1]} pixels",
            "use --fit crop",
        )
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    if fit == "crop":
        return image.crop((-left, -top, size[0] - left, size[1] - top))
    canvas = Image.new("RGB", size)
    canvas.paste(image, (left, top))
    return canvas


def file_problem(path: Path) -> str:
    """What keeps `path` from being read as a file, to follow its name; empty where nothing does."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "is a folder, not an image file"
    return "" if stat.S_ISREG(mode) else "is not a regular file"


def read_bytes(path: Path) -> bytes:
    """The file's content, as far as `read_photo` would take it; InputError where it would not."""
    if problem := file_problem(path):
        raise InputError(f"{_name(path)} {problem}")
    try:
        # Non-blocking, so that a fifo put in the file's place since the check cannot hang the run.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            data = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as error:
        raise InputError(f"{_name(path)} cannot be read: {error.strerror}") from None
    if not data:
        raise InputError(f"{_name(path)} is empty (0 bytes)")
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{_name(path)} is larger than {MAX_FILE_BYTES // 2**20} MiB")
    return data


def _decode(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check_size(*image.size)
        if image.format == "PNG":
            # load() checks no chunk's checksum: a flipped byte can come out as other pixels.
            with Image.open(io.BytesIO(data), formats=FORMATS) as copy:
                copy.verify()
        image.load()
        # After load(), because Pillow turns a TIFF upright by itself there and drops the tag.
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        rgb = _to_rgb(image)
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return rgb if turn is None else rgb.transpose(turn)


@contextlib.contextmanager
def _libtiff_silenced(data: bytes) -> Iterator[None]:
    """Keeps libtiff, which writes what it finds odd to the process's stderr, from doing so.

    Pillow has no switch for it. So while a TIFF is read, descriptor 2 leads nowhere.
    """
    if data[:2] not in (b"II", b"MM"):
        yield
        return
    with _STDERR, contextlib.ExitStack() as undo:
        try:
            stderr = os.dup(2)
        except OSError:  # closed, as daemons have it
            yield
            return
        undo.callback(os.close, stderr)
        undo.callback(os.dup2, stderr, 2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        undo.callback(os.close, nowhere)
        os.dup2(nowhere, 2)
        yield


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise InputError(f"is too large: {width}x{height} pixels, {_limit_text()}")
    if min(width, height) < MIN_SIDE:
        raise InputError(f"is too small: {width}x{height} pixels, each side needs {MIN_SIDE}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(
            f"is too narrow: {width}x{height} pixels, at most {MAX_ASPECT}:1 makes sense as video"
        )


def _limit_text() -> str:
    return f"at most {MAX_PIXELS // 10**6} million are read"


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey_to_8_bits(image)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    over_white = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_ROWS):  # in bands: each step is a copy in memory
        box = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        rgba = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        over_white.paste(Image.alpha_composite(white, rgba).convert("RGB"), box)
    return over_white


def _grey_to_8_bits(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Grey of more than 8 bits, shape (H, W), with white at 255; Pillow's own convert clips."""
    grey = np.asarray(image)
    low, high = float(grey.min()), float(grey.max())
    if image.mode == "F":
        if not 0 <= low <= high <= 1:  # also false for NaN
            raise InputError(f"has float pixels from {low:g} to {high:g}: only 0 to 1 is read")
        return np.asarray(np.rint(grey * 255), dtype=np.uint8)
    # Mode I is 32 bits wide: 16-bit values are common there, others have no agreed white.
    if image.mode == "I" and not (low >= 0 and 255 < high <= 65535):
        raise InputError(f"has 32-bit pixels from {low:g} to {high:g}: only 16 bits are read")
    eight = np.asarray((grey.astype(np.uint32) + 128) // 257, dtype=np.uint8)
    if isinstance(key := image.info.get("transparency"), int):
        eight[grey == key] = 255
    return eight


def _name(path: Path) -> str:
    return repr(str(path))
