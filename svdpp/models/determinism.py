"""Owns the settings on which the bits depend, for ranks and reference alike."""

from __future__ import annotations

import os
from typing import Any

import torch


def make_deterministic(*, num_threads: int, device: str) -> None:
    """Makes equal inputs give equal bits in this process. Call it before any work on the device.

    Args:
        num_threads: intra-op threads; another number changes sums by rounding.
        device: `cpu` or a CUDA device. On CUDA, kernels without a deterministic form then raise
            instead of differing (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    torch.set_num_threads(num_threads)
    # As `use_deterministic_algorithms(True)`, which also imports Inductor: seconds in each rank,
    # and a folder among the temporary files.
    torch.set_deterministic_debug_mode("error")
    # Fresh memory would otherwise be filled with NaN, at the price of a write.
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
    """What the bits depend on besides the request; recorded with every hash."""
    record: dict[str, Any] = {
        "memory_format": "channels_last" if channels_last else "contiguous",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.startswith("cuda"):
        record["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return record
