"""The folder of uploaded images, and the process that decodes each one before it is kept.

The process limits itself before it reads the file: memory, CPU time, no files written, no core
dumped.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from svdpp.errors import InputError, SvdppError
from svdpp.launch.process_lifetime import end_with_parent, signals_blocked, start_helper
from svdpp.media import output_files
from svdpp.media.inputs import (
    FORMATS,
    MAX_PIXELS,
    Photo,
    demuxer_of,
    read_bytes,
    read_photo,
    read_video,
)

# Of the process that decodes an image. The largest images that `media.inputs` takes, 50 million
# pixels, need up to 1.1 GB and 3 seconds.
#: Of address space.
MAX_BYTES = 2 * 2**30
#: Of CPU time, whole seconds.
CPU_SECONDS = 20
#: From its start to its answer.
SECONDS = 30.0
#: How many images are decoded at the same time.
AT_ONCE = 2
# For one of these places.
_WAIT_SECONDS = 30.0

_MAX_NAME = 100
# Two decoders can keep both cores of a small machine busy, and answers to others come first.
_NICE = 10
#: Longer answers are not a decoder's own. It fits in a pipe, so that a decoder need not be read.
_MAX_ANSWER = 16 * 1024
#: Of this process's variables, those that a Python process may need to start.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
#: SHA-256, suffix, width and height. What a decoder says is checked, as a hostile file could have
#: taken it over.
_ANSWER = re.compile(r"([0-9a-f]{64}) (\.[a-z0-9]{3,4}) ([1-9][0-9]{0,7}) ([1-9][0-9]{0,7})")
#: Before the message and the hint of an error.
_REFUSED = "refused\0"
#: Suffixes of the stored files, by Pillow's name of the format; the others' are that name. MPO is
#: a JPEG with further images behind the first.
_SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif"}


class DecoderBusyError(SvdppError):
    """Too many images are being decoded: the same request can succeed later."""


class PhotoFolder:
    """The images of all jobs, named by the jobs' ids; any thread may call any method.

    The folder is created if it does not exist. Names that clients give are never used as paths.
    """

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        self._folder = folder.absolute()
        self._max_pixels = max_pixels
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._errors = f"cannot keep an image in {str(self._folder)!r}"
        with output_files.disk_errors(self._errors):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(
        self, source: BinaryIO, id: str, name: str, video_frames: int = 0, video: str = ""
    ) -> Photo:
        """Store the image in `source` durably, once it is decoded; if it raises, no file is left.

        `name` is for messages, by `shown_name`; the name of the returned path is `Job.photo`, or
        that of the `video` in `Job.videos_in`. With `video_frames` it may also be a video with as
        many.
        """
        upload = final = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with output_files.disk_errors(self._errors):
                upload.touch(0o600, exist_ok=False)
                with open(upload, "wb") as file:
                    source.seek(0)
                    shutil.copyfileobj(source, file, 2**20)
                sha256, suffix, *size = self._decoded(upload, name, video_frames)
                final = self._folder / f"{id}{f'.{video}' if video else suffix}"
                output_files.sync(upload)
                os.rename(upload, final)
                output_files.sync(self._folder)
        except BaseException:
            for path in {upload, final}:
                output_files.remove(path)
            raise
        return Photo(final, sha256, *map(int, size))

    def _decoded(self, upload: Path, name: str, video_frames: int) -> tuple[str, ...]:
        if not self._places.acquire(timeout=_WAIT_SECONDS):
            raise DecoderBusyError("too many images are being checked", "try again later")
        try:
            return _run_decoder(upload, name, video_frames, self._max_pixels)
        finally:
            self._places.release()


def shown_name(name: str | None) -> str:
    """A client's name of a file, for people: without folders and control characters, shortened."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(char for char in last if char.isprintable()).strip()
    return printable[:_MAX_NAME] or "photo"


# --- the process, as the server sees it -----------------------------------------------------------


def _run_decoder(upload: Path, name: str, video_frames: int, max_pixels: int) -> tuple[str, ...]:
    numbers = os.getpid(), video_frames, max_pixels, MAX_BYTES, CPU_SECONDS
    with signals_blocked():  # SIGTERM must not fail an upload that the server still finishes
        process = start_helper(
            "svdpp.serve.photos",
            *(upload, *numbers),
            variables=_environment(),
            stderr=subprocess.DEVNULL,
        )
    with process:
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        finally:
            process.kill()
        text = "" if code == -signal.SIGXCPU else _answer_of(process)
    if match := _ANSWER.fullmatch(text):
        return match.groups()
    if text.startswith(_REFUSED):
        message, _, hint = text.removeprefix(_REFUSED).partition("\0")
        raise InputError(message.replace(repr(str(upload)), repr(name)), hint)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    why = f"cannot be decoded: the decoder ended with {how}"
    if code == -signal.SIGXCPU:
        why = "takes too long to decode"
    raise InputError(f"{name!r} {why}", "save it again as PNG or JPEG")


def _answer_of(process: subprocess.Popen[bytes]) -> str:
    """What an ended process has written; another one that holds the pipe is not waited for."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(process.stdout.fileno(), _MAX_ANSWER).decode(errors="replace")
    return ""


def _environment() -> dict[str, str]:
    """Only what the decoder needs: no tokens, and one thread, because others take memory."""
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


# --- the process itself ---------------------------------------------------------------------------


def main(path: str, *numbers: str) -> None:
    """Write to stdout what is known of the image, or the error.

    `numbers` are the server's process id, whose end also ends this process, the frames that a clip
    takes of a video, or 0, and the limits: pixels, bytes of address space, seconds of CPU time,
    after which the kernel sends SIGXCPU.
    """
    parent, video_frames, max_pixels, max_bytes, cpu_seconds = map(int, numbers)
    end_with_parent(parent)
    os.nice(_NICE)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # At the hard limit the kernel would send SIGKILL, which does not say why.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    try:
        answer = _decode(Path(path), video_frames, max_pixels)
    except InputError as error:
        answer = f"{_REFUSED}{error.message}\0{error.hint}"
    except MemoryError:
        answer = f"{_REFUSED}{path!r} does not fit in memory\0"
    os.write(1, answer.encode(errors="replace"))


def _decode(path: Path, video_frames: int, max_pixels: int) -> str:
    if video_frames and (demuxer := demuxer_of(read_bytes(path))):
        photo = read_video(path, video_frames, max_pixels)
        suffix = ".mp4" if demuxer == "mov" else ".mkv"
    else:
        image, photo = read_photo(path, max_pixels)
        image.close()
        with Image.open(path, formats=FORMATS) as header:
            format = str(header.format)
            suffix = _SUFFIXES.get(format, f".{format.lower()}")
    return f"{photo.sha256} {suffix} {photo.width} {photo.height}"


if __name__ == "__main__":
    main(*sys.argv[1:])
