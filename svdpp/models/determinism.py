"""Owns the settings on which bits depend; the ranks and the reference both take them from here."""

from __future__ import annotations

import os
from typing import Any

import torch


def make_deterministic(*, num_threads: int, device: str) -> None:
    """Makes equal inputs give equal bits in this process. Call before any work on the device.

    Args:
        num_threads: intra-op threads; another number changes sums by rounding.
        device: `cpu` or a CUDA device. On CUDA, kernels without a deterministic form then raise
            instead of differing (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    # Fresh memory would else be filled with NaN, at the price of a write; nothing reads it unset.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        # cuBLAS picks its workspace when it is first used; two of 4 MiB and eight of 16 KiB streams
        # is one of the two settings that NVIDIA names as reproducible.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def conditions(device: str, *, channels_last: bool = False) -> dict[str, Any]:
    """What bits depend on beside the request itself, to be recorded with every hash."""
    record: dict[str, Any] = {
        "memory_format": "channels_last" if channels_last else "contiguous",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.startswith("cuda"):
        record["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return record
