"""Tracker of the bytes of tensors, and of the temporary memory of CPU convolutions and attention.

The temporary memory of other operations is not counted, because torch does not tell which kernels
it would run for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from svdpp.models.engine.records import tensors_in


class MemoryTracker(TorchDispatchMode):
    """Tracker of the bytes of all tensors (real or fake) that exist during a `with` block.

    `current` is the number of bytes of all storages that exist now. `peak` is the highest number so
    far, including the temporary bytes of convolutions and attention.

    Args:
        known: Tensors that exist before the block. Their bytes count in `current` and `peak`.
        workspace_threads: Number of intra-op threads of the CPU rank whose memory is estimated. The
            number decides the kernels of convolutions, and so their temporary bytes. None:
            temporary bytes are not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor], workspace_threads: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self._workspace_threads = workspace_threads
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self.add(tensor)
        self._before = self.peak = self.current

    @property
    def peak_above_start(self) -> int:
        """Value of `peak` minus the bytes of the tensors that existed before the block."""
        return self.peak - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Helios factorises a matrix that is singular up to rounding errors. torch's check of the
        # result can fail on this CPU and pass on the ranks' devices, so the check is skipped.
        if func is torch.ops.aten._linalg_check_errors.default:
            return None
        result = None
        if func in _WITHOUT_DATA and isinstance(args[0], FakeTensor):
            result = _WITHOUT_DATA[func](*args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.add(tensor)
        workspace = 0
        threads = self._workspace_threads
        if threads is not None and func is torch.ops.aten.convolution.default:
            workspace = _convolution_workspace(args, result, threads)
        elif threads is not None and func is _FLASH_ATTENTION:
            workspace = _attention_workspace(args, threads)
        self.peak = max(self.peak, self.current + workspace)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count the bytes of a tensor, of any shape and dtype, until its storage is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes()

        def forget(_: object) -> None:
            del self._storages[key]
            self.current -= num_bytes

        self.current += num_bytes
        self._storages[key] = weakref.ref(storage, forget)


# Fake tensors have no data. If a result depends on data, the largest possible result is assumed: a
# mask selects all elements, a condition is true, and an integer has the largest value of int32.


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    first = indices[0]
    if first is None or first.dtype != torch.bool:
        return None
    return tensor.new_empty((first.numel(), *tensor.shape[first.dim() :]))


def _number(tensor: Any) -> bool | int | None:
    if tensor.dtype == torch.bool:
        return True
    is_known = tensor.is_floating_point() or tensor.constant is not None
    return None if is_known else torch.iinfo(torch.int32).max


_WITHOUT_DATA: Mapping[Any, Any] = {
    torch.ops.aten.nonzero.default: lambda tensor: tensor.new_empty(
        (tensor.numel(), tensor.dim()), dtype=torch.int64
    ),
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten._local_scalar_dense.default: _number,
}


def _convolution_workspace(args: tuple[Any, ...], result: torch.Tensor, num_threads: int) -> int:
    """Return the temporary bytes of a CPU convolution, for the kernel that torch chooses.

    oneDNN copies the input and the weight into its blocked layout. It frees both copies before it
    copies the result back to the plain layout (ATen/native/mkldnn/Conv.cpp). torch's plain kernels
    copy each patch of the input into a column of a matrix (ATen/native/ConvolutionMM2d.cpp and 3d).
    """
    tensor, weight = args[0], args[1]
    backend = convolution_backend(args, num_threads)
    if backend == "Mkldnn":
        return int(max(tensor.nbytes + weight.nbytes, result.nbytes))
    is_pointwise = all(size == 1 for size in weight.shape[2:])
    if backend in ("Slow2d", "Slow3d") and not is_pointwise:
        return int(weight[0].numel() * result.nbytes // result.shape[1])
    return 0


def convolution_backend(args: tuple[Any, ...], num_threads: int) -> str:
    """Return the kernel that torch chooses for a convolution on `num_threads` intra-op threads.

    `torch._C._select_conv_backend` answers for this process, which can have another number of
    threads. The number matters only for float32 weights whose height and width are 1. For them,
    one thread uses oneDNN only if the batch has 16 or more images, or if a stride or dilation is
    above 1 (`use_mkldnn` in ATen/native/Convolution.cpp).

    Args:
        args: Arguments of `aten.convolution`.
        num_threads: Number of intra-op threads of the process that will run the convolution.

    Returns:
        torch's name of the kernel, such as `Mkldnn` (oneDNN) or `Slow3d` (plain).
    """
    tensor, weight, bias, stride, padding, dilation, is_transposed, *rest = args
    depends_on_threads = (
        tensor.dtype == torch.float32
        and tensor.shape[0] < 16
        and all(size == 1 for size in (*weight.shape[2:][-2:], *stride, *dilation))
    )
    if depends_on_threads and num_threads == 1:
        return ("SlowTranspose" if is_transposed else "Slow") + f"{max(2, weight.dim() - 2)}d"
    if depends_on_threads:
        # Ask torch about the same convolution with a dilation. torch then selects the kernel for
        # several threads, even if this process has only one thread. A dilation does not change a
        # convolution whose weight has the width 1.
        dilation = [*dilation[:-1], 2]
    args = (tensor, weight, bias, stride, padding, dilation, is_transposed, *rest)
    name = str(torch._C._select_conv_backend(*args).name)
    return name.replace("Dilated", "") if depends_on_threads else name


_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _attention_workspace(args: tuple[Any, ...], num_threads: int) -> int:
    """Return the temporary bytes of flash attention on this CPU.

    See ATen/native/cpu/FlashAttentionKernel.cpp. Each thread works on a block of queries and keys,
    in float32. In half precision it also has a copy of the block's weights in that dtype. If the
    CPU has AMX, all keys and values are then copied into the layout that AMX multiplies.
    """
    query, key, value = args[:3]
    num_queries, num_keys, size = query.shape[2], key.shape[2], query.shape[3]
    queries = min(num_queries, 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32)
    keys = min(num_keys, 512)
    thread_bytes, packed_bytes = 4 * queries * (keys + 2 + size), 0
    if query.dtype in (torch.bfloat16, torch.float16):
        thread_bytes += 2 * queries * keys
        if _has_amx():
            thread_bytes += 2 * keys * size
            packed_bytes = key.nbytes + value.nbytes
    return int(num_threads * thread_bytes + packed_bytes)


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()
