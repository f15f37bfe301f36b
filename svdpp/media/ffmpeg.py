"""Child processes of ffmpeg: finding the program, running it, and decoding frames."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image

from svdpp.errors import OutputError, without_controls

# Filter of ffmpeg that converts between RGB and YUV with exact rounding. Without its flags, colours
# would change by one or two levels of 255.
EXACT_SCALE = "scale=flags=accurate_rnd+full_chroma_int+full_chroma_inp"
_START = ("-hide_banner", "-nostdin")
_QUIET = (*_START, "-loglevel", "error", "-xerror")
# Maximum bytes of ffmpeg's stderr that are kept. Further output is read and dropped.
_MAX_LOG = 2**20


class MediaFailure(RuntimeError):
    """Error for a failure of ffmpeg, or for a media file with wrong content."""


def find_ffmpeg() -> str:
    """Return the path of the ffmpeg that imageio-ffmpeg contains or finds.

    Raises:
        OutputError: No ffmpeg is found.
    """
    import imageio_ffmpeg  # imported here, because the import takes 50 ms

    # a RuntimeError means that imageio-ffmpeg has no ffmpeg
    with contextlib.suppress(RuntimeError):
        executable: str | None = shutil.which(imageio_ffmpeg.get_ffmpeg_exe())
        if executable is not None:
            return executable
    raise OutputError("mp4 needs ffmpeg, which was not found", "pip install imageio-ffmpeg")


def mp4_source(path: Path) -> list[str]:
    """Return ffmpeg's options for opening a file as mp4, and not as any other format."""
    # A file named .mp4 may be a playlist, for which ffmpeg would open other files and URLs. So
    # ffmpeg may read only mp4, and only from local files. With the prefix `file:`, it does not take
    # a colon in a file's name for the end of a protocol's name.
    name = f"file:{os.path.abspath(path)}"
    return ["-protocol_whitelist", "file,pipe", "-f", "mov", "-i", name]


def run_ffmpeg(
    arguments: Sequence[str],
    frames: npt.NDArray[np.uint8] | None = None,
    *,
    seconds: float,
    files: tuple[int, ...] = (),
) -> bytes:
    """Run ffmpeg and return its stdout; raise a `MediaFailure` if it fails or takes too long.

    Args:
        arguments: Options, inputs and outputs.
        frames: Array whose bytes are written to ffmpeg's stdin; None: no input.
        seconds: Seconds after which ffmpeg is killed.
        files: Open file descriptors that ffmpeg inherits.

    Raises:
        MediaFailure: ffmpeg failed, or did not end in time.
        OutputError: No ffmpeg is found.
    """
    done = _finished([*_QUIET, *arguments], frames, seconds, files)
    # For a system error, ffmpeg exits with 256 minus the errno, such as 228 for a full disk. For an
    # error of its own, it exits with 256 minus a number that is at least the code of "A" (65). The
    # text of an errno explains a failure better than the last line of stderr, which often names
    # only a consequence.
    if done.returncode > 256 - ord("A"):
        raise MediaFailure(f"ffmpeg failed: {os.strerror(256 - done.returncode)}")
    if done.returncode:
        raise _failure(done.returncode, done.stderr.strip().rpartition(b"\n")[2])
    return done.stdout


def probe_log(source: Sequence[str], *, seconds: float, files: tuple[int, ...] = ()) -> str:
    """Return ffmpeg's log of opening an input: its streams, or the reason why it cannot be opened.

    Args:
        source: Options of the input, up to its `-i NAME`.
        seconds: Seconds after which ffmpeg is killed.
        files: Open file descriptors that ffmpeg inherits.

    Raises:
        MediaFailure: ffmpeg did not end in time.
        OutputError: No ffmpeg is found.
    """
    # The exit code is ignored, because ffmpeg always fails if it has no output.
    done = _finished([*_START, "-loglevel", "info", *source], None, seconds, files)
    return done.stderr[:_MAX_LOG].decode(errors="replace")


def decode_frames(
    source: Sequence[str],
    *,
    seconds: float,
    stream: str = "0:v:0",
    files: tuple[int, ...] = (),
) -> Iterator[Image.Image]:
    """Decode a video by ffmpeg, and yield its frames one at a time, upright, in RGB.

    Args:
        source: Options of the input, up to its `-i NAME`, and options of the output.
        seconds: Seconds after which ffmpeg is killed.
        stream: Stream to decode, as an ffmpeg stream specifier.
        files: Open file descriptors that ffmpeg inherits.

    Raises:
        MediaFailure: The video cannot be decoded, or ffmpeg did not end in time.
        OutputError: No ffmpeg is found.
    """
    # The output format is PPM, because its header has the size of each frame.
    output = ["-map", stream, "-vf", EXACT_SCALE, "-fps_mode", "passthrough"]
    output += ["-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]
    with subprocess.Popen(
        [find_ffmpeg(), *_QUIET, *source, *output],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=files,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        deadline = time.monotonic() + seconds
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        log = _LogReader(process.stderr)
        try:
            while process.stdout.readline():
                width, height = map(int, process.stdout.readline().split())
                process.stdout.readline()
                pixels = process.stdout.read(3 * width * height)
                if len(pixels) < 3 * width * height:
                    break
                yield Image.frombytes("RGB", (width, height), pixels)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            log.join()
    if code == -signal.SIGKILL and time.monotonic() >= deadline:
        raise MediaFailure(f"ffmpeg did not end within {seconds:.0f} s")
    if code:
        raise _failure(code, log.text.partition(b"\n")[0])


class _LogReader(threading.Thread):
    """Thread that reads ffmpeg's stderr to its end, and keeps the first `_MAX_LOG` bytes.

    If no one read the pipe, ffmpeg would block once the pipe is full (64 KiB).
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__(name="ffmpeg log", daemon=True)
        self._pipe, self.text = pipe, b""
        self.start()

    def run(self) -> None:
        while block := os.read(self._pipe.fileno(), 2**16):
            self.text = (self.text + block)[:_MAX_LOG]


def _finished(
    arguments: Sequence[str],
    frames: npt.NDArray[np.uint8] | None,
    seconds: float,
    files: tuple[int, ...],
) -> subprocess.CompletedProcess[bytes]:
    # imageio_ffmpeg.write_frames is not used, because it drops the exit code. In a new session,
    # ffmpeg does not get Ctrl-C from the terminal: this process alone decides when ffmpeg ends.
    try:
        return subprocess.run(
            [find_ffmpeg(), *arguments],
            # A memory view is passed, because `tobytes` would copy the clip.
            input=b"" if frames is None else frames.data.cast("B"),
            capture_output=True,
            timeout=seconds,
            start_new_session=True,
            pass_fds=files,
        )
    except subprocess.TimeoutExpired:
        raise MediaFailure(f"ffmpeg did not end within {seconds:.0f} s") from None


def _failure(code: int, line: bytes) -> MediaFailure:
    if code < 0:
        return MediaFailure(f"ffmpeg was ended by {signal.Signals(-code).name}")
    # A line of the log begins with a component of ffmpeg and an address, such as [mov,mp4 @
    # 0x55e882eb7d40], which mean nothing to users.
    text = re.sub(r"^(\[[^]]*\] *)+", "", line.decode(errors="replace").strip())
    reason = without_controls(text)[:200] or "no reason given"
    return MediaFailure(f"ffmpeg ended with {code}: {reason}")
