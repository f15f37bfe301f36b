"""Attention backends of diffusers: checks, selection, and a test for reproducible results."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import (
    _HUB_KERNELS_REGISTRY,
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import Attention, MochiAttention

from svdpp.config.pipeline import ATTENTION_REPEATS
from svdpp.errors import RequestError, first_line, is_out_of_memory, nearest
from svdpp.models.checkpoint import Checkpoint

#: Classes of attention modules on which diffusers' `set_attention_backend` acts.
_ATTENTION_CLASSES = (Attention, MochiAttention, AttentionModuleMixin)
#: Shapes (batch, positions, heads, width) in the test that checks whether a backend is
#: reproducible. The test makes two calls: self-attention, and attention to a prompt. Each call has
#: two shapes: that of the query, and that of the key and the value.
_TEST_SHAPES = (((1, 1024, 4, 64), (1, 1024, 4, 64)), ((2, 512, 4, 128), (2, 77, 4, 128)))
_TEST_RUNS = 3


def check_attention_backend(name: str, checkpoint: Checkpoint) -> None:
    """Check that diffusers has an attention backend, that it runs here, and that the model uses it.

    No weights are read, and no attention is computed.

    Args:
        name: Name of the backend, as in diffusers' `set_attention_backend`.
        checkpoint: Checkpoint of the model.

    Raises:
        RequestError: The backend is unknown, needs a package that is missing, would be downloaded
            from the hub, or has no effect on the model's denoiser.
        ModelError: The denoiser cannot be made from its config.
    """
    _check_usable(name)
    for part, class_name in checkpoint.classes:
        if part not in checkpoint.spec.denoisers:
            continue
        if not _takes_backends(checkpoint, part):
            raise RequestError(
                f"`attention_backend` has no effect on {checkpoint.label}: its {class_name} "
                "computes attention without the backends of diffusers",
                "leave it out",
                details={"attention_backend": name, "component": part, "class": class_name},
            )


def usable_backends() -> list[str]:
    """Return the names of all attention backends that run here without a download from the hub."""
    names = [backend.value for backend in AttentionBackendName]
    usable = []
    for name in names:
        with contextlib.suppress(RequestError):
            _check_usable(name)
            usable.append(name)
    return usable


def _check_usable(name: str) -> None:
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise RequestError(
            f"diffusers has no `attention_backend` {name!r}",
            nearest(name, known, f"diffusers has {', '.join(known)}"),
            details={"attention_backend": name, "known": known},
        )
    backend = AttentionBackendName(name)
    if backend in _HUB_KERNELS_REGISTRY:
        raise RequestError(
            f"`attention_backend` {name} is refused: diffusers would download its kernels from "
            f"the hub, from {_HUB_KERNELS_REGISTRY[backend].repo_id}",
            "svdpp runs no code from the hub: install the package, and name its own backend, such "
            "as flash or sage",
            details={"attention_backend": name, "source": _HUB_KERNELS_REGISTRY[backend].repo_id},
        )
    try:
        _check_attention_backend_requirements(backend)
    except RuntimeError as error:
        raise RequestError(
            f"`attention_backend` {name} cannot be used: {first_line(error)}",
            "svdpp doctor lists the backends that can be used here",
            details={"attention_backend": name, "cause": first_line(error)},
        ) from error


@functools.lru_cache
def _takes_backends(checkpoint: Checkpoint, part: str) -> bool:
    """Whether `set_attention_backend` changes how a component computes attention."""
    # Imported here, because the import takes seconds, and most functions of this module do not need
    # it.
    from svdpp.models.engine.load import build_without_weights

    return any(_processors(build_without_weights(checkpoint, part)))


def _processors(module: torch.nn.Module) -> Iterator[Any]:
    """Yield those attention processors of a module for which diffusers can set the backend.

    Other processors, such as those of SVD's UNet, call torch's attention directly. diffusers'
    `set_attention_backend` skips them without a warning.
    """
    for each in module.modules():
        if isinstance(each, _ATTENTION_CLASSES) and hasattr(each.processor, "_attention_backend"):
            yield each.processor


# --- backend of modules --------------------------------------------------------------------------


def set_attention_backend(module: Any, name: str) -> None:
    """Set the attention backend of one model, without an effect on other models of the process.

    diffusers' `set_attention_backend` also changes the default backend of the process, which
    applies to all models without their own backend. This function restores the earlier default.

    Args:
        module: Model of diffusers.
        name: Checked name of the backend.
    """
    before, _ = _AttentionBackendRegistry.get_active_backend()
    try:
        module.set_attention_backend(name)
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def use_attention_backend(pipe: Any, name: str) -> None:
    """Set the attention backend of all loaded components of a pipeline.

    In a diffusers script, a backend that is set for the denoiser becomes the default of the whole
    process, so other components, such as the text connectors of LTX-2, use it, too. A rank that
    only encodes has no denoiser. So this function sets the backend of each component.

    Args:
        pipe: Pipeline of diffusers. Some components may be skeletons, which have no weights.
        name: Checked name of the backend.
    """
    for component in pipe.components.values():
        if isinstance(component, ModelMixin) and not hasattr(component, "is_skeleton"):
            set_attention_backend(component, name)


def as_process_default(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which an attention backend is the default of the whole process.

    In a diffusers script, `set_attention_backend` has the same effect.

    Args:
        name: Checked name of the backend; None: the default does not change.
    """
    if name is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = attention_backend(name)
    return context


# --- test whether a backend is reproducible ------------------------------------------------------


def attention_conditions(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Try an attention backend on a device; return its name, and whether it is reproducible.

    A clip's metadata contains both values, among the conditions under which the clip was made.

    Args:
        name: Checked name of the backend.
        device: Name of the rank's device.
        dtype: Dtype of the model.

    Returns:
        JSON values by name: as `attention_backend`, the name of the backend; as
        `attention_repeats`, whether all computations from the same inputs gave the same bits.

    Raises:
        RequestError: The backend does not run on this device in this dtype.
    """
    hashes = attention_hashes(name, device, dtype)
    return {"attention_backend": name, ATTENTION_REPEATS: len(set(hashes)) == 1}


def attention_hashes(name: str, device: str, dtype: torch.dtype) -> list[str]:
    """Run attention several times on the same random inputs; return a SHA-256 for each run.

    If the backend is reproducible, all hashes are equal.

    Args:
        name: Checked name of the backend.
        device: Name of the device.
        dtype: Dtype of the inputs.

    Raises:
        RequestError: The backend does not run on this device in this dtype.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(shape, generator=generator).to(device, dtype) for shape in (query, key, key)]
        for query, key in _TEST_SHAPES
    ]
    backend = AttentionBackendName(name)
    hashes = []
    try:
        for _ in range(_TEST_RUNS):
            digest = hashlib.sha256()
            for query, key, value in inputs:
                with torch.no_grad():
                    result = dispatch_attention_fn(query, key, value, backend=backend)
                digest.update(result.float().cpu().contiguous().numpy().tobytes())
            hashes.append(digest.hexdigest())
    except Exception as error:  # the packages behind backends raise errors of many types
        if is_out_of_memory(error):
            raise
        kind = str(dtype).removeprefix("torch.")
        raise RequestError(
            f"`attention_backend` {name} does not run on {device} in {kind}: {first_line(error)}",
            "svdpp doctor lists the backends that can be used here",
            details={
                **{"attention_backend": name, "device": device, "dtype": kind},
                "cause": first_line(error),
            },
        ) from error
    return hashes
