"""Allocators' errors become one sentence that names the part, the sizes and the option."""

from __future__ import annotations

import pytest
import torch

from svdpp.errors import OutOfMemoryError
from svdpp.models import free_memory
from svdpp.plan.actions import Action, Kind
from svdpp.worker.memory import out_of_memory_named

# The message of torch 2.x (c10/cuda/CUDACachingAllocator.cpp).
CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 5.25 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB in use."
)


@pytest.mark.parametrize(
    ("action", "part", "knob"),
    [
        (Action.at(Kind.ENCODE, 0, 0), "encoding the image", "--height"),
        (Action(Kind.DENOISE, 0, 0, 4), "a denoising step", "--memory-opt"),
        (Action.at(Kind.DECODE, 0, 4), "decoding the frames", "--decode-chunk-size"),
        (None, "loading the model", "fewer ranks"),
    ],
)
def test_cuda_out_of_memory_names_part_sizes_and_knob(
    action: Action | None, part: str, knob: str
) -> None:
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory_named(action):
        raise torch.OutOfMemoryError(CUDA_WORDS)
    error = caught.value
    assert error.exit_code == 4
    assert str(error) == f"out of memory while {part}: 5.25 GiB asked for, 1.06 GiB free"
    assert knob in error.hint


def test_the_host_allocators_refusal_is_the_same_error() -> None:
    with (
        pytest.raises(OutOfMemoryError) as caught,
        out_of_memory_named(Action.at(Kind.DECODE, 0, 4)),
    ):
        torch.empty(2**58, dtype=torch.uint8)
    assert f"{2**28:.1f} GiB asked for" in str(caught.value)
    assert " GiB free" in str(caught.value)


def test_what_is_free_is_what_doctor_and_auto_call_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the kernel can reclaim at once counts as free, not only idle pages."""
    told = "MemTotal: 8388608 kB\nMemFree: 1048576 kB\nMemAvailable: 3145728 kB\n"
    monkeypatch.setattr(free_memory, "_meminfo", lambda: told)
    assert free_memory.free_bytes("cpu") == 3 * 2**30
    with (
        pytest.raises(OutOfMemoryError, match=r"asked for, 3\.0 GiB free"),
        out_of_memory_named(Action.at(Kind.ENCODE, 0, 0)),
    ):
        torch.empty(2**58, dtype=torch.uint8)


def test_pythons_memory_error_is_the_same_error() -> None:
    with pytest.raises(OutOfMemoryError), out_of_memory_named(Action.at(Kind.ENCODE, 0, 0)):
        raise MemoryError


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["pinned or stream memory", "cublas", "cudnn"],
)
def test_memory_outside_the_caching_allocator_is_the_same_error(error: RuntimeError) -> None:
    with (
        pytest.raises(OutOfMemoryError) as caught,
        out_of_memory_named(Action(Kind.DENOISE, 0, 0, 4)),
    ):
        raise error
    assert str(caught.value) == "out of memory while a denoising step"
    assert caught.value.exit_code == 4
    assert "--memory-opt" in caught.value.hint


def test_decoding_names_its_chunk() -> None:
    words = r"out of memory while decoding the frames, 14 at a time: 5\.25 GiB"
    with (
        pytest.raises(OutOfMemoryError, match=words),
        out_of_memory_named(Action.at(Kind.DECODE, 0, 4), 14),
    ):
        raise torch.OutOfMemoryError(CUDA_WORDS)


def test_the_reference_is_not_loading() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="while computing a clip in one process") as caught,
        out_of_memory_named("reference"),
    ):
        raise MemoryError
    assert "--frames" in caught.value.hint


def test_other_errors_pass_through() -> None:
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        out_of_memory_named(Action(Kind.DENOISE, 0, 0, 1)),
    ):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    original = OutOfMemoryError("said already", "a knob")
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory_named(None):
        raise original
    assert caught.value is original
