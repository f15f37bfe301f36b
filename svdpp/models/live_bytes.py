"""Counting the bytes of live tensors, and of the workspace of CPU convolutions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tracks the storages of `known` tensors and of those created in its context.

    `peak` is their highest sum in bytes.
    """

    def __init__(self, known: Iterable[torch.Tensor], *, count_workspace: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._count_workspace = count_workspace
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._add(tensor)
        self._before = self.peak = self.now

    @property
    def above(self) -> int:
        """The peak above what was known."""
        return self.peak - self._before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = None
        if func in _WITHOUT_DATA and isinstance(args[0], FakeTensor):
            result = _WITHOUT_DATA[func](*args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        workspace = 0
        if self._count_workspace and func is torch.ops.aten.convolution.default:
            workspace = _convolution_workspace(args, result)
        self.peak = max(self.peak, self.now + workspace)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes()

        def forget(_: object) -> None:
            del self._storages[key]
            self.now -= num_bytes

        self.now += num_bytes
        self._storages[key] = weakref.ref(storage, forget)


# Fake tensors have no data. Where an operation's result depends on it, all elements are taken, and
# a condition holds and a length is longer than any tensor.


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


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
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten._local_scalar_dense.default: _number,
}


def _convolution_workspace(args: tuple[Any, ...], result: torch.Tensor) -> int:
    """Temporary bytes of a CPU convolution, for the kernel that torch chooses.

    oneDNN copies input and weight into blocks of channels, frees both copies, and then copies the
    result from blocks (ATen/native/mkldnn/Conv.cpp). The plain kernels copy every patch of the
    input into a column of a matrix (ATen/native/ConvolutionMM2d.cpp and 3d).
    """
    tensor, weight = args[0], args[1]
    backend = torch._C._select_conv_backend(*args).name
    if backend == "Mkldnn":
        return int(max(tensor.nbytes + weight.nbytes, result.nbytes))
    is_pointwise = all(size == 1 for size in weight.shape[2:])
    if backend in ("Slow2d", "Slow3d") and not is_pointwise:
        patch = weight[0].numel()
        return int(patch * result.nbytes // result.shape[1])
    return 0
