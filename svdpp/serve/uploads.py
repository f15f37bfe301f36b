"""Uploaded images: their folder, and the process that decodes each before it is kept.

The process limits itself before it reads the file: memory, CPU time, no files written, no core
dumped.
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
from svdpp.media.inputs import (
    MAX_PIXELS,
    Conversion,
    MediaFile,
    probe_video,
    read_bytes,
    read_image,
)
from svdpp.media.kinds import FORMATS, demuxer_of

# Limits of the process that decodes an image. The largest images that `media.inputs` takes, 50
# million pixels, need up to 1.1 GB and 3 s; 24 million pixels of a progressive JPEG need 1.2 s.
#: Address space.
MAX_DECODER_BYTES = 2 * 2**30
#: CPU time for a video, in whole seconds.
CPU_SECONDS = 20
#: CPU time for an image, in seconds: for start and header, and for each million of its pixels.
IMAGE_CPU_SECONDS = 3
CPU_SECONDS_PER_MEGAPIXEL = 0.25
#: Scans of a JPEG. A progressive one has about ten, and each can cost as much as the image.
MAX_SCANS = 100
#: Seconds from its start to its result.
TIMEOUT_SECONDS = 30.0
#: Images that are decoded at the same time.
MAX_DECODERS = 2
# Seconds that a request waits for one of these places.
_MAX_WAIT_SECONDS = 30.0

_MAX_NAME = 100
# Low priority, because two decoders can fill both cores of a small machine.
_NICE = 10
#: Limit of a decoder's output. It fits in a pipe, so the decoder never waits for a reader.
_MAX_RESULT_BYTES = 16 * 1024
#: Environment variables that a Python process may need to start.
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
#: SHA-256, suffix, width, height and conversion. A decoder's result is checked, because a hostile
#: file could have taken the decoder over.
_RESULT = re.compile(
    r"([0-9a-f]{64}) (\.[a-z0-9]{3,4}) ([1-9][0-9]{0,7}) ([1-9][0-9]{0,7}) (|over white|scaled)"
)
#: First bytes of a result that is an error; message and hint follow.
_ERROR_PREFIX = "refused\0"
#: Marker of a JPEG that begins a segment or ends an image. In the data of a scan, 0xff is followed
#: by 0 or by a restart marker.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
#: Suffixes of the stored files, by Pillow's name of the format; the others' are that name. MPO is
#: a JPEG with further images behind the first.
_SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif"}

#: What decoders have said of images, by their SHA-256 and the frames that were asked for.
DecodedImages = dict[tuple[str, int], tuple[str, ...]]


class DecoderBusyError(SvdppError):
    """No decoder became free in time: the same request can succeed later."""


class DecoderSlots:
    """Places of decoders, for which owners take turns. Any thread may call it.

    Next is an owner who has the fewest decoders, and of these the one who was served longest ago:
    so one owner's many images delay another's by one image at most.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._changed = threading.Condition()
        self._waiting: list[list[str]] = []  # lists, because two requests of one owner differ
        self._running = Counter[str]()
        self._served: dict[str, int] = {}
        self._num_served = 0

    @contextlib.contextmanager
    def acquire(self, owner: str, seconds: float) -> Iterator[None]:
        """Hold a place during the block.

        Args:
            owner: Name of the key whose turn is used.
            seconds: Time to wait for a place.

        Raises:
            DecoderBusyError: No place became free in time.
        """
        request = [owner]
        with self._changed:
            self._waiting.append(request)
            try:
                if not self._changed.wait_for(lambda: self._is_next(request), seconds):
                    text = f"no image could be checked within {seconds:g} s: too many are"
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
    """Images of all jobs, named by the jobs' ids; any thread may call any method.

    The folder is created if it does not exist. Names that clients give are never used as paths.
    """

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        self._folder = folder.absolute()
        self._max_pixels = max_pixels
        self._slots = DecoderSlots(MAX_DECODERS)
        self._errors = f"cannot keep an image in {str(self._folder)!r}"
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
        """Store an image durably, once it is decoded; if it raises, no file is left.

        Args:
            source: Content of the image, which is read from its beginning.
            id: Id of the job.
            name: Name for messages, by `sanitize_filename`.
            video_frames: Number of frames of a video that is taken as well; 0 takes images only.
            further: Name in `Job.further_paths`; empty for `Job.input_file`.
            owner: Name of the key, whose turn it must be.
            decoded: Images that need not be decoded again; this one is added to them.

        Returns:
            The stored file, with its SHA-256, width and height.

        Raises:
            InputError: The file is not an image, or is beyond the limits.
            DecoderBusyError: No decoder was free in time.
            OutputError: The disk cannot be written.
        """
        upload = final = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with output_files.disk_errors(self._errors):
                _copy(source, upload)
                found = self._decode(upload, name, video_frames, owner, decoded)
                sha256, suffix, width, height, conversion = found
                final = self._folder / f"{id}{f'.{further}' if further else suffix}"
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
        """Decode an image and keep no file; add it to `decoded`. Arguments and errors: `save`."""
        upload = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with output_files.disk_errors(self._errors):
                _copy(source, upload)
                self._decode(upload, name, video_frames, owner, decoded)
        finally:
            output_files.remove(upload)

    def save_lines(self, source: BinaryIO, id: str) -> tuple[str, int]:
        """Store the file of a batch's lines durably, as `ID.jsonl`; return SHA-256 and bytes.

        Raises:
            OutputError: The disk cannot be written.
        """
        upload, final = self._folder / f".upload-{id}-{secrets.token_hex(4)}", f"{id}.jsonl"
        try:
            with output_files.disk_errors(f"cannot keep a batch in {str(self._folder)!r}"):
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
        key = ("" if decoded is None else _sha256_of(upload), video_frames)
        found = None if decoded is None else decoded.get(key)
        if found is None:
            found = self._decode_in_slot(upload, name, video_frames, owner)
        if decoded is not None:
            decoded[key] = found
        return found

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
    """Return a client's name of a file without folders and control characters, shortened."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(char for char in last if char.isprintable()).strip()
    return printable[:_MAX_NAME] or "photo"


# --- the process, as the server sees it -----------------------------------------------------------


def _run_decoder(upload: Path, name: str, video_frames: int, max_pixels: int) -> tuple[str, ...]:
    numbers = os.getpid(), video_frames, max_pixels, MAX_DECODER_BYTES, CPU_SECONDS, MAX_SCANS
    with signals_blocked():  # SIGTERM must not fail an upload that the server still finishes
        process = start_helper(
            "svdpp.serve.uploads",
            *(upload, *numbers),
            variables=_environment(),
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
    raise InputError(f"{name!r} {reason}", "save it again as PNG or JPEG", details=details)


def _decoder_error(text: str, upload: Path, name: str) -> InputError:
    """Return the error that a decoder has written, with the client's name of the file.

    A hostile file could have written it: of its details only names with numbers or texts are kept.
    """
    try:
        record = json.loads(text)
        message, hint, details = map(record.get, ("message", "hint", "details"))
        if not (isinstance(message, str) and isinstance(hint, str) and isinstance(details, dict)):
            raise ValueError("it is no error")
    except (ValueError, AttributeError, RecursionError):
        return InputError(f"{name!r} cannot be decoded", "save it again as PNG or JPEG")
    safe_details = {
        key: name if value == str(upload) else value
        for key, value in details.items()
        if isinstance(value, (int, float, str)) and key.isidentifier()
    }
    return InputError(message.replace(repr(str(upload)), repr(name)), hint, details=safe_details)


def _read_result(process: subprocess.Popen[bytes]) -> str:
    """Return the output of an ended process, without waiting for others that hold the pipe."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(process.stdout.fileno(), _MAX_RESULT_BYTES).decode(errors="replace")
    return ""


def _environment() -> dict[str, str]:
    """Return the variables that the decoder needs: no tokens, and one thread, to save memory."""
    kept = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


# --- the process itself ---------------------------------------------------------------------------


def main(path: str, *numbers: str) -> None:
    """Write to stdout what is known of the image, or the error.

    Args:
        path: File to decode.
        numbers: Process id of the server, whose end also ends this process; the frames that a clip
            takes of a video, or 0; and the limits: pixels, bytes of address space, seconds of CPU
            time, after which the kernel sends SIGXCPU, and scans of a JPEG.
    """
    parent, video_frames, max_pixels, max_bytes, cpu_seconds, max_scans = map(int, numbers)
    end_with_parent(parent)
    os.nice(_NICE)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # At the hard limit the kernel would send SIGKILL, which does not say why.
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
    if video_frames and (demuxer := demuxer_of(read_bytes(path))):
        photo = probe_video(path, video_frames, max_pixels)
        suffix = ".mp4" if demuxer == "mov" else ".mkv"
    else:
        _check_cost(path, max_scans)
        if video_frames:  # an animation has frames, an image stands for all of them
            photo = probe_video(path, video_frames, max_pixels)
        else:
            image, photo = read_image(path, max_pixels)
            image.close()
        with Image.open(path, formats=FORMATS) as header:
            format = str(header.format)
            suffix = _SUFFIXES.get(format, f".{format.lower()}")
    return f"{photo.sha256} {suffix} {photo.width} {photo.height} {photo.conversion}"


def _check_cost(path: Path, max_scans: int) -> None:
    """Lower the limit of CPU time to what the image's size needs, and refuse too many scans."""
    try:
        with Image.open(path, formats=FORMATS) as header:
            width, height = header.size
            format = header.format
    except Exception:  # `read_image` then says what is wrong with it
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
            "save it again as PNG or JPEG",
            details={"scans": scans, "limit": max_scans},
        )


def _num_scans(data: bytes) -> int:
    """Return the number of scans of the first image of a JPEG (ITU T.81, annex B).

    Segments are skipped by their lengths, so those of an embedded thumbnail do not count.
    """
    position, scans = 2, 0
    while (marker := _MARKER.search(data, position)) and marker[0] != _END_OF_IMAGE:
        scans += marker[0] == _START_OF_SCAN
        length = int.from_bytes(data[marker.end() : marker.end() + 2])
        position = marker.end() + max(2, length)
    return scans


if __name__ == "__main__":
    main(*sys.argv[1:])
