"""Loading one component of a checkpoint: checked, mapped from its files, and to the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
import tqdm
import transformers.utils.logging
from transformers.initialization import no_init_weights
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from svdpp.errors import ModelError, OutOfMemoryError, RequestError, is_out_of_memory
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.configs import first_line, library_errors, short_repr
from svdpp.models.free_memory import free_bytes
from svdpp.models.safetensors_header import num_elements

#: Weights of these dtypes need scales.
_QUANTISED = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2"})
#: By default transformers names them on the screen alone.
_NAME_MISMATCHES = {"ignore_mismatched_sizes": True}


def load_module(
    checkpoint: Checkpoint, part: str, cls: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """One component of class `cls` in eval mode, on a device.

    On the CPU, weights whose file has the same dtype stay mapped to the file, so that ranks share
    their memory.

    Raises:
        ModelError: the weights do not fit the class, or a library rejects them.
        OutOfMemoryError: the device or the host has too little memory.
        RequestError: the device cannot be used.
    """
    with library_errors(part, checkpoint):
        headers = checkpoint.weight_files(part)
        dtypes = {dtype for header in headers.values() for dtype, _ in header.values()}
        if quantised := sorted(dtypes & _QUANTISED):
            raise ModelError(f"{part} has weights of the dtype {quantised[0]}: quantised")
    with _memory_errors(part, num_elements(headers) * dtype.itemsize, device):
        with library_errors(part, checkpoint):
            module = _from_pretrained(checkpoint, part, cls, dtype)
        try:
            # Parameters keep requires_grad, as in diffusers' pipeline. Without it torch uses other
            # CPU kernels, which give other bits.
            return module.eval().to(device)
        # torch raises AssertionError without CUDA support, RuntimeError if there is no device.
        except (AssertionError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise RequestError(f"{device} cannot be used: {first_line(error)}") from error


def load_processor(checkpoint: Checkpoint, part: str, cls: Any) -> Any:
    """A component without weights: a tokenizer, an image processor or a guider."""
    folder = checkpoint.folder / part
    if part == "tokenizer" and not (folder / "tokenizer.json").is_file():
        # transformers would make up a vocabulary.
        if not (folder / "spiece.model").is_file():
            raise ModelError("tokenizer/tokenizer.json is missing")
        if not (is_sentencepiece_available() and is_protobuf_available()):
            raise ModelError(
                "tokenizer/spiece.model needs the packages sentencepiece and protobuf",
                "pip install sentencepiece protobuf",
            )
    with library_errors(part, checkpoint):
        return cls.from_pretrained(folder, local_files_only=True)


def _from_pretrained(checkpoint: Checkpoint, part: str, cls: Any, dtype: torch.dtype) -> Any:
    """Also refuses what the libraries only warn about: weights of another class."""
    own = {"low_cpu_mem_usage": True} if _is_diffusers(cls) else _NAME_MISMATCHES
    module, info = cls.from_pretrained(
        checkpoint.folder / part,
        local_files_only=True,
        use_safetensors=True,
        variant=checkpoint.variant,
        dtype=dtype,
        output_loading_info=True,
        **own,
    )
    # Of shards, diffusers does not say which are missing.
    absent = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    for problem, keys in (
        ("missing", {*info["missing_keys"], *absent}),
        ("unexpected", info["unexpected_keys"]),
        ("mismatched", info["mismatched_keys"]),
    ):
        if names := sorted(map(str, keys)):
            first = f"weights are {problem}, the first is {short_repr(names[0])}"
            raise ModelError(f"{part}: {first} of {len(names)}")
    return module


@contextmanager
def _memory_errors(part: str, num_bytes: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        free = ", more than is free"
        if device.type == "cuda":
            free = f", where {free_bytes(device) / 1e9:.2f} GB are free"
        raise OutOfMemoryError(
            f"{part} needs {num_bytes / 1e9:.2f} GB on {device}{free}",
            "use --dtype bf16 or fp16, which halve the weights, or fewer ranks on this device",
        ) from error


def silence_libraries() -> None:
    """Turns off the progress bars and warnings of diffusers and transformers in this process.

    Call it before the first import of a diffusers pipeline, which prints warnings.
    """
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # tqdm's own lock has a semaphore, which a rank that a signal ends would leave behind.
    tqdm.tqdm.set_lock(threading.RLock())


def new_module(cls: Any, folder: Path) -> Any:
    """The module of class `cls` that the config in `folder` describes, without its weights.

    Call it on the meta device or under fake tensors; otherwise it allocates the weights.
    """
    if _is_diffusers(cls):
        return cls.from_config(cls.load_config(folder, local_files_only=True))
    config = cls.config_class.from_pretrained(folder, local_files_only=True)
    config.dtype = torch.get_default_dtype()  # the config has the dtype of the files
    with no_init_weights():
        module = cls(config)
    module.tie_weights()
    return module


def fp32_parameters(module: torch.nn.Module) -> list[str]:
    """The parameters that the libraries load in float32 although the module has another dtype.

    diffusers keeps what a class lists in `_keep_in_fp32_modules`, transformers does so only for
    float16 (`load_model_dict_into_meta` of diffusers 0.42, `_get_dtype_plan` of transformers 5.23).
    """
    dtype = torch.get_default_dtype()
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if dtype == torch.float32 or (dtype != torch.float16 and not _is_diffusers(type(module))):
        return []
    return [name for name, _ in module.named_parameters() if kept.intersection(name.split("."))]


def _is_diffusers(cls: Any) -> bool:
    return bool(cls.__module__.split(".")[0] == "diffusers")
