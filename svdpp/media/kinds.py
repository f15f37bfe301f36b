"""Detection of media files by their first bytes, and hints on how to convert unsupported files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from PIL import features

#: Image formats that Pillow may decode. Pillow's decoders of some other formats, such as EPS, start
#: external programs.
FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
if features.check("avif"):
    FORMATS = (*FORMATS, "AVIF")

# Number of bytes at the beginning of a file that contain the signature of any supported format.
_SIGNATURE_BYTES = 16
# Signatures of video formats: offset in the file, bytes there, and ffmpeg's demuxer. Playlists are
# not supported, because they could name other files.
_DEMUXERS = (
    *((4, kind, "mov") for kind in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)
# First bytes and usual suffix of each image format, except WebP and AVIF.
_IMAGE_SUFFIXES = (
    (b"\x89PNG", ".png"),
    (b"\xff\xd8", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II", ".tif"),
    (b"MM", ".tif"),
)
# Brands of ISO media files that contain images: HEIC and AVIF. Only the brand (bytes 8 to 11)
# distinguishes such a file from an mp4.
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF = (b"avif", b"avis")

_TO_MP4 = (
    "convert it first: ffmpeg -i {name} -c copy out.mp4 (if mp4 does not support the codec, use "
    "-c:v libx264 instead of -c copy)"
)


class UnsupportedKind(NamedTuple):
    """Kind of media file that svdpp recognises but cannot read, with a hint for conversion."""

    name: str
    """Name with its article, such as `an AVI video`."""
    hint: str
    """Hint on how to convert the file; `{name}` stands for the file's name."""


# Signatures of unsupported files: an offset in the file and the bytes there, a second offset and
# the bytes there, and the kind of file.
_UNSUPPORTED = (
    (0, b"RIFF", 8, b"AVI ", UnsupportedKind("an AVI video", _TO_MP4)),
    (0, b"G", 188, b"G", UnsupportedKind("an MPEG transport stream (.ts)", _TO_MP4)),
    (4, b"G", 196, b"G", UnsupportedKind("an MPEG transport stream (.m2ts)", _TO_MP4)),
    (0, b"\x00\x00\x01\xba", 0, b"", UnsupportedKind("an MPEG video", _TO_MP4)),
    (0, b"FLV\x01", 0, b"", UnsupportedKind("a Flash video", _TO_MP4)),
    (0, b"\x30\x26\xb2\x75", 0, b"", UnsupportedKind("a Windows Media video", _TO_MP4)),
    (0, b"OggS", 0, b"", UnsupportedKind("an Ogg file", _TO_MP4)),
    (
        *(0, b"\x00\x00\x00\x0cJXL ", 0, b""),
        UnsupportedKind("a JPEG XL image", "convert it to PNG or JPEG first: djxl {name} out.png"),
    ),
    (
        *(0, b"\xff\x0a", 0, b""),
        UnsupportedKind("a JPEG XL image", "convert it to PNG or JPEG first: djxl {name} out.png"),
    ),
)
_HEIC_IMAGE = UnsupportedKind(
    "a HEIC image, as phones take them",
    "convert it to JPEG first: heif-convert {name} out.jpg, or set the phone to take JPEG photos",
)
_AVIF_IMAGE = UnsupportedKind(
    "an AVIF image (not supported by the installed Pillow)",
    "install Pillow 11.3 or later, or convert it to PNG first: avifdec {name} out.png",
)


def read_signature(path: Path) -> bytes:
    """Return the first bytes of a file, from which the other functions here detect its format."""
    with path.open("rb") as file:
        return file.read(_SIGNATURE_BYTES)


def demuxer_of(data: bytes) -> str | None:
    """Return the name of ffmpeg's demuxer for a video, by its first bytes; None if unsupported."""
    if is_iso_image(data):
        return None
    known = (name for place, magic, name in _DEMUXERS if data.startswith(magic, place))
    return next(known, None)


def usual_suffix(data: bytes) -> str:
    """Return the usual suffix, such as `.jpg`, of an image or a video, from its first bytes.

    Args:
        data: First bytes of the file.

    Returns:
        Suffix with its dot; `.bin` if no supported format begins with these bytes.
    """
    if demuxer := demuxer_of(data):
        return ".mp4" if demuxer == "mov" else ".mkv"
    if is_iso_image(data):
        return ".avif"
    if data.startswith(b"RIFF") and data.startswith(b"WEBP", 8):
        return ".webp"
    return next((suffix for magic, suffix in _IMAGE_SUFFIXES if data.startswith(magic)), ".bin")


def is_iso_image(data: bytes) -> bool:
    """Whether the first bytes of a file are those of a HEIC or AVIF image."""
    return data[4:8] == b"ftyp" and data[8:12] in (*_HEIC, *_AVIF)


def unsupported_kind(data: bytes) -> UnsupportedKind | None:
    """Return the kind of an unsupported file, from its first bytes; None if no kind matches."""
    if is_iso_image(data):
        return _HEIC_IMAGE if _is_heic(data) else _AVIF_IMAGE
    for place, magic, second_place, second_magic, kind in _UNSUPPORTED:
        if data.startswith(magic, place) and data.startswith(second_magic, second_place):
            return kind
    return None


def _is_heic(data: bytes) -> bool:
    """Whether a HEIC or AVIF image is HEIC, by its first bytes.

    Both kinds of file can have the same major brand, `mif1`. So the compatible brands, which the
    file lists after the major brand, are searched too: a HEIC file has no AVIF brand there.
    """
    brands = data[8 : int.from_bytes(data[:4], "big")][:256]
    return not any(brand in brands for brand in _AVIF)
