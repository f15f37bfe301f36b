"""Image files: reading as upright RGB images within limits, and fitting to the shape of a frame.

Files are untrusted. Each file is read only once, so that its hash is that of the decoded bytes even
if the file changes meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from svdpp.config import Fit
from svdpp.config.limits import MAX_MEGAPIXELS
from svdpp.errors import InputError, first_line
from svdpp.media.kinds import FORMATS, demuxer_of, unsupported_kind
from svdpp.media.output_files import error_reason

#: Maximum size of an input file in bytes.
MAX_FILE_BYTES = 256 * 2**20
#: Maximum number of pixels of an image or frame.
MAX_PIXELS = MAX_MEGAPIXELS * 10**6
# Minimum side of an image in pixels, and maximum ratio of its sides.
_MIN_SIDE, _MAX_ASPECT = 16, 16
# Maximum number of pixels of a padded image. A padded image needs its own limit, because padding a
# narrow image to a wide frame makes it many times larger.
_MAX_PADDED_PIXELS = 4 * MAX_PIXELS
_SMALLER = f"make it smaller, or raise `max_megapixels` (at most {MAX_MEGAPIXELS})"
# Number of rows of an image that are converted to RGB at the same time.
_BAND_ROWS = 64
_ORIENTATION = ExifTags.Base.Orientation

#: Conversion of an image's colours that svdpp does and diffusers' `load_image` does not.
#: `over white`: transparent parts are laid over white. `scaled`: 16-bit grey is scaled to 8 bits.
#: Empty: no such conversion.
Conversion = Literal["", "over white", "scaled"]


@dataclass(frozen=True)
class MediaFile:
    """Metadata (path, SHA-256, size in pixels) of an image or a video that was read."""

    path: Path
    sha256: str
    """SHA-256 of the file, in hex."""
    width: int
    """Width of the upright image in pixels."""
    height: int
    """Height of the upright image in pixels."""
    conversion: Conversion = ""
    """Conversion of the colours that diffusers' `load_image` does not do; empty: none."""


def read_bytes(path: Path) -> bytes:
    """Return the content of an input file; raise an `InputError` for a pipe or a file over 256 MiB.

    Args:
        path: Path of a file of at most 256 MiB. Pipes and devices are rejected without waiting.

    Raises:
        InputError: The file does not exist, is empty or too large, or cannot be read.
    """
    name = repr(str(path))
    details: dict[str, object] = {"path": str(path)}
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{name} is not a regular file", details=details)
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist", details=details) from None
    except (OSError, ValueError) as error:
        why = error_reason(error)
        raise InputError(
            f"{name} cannot be read: {why}", details={**details, "reason": why}
        ) from None
    if not data:
        raise InputError(f"{name} is empty (0 bytes)", details={**details, "bytes": 0})
    if len(data) > MAX_FILE_BYTES:
        details["limit_bytes"] = MAX_FILE_BYTES
        raise InputError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB", details=details)
    return data


def read_image(path: Path, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, MediaFile]:
    """Read an image file as an upright 8-bit RGB image; return it and its metadata.

    The first frame of an animation is read. Transparent images are composited over white, because
    most cut-outs are made for light pages: over black, dark outlines and shadows would vanish.
    16-bit grey is scaled to 8 bits, not clipped. Colour profiles are not applied, because diffusers
    does not apply them.

    Args:
        path: Path of a file in one of `FORMATS`, with any suffix.
        max_pixels: Largest number of pixels.

    Raises:
        InputError: The file is not an image in one of `FORMATS`, or the image is damaged, too
            large, too small or too narrow.
    """
    return decode_image(read_bytes(path), path, max_pixels)


def decode_image(data: bytes, path: Path, max_pixels: int) -> tuple[Image.Image, MediaFile]:
    """Decode the content of an image file to an upright 8-bit RGB image; see `read_image`.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.
        max_pixels: Largest number of pixels.

    Raises:
        InputError: The file is not an image, is damaged, or exceeds a limit.
    """
    name = repr(str(path))
    try:
        with warnings.catch_warnings():
            # Pillow warns about invalid metadata, and about large images, which are rejected below.
            warnings.simplefilter("ignore")
            image, conversion = _decode(data, max_pixels)
    except InputError as error:
        details = {"path": str(path), **error.details}
        raise InputError(f"{name} {error.message}", error.hint, details=details) from None
    except UnidentifiedImageError:
        raise _not_an_image(data, path) from None
    except Image.DecompressionBombError:
        limit = f"the limit is {max_pixels // 10**6} million pixels"
        details = {"path": str(path), "limit_pixels": max_pixels}
        raise InputError(f"{name} is too large: {limit}", _SMALLER, details=details) from None
    except MemoryError:
        details = {"path": str(path)}
        raise InputError(f"{name} does not fit in memory", details=details) from None
    except Exception as error:  # Pillow raises nearly any type of exception for malicious files
        details = {"path": str(path), "reason": first_line(error)}
        message = f"{name} is damaged or truncated: {first_line(error)}"
        raise InputError(message, details=details) from error
    sha256 = hashlib.sha256(data).hexdigest()
    return image, MediaFile(path, sha256, image.width, image.height, conversion)


def _not_an_image(data: bytes, path: Path) -> InputError:
    name = repr(str(path))
    unsupported = unsupported_kind(data)
    if unsupported is not None:
        hint = unsupported.hint.format(name=shlex.quote(str(path)))
        return InputError(f"{name} is {unsupported.name}, which svdpp does not read", hint)
    message = f"{name} is not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if demuxer_of(data):
        hint = (
            "give a `family` that takes a video, such as wan_v2v (svdpp models lists the "
            "families); last images and reference images cannot be videos in any family"
        )
        return InputError(f"{name} is a video, but an image is needed", hint)
    return InputError(message, "convert it to PNG or JPEG first")


def _decode(data: bytes, max_pixels: int) -> tuple[Image.Image, Conversion]:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_image_size(*image.size, max_pixels)
        if image.format == "PNG":
            # `load()` does not check the checksums of a PNG's chunks, so a damaged byte could
            # change pixels. `verify()` does.
            with Image.open(io.BytesIO(data), formats=FORMATS) as copy:
                copy.verify()
        image.load()
        # The orientation is read after `load()`, which turns a TIFF upright and removes its
        # orientation tag.
        orientation = image.getexif().get(_ORIENTATION)
        rgb, conversion = to_rgb(image)
    # Only the orientation tag is kept, because `exif_transpose` writes all EXIF tags of the image
    # again, and fails for tags that Pillow can read but not write.
    rgb.info.clear()
    rgb.getexif()[_ORIENTATION] = orientation if isinstance(orientation, int) else 1
    return ImageOps.exif_transpose(rgb), conversion


def check_image_size(width: int, height: int, max_pixels: int) -> None:
    """Raise an `InputError` if an image or frame is too large, too small or too narrow.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        max_pixels: Largest product of width and height.

    Raises:
        InputError: The image is too large, too small or too narrow. The message has no subject:
            callers put the name of the file before it.
    """
    size = f"{width}x{height} pixels"
    details: dict[str, int] = {"width": width, "height": height, "limit_pixels": max_pixels}
    if width * height > max_pixels:
        limit = f"the limit is {max_pixels // 10**6} million"
        raise InputError(f"is too large: {size}, {limit}", _SMALLER, details=details)
    if min(width, height) < _MIN_SIDE:
        details["min_side"] = _MIN_SIDE
        message = f"is too small: {size}, each side must have at least {_MIN_SIDE}"
        raise InputError(message, details=details)
    if max(width, height) > _MAX_ASPECT * min(width, height):
        details["max_aspect"] = _MAX_ASPECT
        message = f"is too narrow: {size}, the limit is {_MAX_ASPECT}:1"
        raise InputError(message, details={**details, "limit": f"{_MAX_ASPECT}:1"})


def to_rgb(image: Image.Image) -> tuple[Image.Image, Conversion]:
    """Convert an image to 8-bit RGB; return it and its `Conversion`, such as `over white`.

    Raises:
        InputError: The image has 32-bit grey. The message has no subject: callers put the name of
            the file before it.
    """
    if image.mode in ("F", "I"):
        raise InputError(
            "has 32-bit grey, whose white is not defined: save it with 16 bits",
            details={"bits": 32, "max_bits": 16},
        )
    if image.mode.startswith("I;16"):  # `convert` would clip 16-bit values instead of scaling them
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB"), "scaled"
    if not image.has_transparency_data:
        return image.convert("RGB"), ""
    is_opaque = True
    over_white = Image.new("RGB", image.size)
    # The image is converted in horizontal bands to save memory, because each conversion makes a
    # copy.
    for top in range(0, image.height, _BAND_ROWS):
        box = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        rgba = image.crop(box).convert("RGBA")
        is_opaque = is_opaque and rgba.getchannel("A").getextrema()[0] == 255
        white = Image.new("RGBA", rgba.size, "white")
        over_white.paste(Image.alpha_composite(white, rgba).convert("RGB"), box)
    return over_white, "" if is_opaque else "over white"


def fit_image(image: Image.Image, width: int, height: int, fit: Fit) -> Image.Image:
    """Crop or pad an image to a frame's aspect ratio, as `fit` says, without resampling it.

    The pipeline of diffusers resizes the image later.

    Args:
        image: Upright RGB image.
        width: Width of the frame, in pixels.
        height: Height of the frame, in pixels.
        fit: `stretch` leaves the image as it is; `crop` keeps the largest centred part with the
            frame's aspect ratio; `pad` adds black bars on the left and right, or above and below.

    Raises:
        InputError: The padded image would have too many pixels.
    """
    if fit == "stretch":
        return image
    # To get the frame's aspect ratio, the image needs either the width `across` and its own height,
    # or the height `down` and its own width. `crop` takes the one that is smaller than that side of
    # the image, `pad` the one that is larger.
    too_wide = image.width * height > image.height * width
    across = max(1, round(image.height * width / height))
    down = max(1, round(image.width * height / width))
    keep_height = too_wide if fit == "crop" else not too_wide
    size = (across, image.height) if keep_height else (image.width, down)
    if size[0] * size[1] > _MAX_PADDED_PIXELS:
        raise InputError(
            f"padding {image.width}x{image.height} to the shape of {width}x{height} would take "
            f"{size[0]}x{size[1]} pixels, which is too large",
            "use `fit` crop",
            details={
                **{"image_width": image.width, "image_height": image.height},
                **{"width": width, "height": height},
                **{"padded_width": size[0], "padded_height": size[1]},
            },
        )
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    if fit == "crop":
        return image.crop((-left, -top, size[0] - left, size[1] - top))
    canvas = Image.new("RGB", size)
    canvas.paste(image, (left, top))
    return canvas
