"""The meaning of what gloo, NCCL and CUDA raise during a transfer: whose fault it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from svdpp.errors import (
    BrokenLinkError,
    DeviceError,
    OutOfMemoryError,
    TransportError,
    is_out_of_memory,
)

# Such as: Cuda failure 2 'out of memory'
_NCCL_CUDA = re.compile(r"Cuda failure(?: \d+)? '([^']*)'", re.IGNORECASE)


@contextlib.contextmanager
def named(attempt: str) -> Iterator[None]:
    """Turns a backend's RuntimeError into an error that says which `attempt` failed.

    Memory that runs out and errors of the GPU are the rank's own: only the rest is a
    `BrokenLinkError`, which the parent may trace back to another rank.
    """
    try:
        yield
    except TransportError as error:
        raise type(error)(f"could not {attempt}: {error.message}", error.hint) from error
    except RuntimeError as error:
        raise _translated(error, attempt) from error


def _translated(error: RuntimeError, attempt: str) -> Exception:
    text = str(error).strip()
    cuda = _NCCL_CUDA.search(text)
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"out of memory{' in NCCL' if cuda else ''}: could not {attempt}",
            "fewer frames, a smaller --height and --width, or --memory-opt need less",
        )
    if cuda is not None or isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"could not {attempt}: CUDA error: {cuda[1] if cuda else _first_line(text)}",
            "the GPU or its driver failed: see `nvidia-smi -q` and `dmesg | grep Xid`",
        )
    return BrokenLinkError(f"could not {attempt}: {_reason(error, text)}")


def _reason(error: RuntimeError, text: str) -> str:
    first = _first_line(text)
    _, separator, last = text.partition("Last error:")
    if isinstance(error, dist.DistBackendError) and separator and last.strip():
        return f"{first} (last error: {_first_line(last)})"
    return first


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
