"""The process that decodes one uploaded photograph; `photos` starts it.

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
from svdpp.media.image import FORMATS, read_photo

#: Suffixes of the stored files, by Pillow's name of the format.
SUFFIXES = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "MPO": ".jpg",  # a JPEG with further images behind the first
    "WEBP": ".webp",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "GIF": ".gif",
}


def main(path: str, parent: str, max_pixels: str, max_bytes: str, cpu_seconds: str) -> None:
    """Write one JSON object to stdout: `photo` or `error`.

    Args:
        path: of the file.
        parent: process id of the server, whose end also ends this process.
        max_pixels: of the photograph.
        max_bytes: of address space.
        cpu_seconds: of CPU time, after which the kernel ends this process by SIGXCPU.
    """
    end_with_parent(int(parent))
    _limit(int(max_bytes), int(cpu_seconds))
    try:
        answer: dict[str, Any] = {"photo": _decode(Path(path), int(max_pixels))}
    except InputError as error:
        answer = {"error": error_to_dict(error)}
    except MemoryError:
        answer = {"error": error_to_dict(InputError(f"{path!r} does not fit in memory"))}
    os.write(1, json.dumps(answer).encode())


def _limit(max_bytes: int, cpu_seconds: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, max_bytes),
    ):
        resource.setrlimit(limit, (value, value))
    # At the hard limit the kernel would send SIGKILL, which does not say why.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def _decode(path: Path, max_pixels: int) -> dict[str, Any]:
    image, photo = read_photo(path, max_pixels)
    image.close()
    with Image.open(path, formats=FORMATS) as header:
        suffix = SUFFIXES[str(header.format)]
    about = {"sha256": photo.sha256, "width": photo.width, "height": photo.height}
    return {**about, "suffix": suffix}


if __name__ == "__main__":
    main(*sys.argv[1:])
