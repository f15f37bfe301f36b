"""Owns the environment variables that ranks need before they import torch. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_DEFAULTS = {
    # Transformers and diffusers print messages while they are imported.
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    # Reduces fragmentation: the tensors of a clip have many sizes.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # The parent monitors the ranks and names the one that fails. NCCL's watchdog would first abort
    # the neighbours of that rank, or a rank that holds the GIL for long.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets each variable that the user has not set, for this process and its later children."""
    if "PYTORCH_CUDA_ALLOC_CONF" in environment:  # the older name of PYTORCH_ALLOC_CONF
        environment.setdefault("PYTORCH_ALLOC_CONF", environment["PYTORCH_CUDA_ALLOC_CONF"])
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
