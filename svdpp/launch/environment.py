"""Owns the environment variables that ranks need before they import torch. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_DEFAULTS = {
    # These libraries write to the terminal while they are imported.
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    # Less memory is lost to fragments: a clip's tensors have many sizes.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # The parent watches over the ranks and names the one that fails. NCCL's own watchdog would
    # abort its neighbours, or a rank that holds Python's lock for long, before the parent can.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the user has not set, for this process and those that it starts afterwards."""
    if "PYTORCH_CUDA_ALLOC_CONF" in environment:  # the older name of PYTORCH_ALLOC_CONF
        environment.setdefault("PYTORCH_ALLOC_CONF", environment["PYTORCH_CUDA_ALLOC_CONF"])
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
