"""The torch settings on which bits depend; ranks and reference both take them from here."""

from __future__ import annotations

import os
from typing import Any

import torch


def apply_settings(*, num_threads: int, device: str, deterministic: bool = False) -> None:
    """Sets what the bits depend on in this process. Call it before any work on the device.

    By default torch keeps its own settings, so that a clip equals the one of a plain diffusers
    script on that device. With these settings a forward pass repeats its bits; `svdpp verify`
    proves it.

    Args:
        num_threads: intra-op threads. The number determines the order in which sums are rounded. A
            script gets the same bits with `torch.set_num_threads(num_threads)`.
        device: `cpu` or a CUDA device.
        deterministic: torch's strict mode. Operations without a deterministic kernel raise an error
            (https://docs.pytorch.org/docs/stable/notes/randomness.html), and TF32 is off.
    """
    torch.set_num_threads(num_threads)
    if not deterministic:
        return
    # As `use_deterministic_algorithms(True)`, which also imports Inductor: seconds in each rank,
    # and a folder among the temporary files.
    torch.set_deterministic_debug_mode("error")
    # Strict mode would fill fresh memory with NaN, at the price of a write; nothing reads it unset.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        # One of the two values that NVIDIA documents as reproducible; cuBLAS reads it at first use.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def conditions(device: str, *, channels_last: bool = False) -> dict[str, Any]:
    """What the bits depend on besides the request; recorded with every hash, equal on all ranks."""
    record: dict[str, Any] = {
        "memory_format": "channels_last" if channels_last else "contiguous",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    return {**record, **_gpu_conditions(device)} if device.startswith("cuda") else record


def _gpu_conditions(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(torch.device(device))
    return {
        "gpu": gpu.name,
        "gpu_multiprocessors": gpu.multi_processor_count,
        "gpu_capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
