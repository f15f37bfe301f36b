"""Free memory of the host, and the memory that its ranks share; knows no torch."""

from __future__ import annotations

import psutil

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import Checkpoint

# As safetensors spells them.
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def available_bytes() -> int:
    """Host memory in bytes that a new process can use without swapping."""
    return int(psutil.virtual_memory().available)


def gib_text(num_bytes: int) -> str:
    """An amount of memory for messages, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def bare_process_bytes() -> int:
    """Resident bytes of a rank's process without a model.

    It measures this process, which must already have imported what a rank imports.
    """
    return int(psutil.Process().memory_info().rss)


def shares_weights(checkpoint: Checkpoint, model: ModelConfig, component: str) -> bool:
    """Whether all ranks of a machine map a component's weights from its files.

    They do if the files have the dtype in which the component is loaded; otherwise each has a copy.
    """
    dtype = "fp32" if component in checkpoint.row.fp32 else model.dtype
    headers = checkpoint.weight_files(component).values()
    return {name for header in headers for name, _ in header.values()} == {_DTYPES[dtype]}
