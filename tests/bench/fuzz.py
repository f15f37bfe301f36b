"""Fuzzes the readers of untrusted bytes: the image reader and the two header parsers.

It mutates valid files of every allowed image format, packet headers and safetensors files: bits,
bytes and lengths change; pieces are cut, doubled, swapped or taken from another sample. Half of
the time it corrects PNG checksums, because no mutation would pass them otherwise. The reader must
accept each input or refuse it by its own typed error, within 5 s and 900 MiB. Anything else is a
crash: another exception, a signal, too much time or memory. Inputs that crash are kept.

The mutation is seeded, so a run with one worker is repeatable. It is not guided by coverage.

    nice python tests/bench/fuzz.py --seconds 600 [--target image] [--seed 0] [--keep crashes]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import multiprocessing
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from svdpp.comm.header import Header
from svdpp.errors import InputError, ModelError, SvdppError, TransportError
from svdpp.media.image import read_photo
from svdpp.models.safetensors_header import read_safetensors_header

MAX_SECONDS = 5
#: The limit for the largest photograph, 50 megapixels: measured 240 (GIF) to 770 MiB (WebP, whose
#: decoder holds four copies of the picture).
MAX_BYTES = 900 * 2**20
COUNTS = ("tried", "accepted", "crashes")


@dataclass(frozen=True)
class Target:
    """One reader of untrusted bytes.

    Args:
        samples: creates valid inputs.
        read: reads an input from a file; raises if the reader misbehaves.
        refusal: the typed error that it may raise.
    """

    samples: Callable[[], list[bytes]]
    read: Callable[[Path], Any]
    refusal: type[SvdppError]


# --- samples ------------------------------------------------------------------------------------


def image_samples() -> list[bytes]:
    """Valid images in every allowed format, mode and compression that Pillow writes."""
    y, x = np.mgrid[:32, :48]
    pixels = np.stack([x * 5, y * 8, (x + y) * 3], -1).astype(np.uint8)
    rgb = Image.fromarray(pixels)
    grey16 = Image.fromarray((x * 1300).astype(np.uint16))
    animation = {"save_all": True, "append_images": [rgb.rotate(90).resize(rgb.size)]}
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = [
        (rgb.convert(mode), format, {})
        for format, modes in {
            "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
            "JPEG": ("L", "RGB", "CMYK"),
            "WEBP": ("RGB", "RGBA"),
            "BMP": ("1", "L", "P", "RGB", "RGBA"),
            "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK"),
            "GIF": ("L", "P", "RGB"),
        }.items()
        for mode in modes
    ]
    special: list[tuple[Image.Image, str, dict[str, Any]]] = [
        *((grey16, format, {}) for format in ("PNG", "TIFF")),
        (Image.fromarray((x / 48).astype(np.float32)), "TIFF", {}),
        *((rgb, format, animation) for format in ("PNG", "GIF", "WEBP", "TIFF")),
        *((rgb, format, {"exif": exif}) for format in ("PNG", "JPEG", "WEBP", "TIFF")),
        *((rgb, "TIFF", {"compression": f"tiff_{name}"}) for name in ("lzw", "jpeg", "deflate")),
        (rgb, "TIFF", {"compression": "packbits"}),
        (rgb.convert("1"), "TIFF", {"compression": "group4"}),
        (rgb, "JPEG", {"progressive": True, "restart_marker_rows": 1}),
        (rgb, "WEBP", {"lossless": True}),
        (rgb.convert("P"), "PNG", {"transparency": 3}),
        (rgb.convert("P"), "GIF", {"transparency": 3, "interlace": 1}),
        (rgb, "PNG", {"icc_profile": bytes(200), "dpi": (72, 72)}),
    ]
    return [_encoded(*each) for each in (*plain, *special)]


def _encoded(image: Image.Image, format: str, options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def header_samples() -> list[bytes]:
    """Packet headers of the kinds that are sent, and one at the limit of every size."""
    sizes = [(80, 28672), (2**26, 2**63), (3, 0)]
    return [Header(clip, 7, clip, 1.7e9, *each).pack() for clip, each in enumerate(sizes)]


def weights_samples() -> list[bytes]:
    """Small safetensors files."""
    return [
        save({"a": torch.zeros(2, 3), "b.bias": torch.ones(4, dtype=torch.float16)}),
        save({f"block.{index}.weight": torch.zeros(index) for index in range(20)}),
        save({"x": torch.zeros(0)}, metadata={"format": "pt"}),
    ]


# --- readers ------------------------------------------------------------------------------------


def read_image(path: Path) -> None:
    """Reads a photograph and its last pixel."""
    image, photo = read_photo(path)
    assert image.mode == "RGB", image.mode
    assert image.size == (photo.width, photo.height)
    image.getpixel((photo.width - 1, photo.height - 1))


def read_header(path: Path) -> None:
    """Reads a packet header, which must encode to the same bytes or be refused by its receiver."""
    data = path.read_bytes()
    header = Header.unpack(data)
    expected = Header.unpack(header_samples()[0])
    header.check(
        clip=expected.clip,
        next_step=expected.next_step,
        sequence=expected.sequence,
    )
    assert header.num_bytes == expected.num_bytes


TARGETS = {
    "image": Target(image_samples, read_image, InputError),
    "header": Target(header_samples, read_header, TransportError),
    "weights": Target(weights_samples, read_safetensors_header, ModelError),
}

# --- mutation -----------------------------------------------------------------------------------

_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate(draw: random.Random, samples: list[bytes]) -> bytes:
    """One sample with one to eight changes."""
    data = bytearray(draw.choice(samples))
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        _change(draw, data, samples)
    return _mended_png(bytes(data)) if draw.random() < 0.5 else bytes(data)


def _change(draw: random.Random, data: bytearray, samples: list[bytes]) -> None:
    # Half of all changes hit the first 100 bytes, which hold sizes and counts.
    at = draw.randrange(min(len(data), draw.choice((100, len(data))))) if data else 0
    length = draw.choice((1, 2, 4, 16, 200))
    match draw.randrange(8):
        case 0 if data:
            data[at] ^= 1 << draw.randrange(8)
        case 1 if data:
            data[at] = draw.randrange(256)
        case 2:
            size, order = draw.choice((1, 2, 4)), draw.choice(("little", "big"))
            value = draw.choice(_EDGES) % 256**size
            data[at : at + size] = value.to_bytes(size, order)  # type: ignore[arg-type]
        case 3:
            del data[at : at + length]
        case 4:
            data[at:at] = data[at : at + length]
        case 5:
            data[at:at] = draw.randbytes(length)
        case 6:
            other = draw.choice(samples)
            start = draw.randrange(len(other))
            data[at : at + length] = other[start : start + length]
        case _:
            del data[draw.randrange(len(data) + 1) :]


def _mended_png(data: bytes) -> bytes:
    """A PNG with correct checksums of its chunks; other bytes unchanged."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    mended, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            break
        mended += data[at:end] + struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(mended + data[at:])


# --- the work -----------------------------------------------------------------------------------


def work(name: str, seed: int, until: float, counts: SynchronizedArray, keep: Path) -> None:
    """Tries inputs until the time `until`; a crash of the process leaves its input in `current`."""
    target, draw = TARGETS[name], random.Random(f"{name} {seed}")
    samples, current, base = target.samples(), keep / f"{name}.current", _peak_bytes()
    for sample in samples:  # an invalid sample would be useless
        _try(target, sample, current, counts, base, accepted_only=name != "header")
    while time.monotonic() < until:
        _try(target, mutate(draw, samples), current, counts, base)
    current.unlink(missing_ok=True)


def _try(
    target: Target,
    data: bytes,
    current: Path,
    counts: SynchronizedArray,
    base: int,
    *,
    accepted_only: bool = False,
) -> None:
    current.write_bytes(data)
    counts[0] += 1
    begun = time.monotonic()
    signal.alarm(4 * MAX_SECONDS)  # its default action ends the process
    try:
        target.read(current)
        counts[1] += 1
    except target.refusal:
        if accepted_only:
            raise
    except Exception:
        _keep(data, current, counts, traceback.format_exc())
    finally:
        signal.alarm(0)
    if (seconds := time.monotonic() - begun) > MAX_SECONDS:
        _keep(data, current, counts, f"took {seconds:.1f} s")
    if (peak := _peak_bytes()) > base + MAX_BYTES:
        _keep(data, current, counts, f"took {(peak - base) / 2**20:.0f} MiB")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _keep(data: bytes, current: Path, counts: SynchronizedArray, why: str) -> None:
    counts[2] += 1
    place = current.with_name(f"{current.stem}-{hashlib.sha256(data).hexdigest()[:16]}")
    place.write_bytes(data)
    place.with_suffix(".txt").write_text(why)


def fuzz(names: list[str], seconds: float, seed: int, keep: Path) -> dict[str, dict[str, int]]:
    """Runs one worker per target, restarted if its process ends; returns the counts by target."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    counts: dict[str, Any] = {name: context.Array("Q", len(COUNTS)) for name in names}
    workers: dict[str, Any] = {}
    start_steps = dict.fromkeys(names, seed)
    while time.monotonic() < until or any(worker.is_alive() for worker in workers.values()):
        for name in names:
            worker = workers.get(name)
            if worker is not None and worker.is_alive():
                continue
            if worker is not None and worker.exitcode:
                current = keep / f"{name}.current"
                _keep(current.read_bytes(), current, counts[name], f"exit {worker.exitcode}")
                start_steps[name] += 1
            if worker is None or (worker.exitcode and time.monotonic() < until):
                arguments = (name, start_steps[name], until, counts[name], keep)
                workers[name] = context.Process(target=work, args=arguments)
                workers[name].start()
        time.sleep(0.1)
    return {name: dict(zip(COUNTS, counts[name][:], strict=True)) for name in names}


def main() -> None:
    """Prints, for each target, inputs tried, accepted, refused by its typed error, and crashes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for inputs that crash")
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="svdpp-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    results = fuzz(options.target or list(TARGETS), options.seconds, options.seed, keep)
    for name, count in results.items():
        refused = count["tried"] - count["accepted"] - count["crashes"]
        print(
            f"{name}: {count['tried']} tried, {count['accepted']} accepted, {refused} refused, "
            f"{count['crashes']} crashes"
        )
    if any(count["crashes"] for count in results.values()):
        raise SystemExit(f"inputs that crash are in {keep}")
    if options.keep is None:
        keep.rmdir()


if __name__ == "__main__":
    main()
