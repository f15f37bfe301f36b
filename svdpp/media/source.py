"""What a clip starts from: images, and the first frames of videos; read safely, and fitted."""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from PIL import Image

from svdpp.config import ClipRequest, SamplingConfig
from svdpp.config.clip import IMAGE
from svdpp.errors import InputError
from svdpp.media.image import (
    MAX_PIXELS,
    Photo,
    check_size,
    demuxer_of,
    fit_photo,
    photo_of,
    read_bytes,
)
from svdpp.media.video import EXACT_SCALE, QUIET, find_ffmpeg
from svdpp.redaction import without_controls

#: An image, the frames of a video, or several of both by name.
Source = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]

#: Suffixes of the videos that are taken from a folder or a pattern.
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv")

_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores"
_SECONDS = 600.0
_MAX_LOG = 2**16


def source_of(
    data: bytes, path: Path, sampling: SamplingConfig, name: str = IMAGE
) -> tuple[Image.Image | list[Image.Image], Photo]:
    """The file `name` of a clip of `sampling`, from its bytes; `path` names it in messages.

    The frames of a video get their size by the filter with which diffusers resizes them. An image
    stands for a video that shows nothing else.
    """
    side, fit = sampling.videos.get(name), sampling.fit
    width, height = side or sampling.width, side or sampling.height
    if name == IMAGE and not sampling.from_video:
        image, photo = photo_of(data, path)
        return fit_photo(image, width, height, fit), photo
    frames, size = [], (0, 0)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        for frame in _frames(data, file, path, sampling.frames, MAX_PIXELS):
            size = frame.size
            fitted = fit_photo(frame, width, height, fit)
            frames.append(fitted.resize((width, height), Image.Resampling.LANCZOS))
    return frames, Photo(path, hashlib.sha256(data).hexdigest(), *size)


def read_source(request: ClipRequest, sampling: SamplingConfig) -> Source | None:
    """All that a clip starts from besides a prompt; None if that is nothing.

    Raises:
        InputError: a file cannot be used, or is not the one whose SHA-256 the request has.
    """
    found = {}
    for name, (path, sha256) in request.files.items():
        found[name], photo = source_of(read_bytes(Path(path)), Path(path), sampling, name)
        if sha256 not in (None, photo.sha256):
            raise InputError(f"{path!r} has changed since the run began")
    return found if sampling.videos else found.get(IMAGE)


def read_video(path: Path, num_frames: int, max_pixels: int) -> Photo:
    """Checks that a video has as many frames, all of which are decoded; writes no file."""
    data = read_bytes(path)
    with path.open("rb") as file:
        *_, size = (frame.size for frame in _frames(data, file, path, num_frames, max_pixels))
    return Photo(path, hashlib.sha256(data).hexdigest(), *size)


def _frames(
    data: bytes, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """The first `count` frames, upright, one at a time; `file` has the same bytes as `data`."""
    demuxer, done = demuxer_of(data), 0
    if demuxer is None:
        yield from itertools.repeat(photo_of(data, path, max_pixels)[0], count)
        return
    try:
        for frame in _decoded(file.fileno(), demuxer, count, max_pixels):
            check_size(*frame.size, max_pixels)
            yield frame
            done += 1
        if done < count:
            text = f"has {done} of the {count} frames that the clip takes"
            raise InputError(text, "use fewer --frames")
    except InputError as error:
        raise InputError(f"{str(path)!r} {error.message}", error.hint) from None


def _decoded(file: int, demuxer: str, count: int, max_pixels: int) -> Iterator[Image.Image]:
    """What ffmpeg decodes; it can open no other file."""
    command = [find_ffmpeg(), *QUIET]
    command += ["-protocol_whitelist", "file", "-codec_whitelist", _DECODERS]
    command += ["-filter_threads", "1", "-max_pixels", str(max_pixels), "-threads", "2"]
    command += ["-f", demuxer, "-i", f"file:/dev/fd/{file}"]
    command += ["-map", "0:v:0", "-vf", EXACT_SCALE, "-fps_mode", "passthrough"]
    # As PPM, because its header gives the size of each frame.
    command += ["-frames:v", str(count), "-pix_fmt", "rgb24", "-c:v", "ppm"]
    process = subprocess.Popen(
        [*command, "-f", "image2pipe", "pipe:1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(file,),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(_SECONDS, process.kill)
    timer.start()
    with process:
        try:
            while process.stdout.readline():
                width, height = map(int, process.stdout.readline().split())
                process.stdout.readline()
                pixels = process.stdout.read(3 * width * height)
                if len(pixels) < 3 * width * height:
                    break
                yield Image.frombytes("RGB", (width, height), pixels)
            log = process.stderr.read(_MAX_LOG)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if code == -signal.SIGKILL:
        raise InputError(f"takes longer than {_SECONDS:.0f} s to decode", "save it as H.264")
    if code:
        # The first line has the cause; it begins with a part of ffmpeg: [h264 @ 0x55e7e3b36d80].
        first = re.sub(r"^(\[[^]]*\] *)+", "", log.decode(errors="replace").partition("\n")[0])
        reason = without_controls(first or f"ffmpeg ended with {code}")[:200]
        raise InputError(f"cannot be decoded as a video: {reason}", "save it as H.264")
