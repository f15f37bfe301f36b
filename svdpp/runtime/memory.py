"""Owns the translation of the allocators' words into an error that names the part and the knob."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from svdpp.errors import OutOfMemoryError
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
    Kind.DECODE: ("decoding the frames", "a smaller --decode-chunk-size lowers it"),
}
_OTHER_PART = ("loading the model", "--dtype fp16, or fewer ranks on this device, lower it")


@contextmanager
def out_of_memory_named(action: Action | None) -> Iterator[None]:
    """Raises `OutOfMemoryError` for whatever way torch or Python says that memory is out.

    Args:
        action: what was under way; None while the model is loaded.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        sizes = _asked_and_free(error)
        if sizes is None:
            raise
        part, knob = _PARTS.get(action.kind, _OTHER_PART) if action else _OTHER_PART
        asked, free = sizes
        raise OutOfMemoryError(
            f"out of memory {'while ' if part else ''}{part}: {asked} asked for, {free} free", knob
        ) from error


def _asked_and_free(error: BaseException) -> tuple[str, str] | None:
    """What was asked for and what was free; None where `error` is about something else."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        asked, free = _CUDA_ASKED.search(text), _CUDA_FREE.search(text)
        return asked[1] if asked else "memory", free[1] if free else "less"
    host = _HOST_ASKED.search(text)
    if host is None and not isinstance(error, MemoryError):
        return None
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    asked_text = f"{int(host[1]) / 2**30:.1f} GiB" if host else "memory"
    return asked_text, f"{free_bytes / 2**30:.1f} GiB"
