"""Free memory, and the memory that ranks of one machine share; no diffusers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import Checkpoint

_MEMINFO = Path("/proc/meminfo")
# As safetensors spells them.
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def free_bytes(device: torch.device | str) -> int:
    """Free bytes of the host, or of the GPU of this rank.

    Only a process that uses the GPU may call it, because it creates a CUDA context. The parent uses
    `launch.gpus`.
    """
    device = torch.device(device)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def available_bytes() -> int:
    """Host memory in bytes that a new process can use without swapping; MemAvailable in proc(5)."""
    found = re.search(r"MemAvailable: *(\d+) kB", _MEMINFO.read_text())
    assert found is not None, "Linux 3.14 and later have it"
    return int(found[1]) * 1024


def gib_text(num_bytes: int) -> str:
    """An amount of memory for messages, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def bare_process_bytes() -> int:
    """Resident bytes of a rank's process without a model.

    It measures this process, which must already have imported what a rank imports.
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shares_weights(checkpoint: Checkpoint, model: ModelConfig, component: str) -> bool:
    """Whether all ranks of a machine map a component's weights from its files.

    They do if the files have the dtype in which the component is loaded; otherwise each has a copy.
    """
    dtype = "fp32" if component in checkpoint.row.fp32 else model.dtype
    headers = checkpoint.weight_files(component).values()
    return {name for header in headers for name, _ in header.values()} == {_DTYPES[dtype]}
