"""Owns the question whether clips will fit on a disk, asked before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

from svdpp.config import VideoFormat
from svdpp.errors import OutputError

# Bytes for each pixel of each frame: the most that `write_clip` took for clips of four photographs
# (those that come with svdpp, zoomed by 2% a frame; 14 frames of 128x128 and of 1024x576), one of
# them also with camera grain of 6 levels, which compresses worst and set every figure. The demo
# model's clips take a tenth to a half of it; frames of pure noise 3 times as much as mp4, 1.8 times
# as webp and 1.3 times as gif or png. Noise is not what the question is for: a disk that has room
# for photographs is not refused.
_BYTES_PER_PIXEL = {"gif": 1.11, "webp": 0.48, "frames": 2.34}
#: Of mp4, by the largest --crf measured that is not above the one asked for.
_MP4_BYTES_PER_PIXEL = {0: 0.83, 6: 0.66, 12: 0.44, 18: 0.24, 24: 0.094, 36: 0.024, 51: 0.012}

#: A file's container, the parameters it carries, and what a file system rounds up.
_BYTES_PER_FILE = 8 * 1024


def estimated_bytes(
    format: VideoFormat, crf: int, *, num_frames: int, height: int, width: int
) -> int:
    """What one clip and its JSON will take on disk, by the measured factors above.

    Args:
        format: of the clip.
        crf: 0 to 51; counts for mp4 alone.
        num_frames: of the clip.
        height: pixels.
        width: pixels.
    """
    if format == "mp4":
        factor = _MP4_BYTES_PER_PIXEL[max(each for each in _MP4_BYTES_PER_PIXEL if each <= crf)]
    else:
        factor = _BYTES_PER_PIXEL[format]
    num_files = 1 + (num_frames if format == "frames" else 1)
    return round(factor * num_frames * height * width) + num_files * _BYTES_PER_FILE


def free_bytes(folder: Path) -> int:
    """What the file system that holds `folder`, or will hold it, has left for this user.

    Raises:
        OutputError: nobody can tell.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        status = os.statvfs(there)
    except OSError as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {error.strerror}") from error
    return status.f_bavail * status.f_frsize


def check_space(
    folder: Path,
    num_clips: int,
    format: VideoFormat,
    crf: int,
    *,
    num_frames: int,
    height: int,
    width: int,
) -> None:
    """Makes sure that the clips still to be made will fit into `folder`, as far as can be told.

    A clip that is replaced stays until the new one is whole, so nothing is taken off for it.

    Raises:
        OutputError: they need more than is free.
    """
    one = estimated_bytes(format, crf, num_frames=num_frames, height=height, width=width)
    free = free_bytes(folder)
    if num_clips * one <= free:
        return
    clips = f"{num_clips} clip{'s' if num_clips > 1 else ''}"
    raise OutputError(
        f"{clips} of {num_frames} frames, {width}x{height}, as {format} need about "
        f"{size(num_clips * one)} in {str(folder)!r}, where {size(free)} are free",
        "name a folder on another disk with --out, or ask for fewer clips",
        details={"asked": num_clips * one, "free": free},
    )


def size(num_bytes: int) -> str:
    """Bytes in words."""
    for unit, each in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= each:
            return f"{num_bytes / each:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} kB"
