"""Owns what loading needs in every family: dtypes, and libraries that print nothing."""

from __future__ import annotations

import threading

import diffusers.utils.logging
import torch
import tqdm
import transformers.utils.logging

from svdpp.errors import RequestError


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for `fp32`, `fp16` or `bf16`.

    Raises:
        RequestError: any other name.
    """
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise RequestError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def silence_libraries() -> None:
    """Turns off the progress bars and warnings of diffusers and transformers in this process.

    Call it before the first import of a diffusers pipeline, which prints warnings.
    """
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # tqdm's own lock has a semaphore, which a rank that a signal ends would leave behind.
    tqdm.tqdm.set_lock(threading.RLock())
