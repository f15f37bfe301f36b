"""Owns the translation of allocators' errors into one that names the part and the option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from svdpp.errors import OutOfMemoryError, is_out_of_memory
from svdpp.models.free_memory import available_bytes
from svdpp.plan.actions import Action, Kind

_HOST_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMG]iB)")
_CUDA_FREE = re.compile(r"of which ([\d.]+ [KMG]iB) is free")

_PARTS = {
    Kind.ENCODE: ("encoding the image", "a smaller --height and --width lower it"),
    Kind.DENOISE: (
        "a denoising step",
        "fewer --frames, a smaller --height and --width, or --memory-opt lower it",
    ),
    Kind.DECODE: ("decoding the frames", "a smaller --decode-chunk-size, or auto, lowers it"),
}
_LOADING = ("loading the model", "--dtype fp16, or fewer ranks on this device, lower it")
_REFERENCE = (
    "computing a clip in one process",
    "fewer --frames, a smaller --height and --width or --decode-chunk-size lower it",
)


@contextmanager
def out_of_memory_named(
    doing: Action | Literal["reference"] | None, decode_chunk_size: int | None = None
) -> Iterator[None]:
    """Raises `OutOfMemoryError` for any error by which torch or Python reports a lack of memory.

    Args:
        doing: the current work; None while the model loads.
        decode_chunk_size: frames that are decoded at a time, if they are decoded.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        part, knob = _part(doing, decode_chunk_size)
        sizes = _asked_and_free(str(error))
        known = ": {asked} asked for, {free} free".format_map(sizes) if sizes else ""
        raise OutOfMemoryError(f"out of memory while {part}{known}", knob, details=sizes) from error


def _part(
    doing: Action | Literal["reference"] | None, decode_chunk_size: int | None
) -> tuple[str, str]:
    """The work in words, and the option that lowers its memory."""
    if doing is None or doing == "reference":
        return _LOADING if doing is None else _REFERENCE
    part, knob = _PARTS.get(doing.kind, (f"doing {doing}", "fewer ranks on this device lower it"))
    if doing.kind is Kind.DECODE and decode_chunk_size is not None:
        part += f", {decode_chunk_size} at a time"
    return part, knob


def _asked_and_free(text: str) -> dict[str, str]:
    """The requested and the free memory; empty if the error's `text` does not say."""
    if host := _HOST_ASKED.search(text):
        return {"asked": _gib(int(host[1])), "free": _gib(available_bytes())}
    asked, free = _CUDA_ASKED.search(text), _CUDA_FREE.search(text)
    return {"asked": asked[1], "free": free[1]} if asked and free else {}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
