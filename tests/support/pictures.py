"""Test files: images, PNG files with arbitrary headers, and a small video."""

from __future__ import annotations

import io
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from svdpp.config import OutputConfig
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.media.video import write_clip


def gradient(width: int = 48, height: int = 32) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def ffmpeg(*arguments: str | Path) -> None:
    command = [find_ffmpeg(), "-loglevel", "error", "-y", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=60)


def save_video(path: Path, seed: int = 0) -> str:
    """Save a video of seven frames of 64 x 48 pixels of noise; return its path."""
    frames = np.random.default_rng(seed).integers(0, 256, (7, 48, 64, 3), dtype=np.uint8)
    write_clip(frames, OutputConfig(path=str(path)), fps=16, metadata={})
    return str(path)
