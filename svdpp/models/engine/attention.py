"""Attention backends of diffusers: checks, use in modules, and a test of reproducible results."""

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

#: Classes of modules whose processor gets a backend from the method `set_attention_backend` of
#: diffusers.
_ATTENTION_CLASSES = (Attention, MochiAttention, AttentionModuleMixin)
#: Shapes (batch, positions, heads, width) of the test whether a backend is reproducible. The test
#: makes two calls: self-attention, and attention to a prompt. Each entry has the shape of the query
#: of one call, and the shape of its key and value.
_TEST_SHAPES = (((1, 1024, 4, 64), (1, 1024, 4, 64)), ((2, 512, 4, 128), (2, 77, 4, 128)))
_TEST_RUNS = 3


def check_attention_backend(name: str, checkpoint: Checkpoint) -> None:
    """Check that diffusers has a backend, that it runs here, and that it has an effect on a model.

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
    """Return the names of the installed attention backends, without those that the hub provides."""
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
    # This import takes seconds, because it imports transformers. `attention_hashes` does not need
    # it.
    from svdpp.models.engine.load import build_without_weights

    return any(_processors(build_without_weights(checkpoint, part)))


def _processors(module: torch.nn.Module) -> Iterator[Any]:
    """Yield those attention processors of a module whose backend diffusers can set.

    Other processors, such as those of SVD's UNet, call torch's attention directly. The method
    `set_attention_backend` of diffusers skips such processors without a warning.
    """
    for each in module.modules():
        if isinstance(each, _ATTENTION_CLASSES) and hasattr(each.processor, "_attention_backend"):
            yield each.processor


# --- backend of modules --------------------------------------------------------------------------


def set_attention_backend(module: Any, name: str) -> None:
    """Set the backend of one model of diffusers; all other models of the process keep theirs.

    The method `set_attention_backend` of diffusers also makes the backend the default of the
    process, which applies to all models without a backend of their own. This function restores that
    default.

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
    """Set the backend of all loaded components of a pipeline.

    A diffusers script that sets the backend of the denoiser also makes it the default of the
    process. So the text connectors of LTX-2 use it, too. A rank that only encodes has no denoiser,
    so this function sets the backend of each component.

    Args:
        pipe: Pipeline of diffusers, of which some components may be skeletons.
        name: Checked name of the backend.
    """
    for component in pipe.components.values():
        if isinstance(component, ModelMixin) and not hasattr(component, "is_skeleton"):
            set_attention_backend(component, name)


def as_process_default(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an attention backend is the default of the whole process.

    diffusers' own `set_attention_backend` has this effect, too.

    Args:
        name: Checked name of the backend; None: the default stays.
    """
    if name is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = attention_backend(name)
    return context


# --- test whether a backend is reproducible ------------------------------------------------------


def attention_conditions(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the conditions of a backend, which are recorded with each clip.

    Args:
        name: Checked name of the backend.
        device: Name of the rank's device.
        dtype: Dtype of the model.

    Returns:
        JSON values by name. `attention_repeats` is whether the backend gave equal bits for equal
        inputs each time.

    Raises:
        RequestError: The backend does not run on this device in this dtype.
    """
    hashes = attention_hashes(name, device, dtype)
    return {"attention_backend": name, ATTENTION_REPEATS: len(set(hashes)) == 1}


def attention_hashes(name: str, device: str, dtype: torch.dtype) -> list[str]:
    """Compute attention of the same inputs several times, and return a SHA-256 of each result.

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
    except Exception as error:  # packages and compilers of kernels raise errors of many types
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
