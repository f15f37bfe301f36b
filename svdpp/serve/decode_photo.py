"""The process that decodes one uploaded image; `photos` starts it.

It limits itself before it reads the file: memory, CPU time, no files written, no core dumped.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from svdpp.errors import InputError, error_to_dict
from svdpp.launch.process_lifetime import end_with_parent
from svdpp.media.inputs import FORMATS, demuxer_of, read_bytes, read_photo, read_video

#: Suffixes of the stored files, by Pillow's name of the format; the others' are that name.
_SUFFIXES = {
    "JPEG": ".jpg",
    "MPO": ".jpg",  # a JPEG with further images behind the first
    "TIFF": ".tif",
}


def main(path: str, *numbers: str) -> None:
    """Write one JSON object to stdout: about the image, or the error.

    `numbers` are the server's process id, whose end also ends this process, the frames that a clip
    takes of a video, or 0, and the limits: pixels, bytes of address space, seconds of CPU time,
    after which the kernel sends SIGXCPU.
    """
    parent, video_frames, max_pixels, max_bytes, cpu_seconds = map(int, numbers)
    end_with_parent(parent)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # At the hard limit the kernel would send SIGKILL, which does not say why.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    try:
        answer = _decode(Path(path), video_frames, max_pixels)
    except InputError as error:
        answer = error_to_dict(error)
    except MemoryError:
        answer = error_to_dict(InputError(f"{path!r} does not fit in memory"))
    os.write(1, json.dumps(answer).encode())


def _decode(path: Path, video_frames: int, max_pixels: int) -> dict[str, Any]:
    if video_frames and (demuxer := demuxer_of(read_bytes(path))):
        photo = read_video(path, video_frames, max_pixels)
        suffix = ".mp4" if demuxer == "mov" else ".mkv"
    else:
        image, photo = read_photo(path, max_pixels)
        image.close()
        with Image.open(path, formats=FORMATS) as header:
            format = str(header.format)
            suffix = _SUFFIXES.get(format, f".{format.lower()}")
    size = {"width": photo.width, "height": photo.height}
    return {"sha256": photo.sha256, **size, "suffix": suffix}


if __name__ == "__main__":
    main(*sys.argv[1:])
