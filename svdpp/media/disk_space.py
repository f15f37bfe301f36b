"""The check that clips fit on the disk, before any work."""

from __future__ import annotations

import os
from pathlib import Path

from svdpp.config import SamplingConfig, VideoFormat
from svdpp.errors import OutputError

# Bytes for each pixel of each frame: the maximum that `write_clip` used for clips of the four
# photographs of svdpp, zoomed by 2% a frame, with 14 frames of 128x128 and of 1024x576. The maximum
# always came from a photograph with camera grain of 6 levels, which compresses worst. Clips of the
# demo model need a tenth to a half of it. Frames of pure noise need 3 times as much as mp4, 1.8
# times as webp and 1.3 times as gif or png; they are ignored, so that a disk with enough space for
# photographs is not refused.
_BYTES_PER_PIXEL = {"gif": 1.11, "webp": 0.48, "frames": 2.34}
#: The same for mp4, by the largest measured --crf that is not above the requested one.
_MP4_BYTES_PER_PIXEL = {0: 0.83, 6: 0.66, 12: 0.44, 18: 0.24, 24: 0.094, 36: 0.024, 51: 0.012}

#: For a file's container, its metadata, and the rounding of the file system.
_BYTES_PER_FILE = 8 * 1024


def estimated_bytes(format: VideoFormat, crf: int, sampling: SamplingConfig) -> int:
    """Estimated disk space of one clip and its metadata, by the factors above.

    Args:
        crf: 0 to 51; used only for mp4.
    """
    if format == "mp4":
        factor = _MP4_BYTES_PER_PIXEL[max(each for each in _MP4_BYTES_PER_PIXEL if each <= crf)]
    else:
        factor = _BYTES_PER_PIXEL[format]
    frames, pixels = sampling.frames, sampling.height * sampling.width
    num_files = 1 + (frames if format == "frames" else 1)
    return round(factor * frames * pixels) + num_files * _BYTES_PER_FILE


def free_bytes(folder: Path) -> int:
    """Free bytes for this user on the file system of `folder`, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        status = os.statvfs(there)
    except OSError as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {error.strerror}") from error
    return status.f_bavail * status.f_frsize


def check_space(
    folder: Path, num_clips: int, format: VideoFormat, crf: int, sampling: SamplingConfig
) -> None:
    """Check by an estimate that `num_clips` clips fit into `folder`.

    A clip that is replaced exists until the new one is complete, so its space does not count.
    """
    one = estimated_bytes(format, crf, sampling)
    free = free_bytes(folder)
    if num_clips * one <= free:
        return
    clips = f"{num_clips} clip{'s' if num_clips > 1 else ''}"
    raise OutputError(
        f"{clips} of {sampling.frames} frames, {sampling.width}x{sampling.height}, as {format} "
        "need about "
        f"{size(num_clips * one)} in {str(folder)!r}, where {size(free)} are free",
        "name a folder on another disk with --out, or ask for fewer clips",
        details={"asked": num_clips * one, "free": free},
    )


def size(num_bytes: int) -> str:
    """Bytes as text, such as `1.5 GB`."""
    for unit, each in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= each:
            return f"{num_bytes / each:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} kB"
