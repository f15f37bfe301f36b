"""Frames of videos and animations: decoding of untrusted files, by ffmpeg or Pillow."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from PIL import Image, ImageSequence

from svdpp.errors import InputError, first_line, pluralize
from svdpp.media.ffmpeg import MediaFailure, decode_frames
from svdpp.media.images import MediaFile, check_image_size, decode_image, read_bytes, to_rgb
from svdpp.media.kinds import FORMATS, demuxer_of
from svdpp.media.streams import Stream, main_video, probe_streams

# Names of the decoders that ffmpeg may use.
_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores"
# Seconds after which ffmpeg is killed.
_DECODE_SECONDS = 600.0
_DAMAGED = (
    "copy or download it again; if a player shows it, save it as H.264: ffmpeg -i IN -c:v libx264 "
    "out.mp4"
)
# Formats of images that can be animations. The pages of a TIFF are not frames.
_ANIMATED = tuple(name for name in FORMATS if name in ("GIF", "WEBP", "PNG", "AVIF"))


def probe_video(path: Path, num_frames: int, max_pixels: int) -> MediaFile:
    """Raise an `InputError` unless enough frames of a video can be decoded; return its metadata.

    Args:
        path: Path of a video, animation or image. An image is repeated for all frames.
        num_frames: Number of frames that the clip uses.
        max_pixels: Largest number of pixels of a frame.

    Returns:
        Metadata of the file. Width and height are those of the last frame that was decoded.

    Raises:
        InputError: The file has too few frames, cannot be decoded, or exceeds a limit.
    """
    data = read_bytes(path)
    with path.open("rb") as file:
        *_, size = (frame.size for frame in decode_video(data, file, path, num_frames, max_pixels))
    return MediaFile(path, hashlib.sha256(data).hexdigest(), *size)


def decode_video(
    data: bytes, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """Yield the first `count` frames of a video or animation, upright; an image is repeated.

    Args:
        data: Content of the file.
        file: Open file with the same content, for ffmpeg.
        path: Path of the file, for messages.
        count: Number of frames.
        max_pixels: Maximum number of pixels of a frame.

    Raises:
        InputError: The file has fewer than `count` frames, cannot be decoded, or exceeds a limit.
    """
    demuxer = demuxer_of(data)
    if demuxer is not None:
        frames = _video_frames(demuxer, file, path, count, max_pixels)
    elif _is_animation(data):
        frames = _animation_frames(data, path, count, max_pixels)
    else:
        yield from itertools.repeat(decode_image(data, path, max_pixels)[0], count)
        return
    done = 0
    for frame in frames:
        yield frame
        done += 1
    if done < count:
        text = f"{str(path)!r} has {done} of the {pluralize(count, 'frame')} that the clip takes"
        hint = "give a longer video, or make a clip that takes fewer frames"
        raise InputError(text, hint, details={"frames": done, "wanted": count})


def _is_animation(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as image:
            return int(getattr(image, "n_frames", 1)) > 1
    except Exception:  # `decode_image` will report the error of the file
        return False


def _animation_frames(
    data: bytes, path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """Yield each stored frame of an animated GIF, WebP, PNG or AVIF once, whatever its duration."""
    name = repr(str(path))
    try:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as animation:
            check_image_size(*animation.size, max_pixels)
            for frame in itertools.islice(ImageSequence.Iterator(animation), count):
                yield to_rgb(frame)[0]
    except InputError as error:
        raise InputError(f"{name} {error.message}", error.hint, details=error.details) from None
    except Exception as error:  # Pillow raises nearly any type of exception for malicious files
        details = {"path": str(path), "reason": first_line(error)}
        message = f"{name} is damaged or truncated: {first_line(error)}"
        raise InputError(message, details=details) from error


def _video_frames(
    demuxer: str, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    name = repr(str(path))
    # These options keep ffmpeg from opening other files or network addresses.
    source = ["-protocol_whitelist", "file", "-codec_whitelist", _DECODERS]
    source += ["-filter_threads", "1", "-max_pixels", str(max_pixels), "-threads", "2"]
    source += ["-f", demuxer, "-i", f"file:/dev/fd/{file.fileno()}"]
    files, done = (file.fileno(),), 0
    try:
        streams = probe_streams(source, files, seconds=_DECODE_SECONDS)
        video = main_video(streams)
        if video is None:
            raise _no_video(name, streams)
        source += ["-frames:v", str(count)]
        for frame in decode_frames(
            source, seconds=_DECODE_SECONDS, stream=f"0:{video.index}", files=files
        ):
            check_image_size(*frame.size, max_pixels)
            yield frame
            done += 1
    except MediaFailure as error:
        text = f"{name} cannot be decoded as a video: {error}"
        if done:
            text = f"{name} is damaged or cut off after frame {done}: {error}"
        raise InputError(text, _DAMAGED, details={"frames": done, "reason": str(error)}) from error
    except InputError as error:
        message = error.message if error.message.startswith(name) else f"{name} {error.message}"
        raise InputError(message, error.hint, details=error.details) from None


def _no_video(name: str, streams: Sequence[Stream]) -> InputError:
    if not streams:
        return InputError(
            f"{name} cannot be decoded as a video: it is cut off, or its index is damaged",
            "copy or download it again: the whole file is needed",
        )
    if any(each.is_cover for each in streams):
        held = "a cover picture and no video"
    else:
        held = f"only {' and '.join(each.kind for each in streams)}"
    return InputError(f"{name} has no video: it holds {held}", "give a file with a video")
