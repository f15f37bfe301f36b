"""Uploaded images: storage, and the sandboxed process that decodes each image before it is stored.

Before the process reads a file, it limits its own memory and CPU time, and forbids itself to write
files and core dumps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from PIL import Image

from svdpp.errors import InputError, SvdppError
from svdpp.launch.process_lifetime import end_with_parent, signals_blocked, start_helper
from svdpp.media import output_files
from svdpp.media.images import MAX_PIXELS, Conversion, MediaFile, read_bytes, read_image
from svdpp.media.kinds import FORMATS, demuxer_of, read_signature, usual_suffix
from svdpp.media.video_frames import probe_video

# Limits on the decoder, the process that decodes an uploaded image. The largest images that
# `media.images` accepts have 50 million pixels, and need up to 1.1 GB and 3 s to decode. A
# progressive JPEG of 24 million pixels needs 1.2 s.

#: Maximum bytes of a decoder's address space.
MAX_DECODER_BYTES = 2 * 2**30
#: Maximum CPU time of a decoder for a video, in whole seconds.
CPU_SECONDS = 20
#: Maximum CPU time of a decoder for an image, in seconds: a fixed part for start and header, and a
#: part for each million pixels.
IMAGE_CPU_SECONDS = 3
CPU_SECONDS_PER_MEGAPIXEL = 0.25
#: Maximum number of scans of a JPEG. A progressive JPEG has about ten, and decoding each scan can
#: take as long as decoding the whole image once.
MAX_SCANS = 100
#: Maximum seconds from the start of a decoder to its result.
TIMEOUT_SECONDS = 30.0
#: Maximum number of decoders at the same time.
MAX_DECODERS = 2
# Maximum seconds that a request waits until a decoder can start.
_MAX_WAIT_SECONDS = 30.0

# Maximum number of characters of an upload's file name. Longer names are cut.
_MAX_NAME = 100
# Niceness of decoder processes. Their priority is low, because two decoders can use both cores of a
# small machine.
_NICE = 10
#: Maximum bytes of a decoder's output. This many bytes fit in a pipe, so the decoder can write them
#: and end before the server reads them.
_MAX_RESULT_BYTES = 16 * 1024
#: Environment variables that a Python process may need to start.
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
#: Output of a decoder: SHA-256, suffix, width, height and conversion of the file. The server
#: rejects any other output, because a malicious file could have taken control of the decoder.
_RESULT = re.compile(
    r"([0-9a-f]{64}) (\.[a-z0-9]{3,4}) ([1-9][0-9]{0,7}) ([1-9][0-9]{0,7}) (|over white|scaled)"
)
#: Prefix of a decoder's output if the decoder reports an error. The error follows as JSON.
_ERROR_PREFIX = "refused\0"
#: JPEG marker that begins a segment or ends the image. Restart markers and the bytes ff 00 are
#: excluded, because they occur in the data of a scan.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"

#: Results of decoder processes. Each key has the SHA-256 of an uploaded file, and the number of its
#: frames that the clip uses (0 for an image). Each value has SHA-256, suffix, width, height and
#: conversion of the image or video, as texts.
DecodedImages = dict[tuple[str, int], tuple[str, ...]]


class DecoderBusyError(SvdppError):
    """Error for an upload for which no decoder became free in time; a later request may succeed."""


class DecoderSlots:
    """Limit on concurrent decoders, which treats owners fairly. Any thread may call any method.

    The next slot goes to the waiting owner with the fewest running decoders; among equals, to the
    owner whose last slot began longest ago. So an owner with many images does not delay another
    owner by more than one image.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._changed = threading.Condition()
        # Each waiting request is a list with only the owner's name. Requests are compared with
        # `is`, and two lists with the same name are different objects, unlike two equal strings.
        self._waiting: list[list[str]] = []
        self._running = Counter[str]()
        self._served: dict[str, int] = {}
        self._num_served = 0

    @contextlib.contextmanager
    def acquire(self, owner: str, seconds: float) -> Iterator[None]:
        """Wait for a decoder's slot, and hold the slot during the `with` block.

        Args:
            owner: Name of the owner who uploads the image.
            seconds: Maximum seconds to wait for a slot.

        Raises:
            DecoderBusyError: No slot became free in time.
        """
        request = [owner]
        with self._changed:
            self._waiting.append(request)
            try:
                if not self._changed.wait_for(lambda: self._is_next(request), seconds):
                    text = f"the upload was not checked within {seconds:g} s: too many others wait"
                    details = {"timeout_seconds": seconds}
                    raise DecoderBusyError(text, "try again later", details=details)
                self._free -= 1
                self._num_served += 1
                self._running[owner] += 1
                self._served[owner] = self._num_served
            finally:
                self._waiting = [each for each in self._waiting if each is not request]
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._running[owner] -= 1
                self._changed.notify_all()

    def _is_next(self, request: list[str]) -> bool:
        def priority(other: list[str]) -> tuple[int, int]:
            return self._running[other[0]], self._served.get(other[0], 0)

        return self._free > 0 and min(self._waiting, key=priority) is request


class UploadStore:
    """Folder with the uploaded files of all jobs. Any thread may call any method.

    Files are named by the jobs' ids. File names from clients are never used as paths.

    Args:
        folder: Folder of the files, which is created if it does not exist.
        max_pixels: Maximum number of pixels of an image.
    """

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        self._folder = folder.absolute()
        self._max_pixels = max_pixels
        self._slots = DecoderSlots(MAX_DECODERS)
        self._errors = f"cannot store an upload in {str(self._folder)!r}"
        with output_files.disk_errors(self._errors):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(
        self,
        source: BinaryIO,
        id: str,
        name: str,
        video_frames: int = 0,
        further: str = "",
        owner: str = "",
        decoded: DecodedImages | None = None,
    ) -> MediaFile:
        """Decode an uploaded image or video as a check, and store it durably for its job.

        After an error, no file is left.

        Args:
            source: Open file with the image, which is read from the beginning.
            id: Id of the job.
            name: File name for error messages, from `sanitize_filename`.
            video_frames: Number of frames of the video that a clip uses; 0: videos are rejected.
            further: Name of the request field if the file is a further input, such as
                `reference_1`; empty: the file is the job's main image or video.
            owner: Name of the owner who uploads the image.
            decoded: Results of earlier calls. A file with the same content as an earlier one is not
                decoded again; otherwise its result is added. None: the file is always decoded.

        Returns:
            The stored file, with its SHA-256, width and height.

        Raises:
            InputError: The file cannot be decoded, or exceeds a limit.
            DecoderBusyError: No decoder could start in time.
            OutputError: The disk cannot be written.
        """
        upload = final = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with output_files.disk_errors(self._errors):
                _copy(source, upload)
                found = self._decode(upload, name, video_frames, owner, decoded)
                sha256, suffix, width, height, conversion = found
                ending = f".{further}" if further else suffix
                final = self._folder / f"{id}{ending}"
                output_files.fsync(upload)
                os.rename(upload, final)
                output_files.fsync(self._folder)
        except BaseException:
            for path in {upload, final}:
                output_files.remove(path)
            raise
        return MediaFile(final, sha256, int(width), int(height), cast("Conversion", conversion))

    def check(
        self,
        source: BinaryIO,
        id: str,
        name: str,
        video_frames: int,
        owner: str,
        decoded: DecodedImages,
    ) -> None:
        """Decode an uploaded image or video without storing it, and add the result to `decoded`.

        Args:
            source: Content of the file.
            id: Id of the request, which is part of the temporary file's name.
            name: Name of the file, for errors.
            video_frames: Number of frames of the video that a clip uses; 0: videos are rejected.
            owner: Owner of the request.
            decoded: Results of earlier calls, by content, so that equal files are decoded once.

        Raises:
            InputError: The file cannot be decoded, or exceeds a limit.
            DecoderBusyError: No decoder could start in time.
            OutputError: The file cannot be written.
        """
        upload = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with output_files.disk_errors(self._errors):
                _copy(source, upload)
                self._decode(upload, name, video_frames, owner, decoded)
        finally:
            output_files.remove(upload)

    def save_lines(self, source: BinaryIO, id: str) -> tuple[str, int]:
        """Store the uploaded JSON Lines file of a batch durably, as `ID.jsonl`.

        Return the file's SHA-256 and its size in bytes.

        Raises:
            OutputError: The disk cannot be written.
        """
        upload, final = self._folder / f".upload-{id}-{secrets.token_hex(4)}", f"{id}.jsonl"
        try:
            with output_files.disk_errors(f"cannot store a batch file in {str(self._folder)!r}"):
                _copy(source, upload)
                sha256, size = _sha256_of(upload), upload.stat().st_size
                output_files.fsync(upload)
                os.rename(upload, self._folder / final)
                output_files.fsync(self._folder)
        except BaseException:
            output_files.remove(upload)
            raise
        return sha256, size

    def _decode(
        self, upload: Path, name: str, video_frames: int, owner: str, decoded: DecodedImages | None
    ) -> tuple[str, ...]:
        if decoded is None:
            return self._decode_in_slot(upload, name, video_frames, owner)
        key = _sha256_of(upload), video_frames
        if key not in decoded:
            decoded[key] = self._decode_in_slot(upload, name, video_frames, owner)
        return decoded[key]

    def _decode_in_slot(
        self, upload: Path, name: str, video_frames: int, owner: str
    ) -> tuple[str, ...]:
        with self._slots.acquire(owner, _MAX_WAIT_SECONDS):
            return _run_decoder(upload, name, video_frames, self._max_pixels)


def _copy(source: BinaryIO, path: Path) -> None:
    path.touch(0o600, exist_ok=False)
    with open(path, "wb") as file:
        source.seek(0)
        shutil.copyfileobj(source, file, 2**20)


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sanitize_filename(name: str | None) -> str:
    """Return a client's file name without folders and control characters, cut to `_MAX_NAME`."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(char for char in last if char.isprintable()).strip()
    return printable[:_MAX_NAME] or "photo"


# --- server: start of the decoder process, and check of its result --------------------------------


def _run_decoder(upload: Path, name: str, video_frames: int, max_pixels: int) -> tuple[str, ...]:
    numbers = os.getpid(), video_frames, max_pixels, MAX_DECODER_BYTES, CPU_SECONDS, MAX_SCANS
    # A closing server still finishes uploads, so SIGTERM must not end a decoder.
    with signals_blocked():
        process = start_helper(
            "svdpp.serve.uploads",
            *(upload, *numbers),
            variables=_decoder_environment(),
            stderr=subprocess.DEVNULL,
        )
    with process:
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        finally:
            process.kill()
        text = "" if code == -signal.SIGXCPU else _read_result(process)
    if match := _RESULT.fullmatch(text):
        return match.groups()
    if text.startswith(_ERROR_PREFIX):
        raise _decoder_error(text.removeprefix(_ERROR_PREFIX), upload, name)
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    reason = f"cannot be decoded: the decoder ended with {ending}"
    if code == -signal.SIGXCPU:
        reason = "takes too long to decode"
    details = {"exit_code": code, "cpu_seconds": CPU_SECONDS, "timeout_seconds": TIMEOUT_SECONDS}
    raise InputError(f"{name!r} {reason}", "save the image again as PNG or JPEG", details=details)


def _decoder_error(text: str, upload: Path, name: str) -> InputError:
    """Return the error that a decoder process has reported, with the file name from the client.

    A malicious file could have forged the error. So details that are neither numbers nor texts are
    dropped.
    """
    try:
        record = json.loads(text)
        message, hint, details = map(record.get, ("message", "hint", "details"))
        if not (isinstance(message, str) and isinstance(hint, str) and isinstance(details, dict)):
            raise ValueError("the output is not an error record")
    except (ValueError, AttributeError, RecursionError):
        return InputError(f"{name!r} cannot be decoded", "save it again as PNG or JPEG")
    safe_details: dict[str, int | float | str] = {}
    for key, value in details.items():
        if key.isidentifier() and isinstance(value, int | float | str):
            safe_details[key] = name if value == str(upload) else value
    return InputError(message.replace(repr(str(upload)), repr(name)), hint, details=safe_details)


def _read_result(process: subprocess.Popen[bytes]) -> str:
    """Return the output of an ended decoder process, even if its children keep the pipe open."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(process.stdout.fileno(), _MAX_RESULT_BYTES).decode(errors="replace")
    return ""


def _decoder_environment() -> dict[str, str]:
    """Return a decoder's environment variables: without secrets, and limited to one thread."""
    kept = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


# --- decoder process ------------------------------------------------------------------------------


def main(path: str, *numbers: str) -> None:
    """Decode an uploaded file in this sandboxed process; write the result or the error to stdout.

    Args:
        path: File to decode.
        numbers: Six integers: process id of the server (if the server ends, this process ends,
            too); number of frames of the video that a clip uses, 0 for an image; maximum pixels;
            maximum bytes of address space; maximum seconds of CPU time, after which the kernel
            sends SIGXCPU; and maximum scans of a JPEG.
    """
    parent, video_frames, max_pixels, max_bytes, cpu_seconds, max_scans = map(int, numbers)
    end_with_parent(parent)
    os.nice(_NICE)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # The hard limit is one second higher than the soft limit. At the soft limit the kernel sends
    # SIGXCPU, by which the server recognizes the limit; at the hard limit it sends SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    try:
        result = _decode(Path(path), video_frames, max_pixels, max_scans)
    except InputError as error:
        result = _encode_error(error.message, error.hint, error.details)
    except MemoryError:
        result = _encode_error(f"{path!r} does not fit in memory", "", {})
    os.write(1, result.encode(errors="replace"))


def _encode_error(message: str, hint: str, details: dict[str, Any]) -> str:
    record = {"message": message, "hint": hint, "details": details}
    return _ERROR_PREFIX + json.dumps(record, default=str)


def _decode(path: Path, video_frames: int, max_pixels: int, max_scans: int) -> str:
    signature = read_signature(path)
    if not (video_frames and demuxer_of(signature)):
        _check_cost(path, max_scans)
    # If the model takes a video, `probe_video` checks the file, which may be a video, an animation
    # or a still image. A still image is accepted, too, because it is repeated for all frames.
    if video_frames:
        file = probe_video(path, video_frames, max_pixels)
    else:
        image, file = read_image(path, max_pixels)
        image.close()
    suffix = usual_suffix(signature)
    return f"{file.sha256} {suffix} {file.width} {file.height} {file.conversion}"


def _check_cost(path: Path, max_scans: int) -> None:
    """Lower this process's CPU limit to suit an image's size; reject JPEGs with too many scans."""
    try:
        with Image.open(path, formats=FORMATS) as header:
            width, height = header.size
            format = header.format
    except Exception:  # `read_image` will report the error of the file
        return
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    pixels = width * height
    seconds = spent + IMAGE_CPU_SECONDS + CPU_SECONDS_PER_MEGAPIXEL * pixels / 10**6
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(math.ceil(seconds), hard - 1), hard))
    scans = _num_scans(read_bytes(path)) if format in ("JPEG", "MPO") else 0
    if scans > max_scans:
        raise InputError(
            f"{str(path)!r} is a JPEG of {scans} scans, and the limit is {max_scans}",
            "save the image again as PNG or JPEG",
            details={"scans": scans, "limit": max_scans},
        )


def _num_scans(data: bytes) -> int:
    """Return the number of scans of the first image in a JPEG file (ITU T.81, annex B).

    Segments are skipped by their lengths, so the scans of an embedded thumbnail do not count.
    """
    position, scans = 2, 0
    while (marker := _MARKER.search(data, position)) and marker[0] != _END_OF_IMAGE:
        scans += marker[0] == _START_OF_SCAN
        length = int.from_bytes(data[marker.end() : marker.end() + 2])
        position = marker.end() + max(2, length)
    return scans


if __name__ == "__main__":
    main(*sys.argv[1:])
