"""The folder of uploaded images, each decoded in another process before it is kept."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from svdpp.errors import InputError, SvdppError
from svdpp.launch.environment import helper_command
from svdpp.launch.process_lifetime import signals_blocked
from svdpp.media import output_files
from svdpp.media.inputs import MAX_PIXELS, Photo

# Of the process that decodes an image. The largest images that `media.image` takes, 50 million
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
#: Longer answers are not a decoder's own.
_MAX_ANSWER = 16 * 1024
#: Of this process's variables, those that a Python process may need to start.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


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
        with self._errors():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(
        self, source: BinaryIO, id: str, name: str, video_frames: int = 0, video: str = ""
    ) -> Photo:
        """Store the image in `source` under the id of its job, once it is decoded; durable.

        The call blocks until then. If it raises, no file is left. `name` is for messages, by
        `shown_name`; the name of the returned path is `Job.photo`, or that of the `video` in
        `Job.videos_in`. With `video_frames` it may also be a video with as many.
        """
        upload = final = self._folder / f".upload-{id}-{secrets.token_hex(4)}"
        try:
            with self._errors():
                with open(upload, "xb", opener=_private) as file:
                    source.seek(0)
                    shutil.copyfileobj(source, file, 2**20)
                with self._place():
                    decoded = _decode(upload, name, video_frames, self._max_pixels)
                final = self._folder / f"{id}{f'.{video}' if video else decoded.suffix}"
                output_files.sync(upload)
                os.rename(upload, final)
                output_files.sync(self._folder)
        except BaseException:
            for path in {upload, final}:
                output_files.remove(path)
            raise
        return Photo(final, decoded.sha256, decoded.width, decoded.height)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(timeout=_WAIT_SECONDS):
            raise DecoderBusyError("too many images are being checked", "try again later")
        try:
            yield
        finally:
            self._places.release()

    def _errors(self) -> AbstractContextManager[None]:
        return output_files.disk_errors(f"cannot keep an image in {str(self._folder)!r}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # only this user may read it


def shown_name(name: str | None) -> str:
    """A client's name of a file, for people: without folders and control characters, shortened."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(char for char in last if char.isprintable()).strip()
    return printable[:_MAX_NAME] or "photo"


def _decode(upload: Path, name: str, video_frames: int, max_pixels: int) -> _Decoded:
    numbers = os.getpid(), video_frames, max_pixels, MAX_BYTES, CPU_SECONDS
    with signals_blocked():  # SIGTERM must not fail an upload that the server still finishes
        process = subprocess.Popen(
            helper_command("svdpp.serve.decode_photo", str(upload), *map(str, numbers)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            start_new_session=True,
        )
    with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    with process:
        try:
            text = _read(process, SECONDS)
        finally:
            process.kill()
    if text is None or process.returncode == -signal.SIGXCPU:
        raise InputError(
            f"{name!r} takes too long to decode",
            "save it again as PNG or JPEG",
            details={"seconds": SECONDS, "cpu_seconds": CPU_SECONDS},
        )
    return _parsed(text, process.returncode, upload, name)


def _read(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """What the process wrote at once; None if it has not ended in time, or writes too much.

    Whoever else holds the other end of the pipe does not keep this waiting.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if poll.poll(1000 * seconds):
        text = os.read(process.stdout.fileno(), _MAX_ANSWER)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
            return text
    return None


def _environment() -> dict[str, str]:
    """Only what the decoder needs: no tokens, and one thread, because others take memory."""
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**kept, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _Decoded(BaseModel):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    suffix: Annotated[str, Field(pattern=r"^\.[a-z0-9]{3,4}$")]
    width: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    height: Annotated[int, Field(ge=1, le=MAX_PIXELS)]


class _Refused(BaseModel):
    message: str
    hint: str


#: What the decoder says; it is checked, as a hostile file could have taken it over.
_ANSWER: TypeAdapter[_Decoded | _Refused] = TypeAdapter(_Decoded | _Refused)


def _parsed(text: bytes, code: int, upload: Path, name: str) -> _Decoded:
    with contextlib.suppress(ValidationError):
        answer = _ANSWER.validate_json(text)
        if isinstance(answer, _Decoded):
            return answer
        message = answer.message.replace(repr(str(upload)), repr(name))
        raise InputError(message, answer.hint)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    raise InputError(
        f"{name!r} cannot be decoded: the decoder ended with {how}", "save it again as PNG or JPEG"
    )
