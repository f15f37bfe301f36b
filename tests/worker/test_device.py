"""A rank takes its device first, in each thread; what it lacks, such as memory, is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import psutil
import pytest
import torch

from svdpp.comm import streams
from svdpp.config import ModelConfig, PipelineConfig
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.launch import gpus
from svdpp.launch.world import World
from svdpp.plan.actions import Action
from svdpp.worker import side_threads
from svdpp.worker.device import MemoryPressure, out_of_memory_named, take_device
from svdpp.worker.side_threads import BoundedExecutor

GPU = torch.device("cuda:1")
WORLD = World(rank=1, local_rank=1, size=2, local_size=2)
CONFIG = PipelineConfig(world_size=2, model=ModelConfig(name="dummy"), device="cuda")


def test_each_thread_beside_the_work_takes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    took: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: took.update({threading.current_thread().name: d})
    )
    monkeypatch.setattr(side_threads, "SideStream", Mock())
    executor, names = BoundedExecutor("writer", GPU, Mock()), list[str]()
    executor.submit(lambda: names.append(threading.current_thread().name))
    executor.finish()
    assert took == {names[0]: GPU}
    link = streams.one_thread("to-1", GPU)
    assert took[link.submit(lambda: threading.current_thread().name).result()] == GPU


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), RequestError, "cuda:1 cannot be"),
        (RuntimeError("CUDA error: invalid device ordinal\nmore"), RequestError, "invalid device"),
        (RuntimeError("CUDA error: out of memory\nmore"), OutOfMemoryError, "CUDA context"),
    ],
)
def test_a_device_that_cannot_be_taken(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], words: str
) -> None:
    def refuse(device: torch.device) -> None:
        assert device == GPU
        raise raised

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(kind, match=words):
        take_device(CONFIG, WORLD)


def test_memory_pressure_is_what_came_since_it_was_last_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"num_alloc_retries": 1, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: dict(stats))
    pressure = MemoryPressure(GPU)
    assert not pressure.rose()
    stats["num_alloc_retries"] = 2
    assert pressure.rose()
    assert not pressure.rose()
    stats["num_ooms"] = 1
    assert pressure.rose()
    assert not MemoryPressure(torch.device("cpu")).rose()


# The message of torch 2.x (c10/cuda/CUDACachingAllocator.cpp).
CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 5.25 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB in use."
)
SIZES = ": 5.25 GiB asked for, 1.06 GiB free"
# Outside the caching allocator: pinned or stream memory, cuBLAS, cuDNN.
PINNED = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
CUDNN = RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
ENCODE, DENOISE, DECODE = map(Action.parse, ("ENCODE c0 @0", "DENOISE c0 0:4", "DECODE c0 @4"))


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "doing", "chunk", "words", "knob"),
    [
        (CUDA, ENCODE, None, "encoding the image" + SIZES, "--height"),
        (CUDA, DENOISE, None, "a denoising step" + SIZES, "--memory-opt"),
        (CUDA, DECODE, None, "decoding the frames" + SIZES, "--decode-chunk-size"),
        (CUDA, DECODE, 14, "decoding the frames, 14 at a time" + SIZES, "--decode-chunk-size"),
        (CUDA, None, None, "loading the model" + SIZES, "fewer ranks"),
        (MemoryError(), ENCODE, None, "encoding the image", "--height"),
        (MemoryError(), "reference", None, "computing a clip in one process", "--frames"),
        *((error, DENOISE, None, "a denoising step", "") for error in (PINNED, CUBLAS, CUDNN)),
    ],
)
def test_a_lack_of_memory_names_part_sizes_and_knob(
    error: Exception,
    doing: Action | Literal["reference"] | None,
    chunk: int | None,
    words: str,
    knob: str,
) -> None:
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory_named(doing, chunk):
        raise error
    assert str(caught.value) == f"out of memory while {words}"
    assert knob in caught.value.hint
    assert caught.value.exit_code == 4


def test_the_host_allocators_refusal_tells_what_doctor_and_auto_call_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the kernel can reclaim at once counts as free, not only idle pages."""
    told = "MemTotal: 8388608 kB\nMemFree: 1048576 kB\nMemAvailable: 3145728 kB\n"
    others = ("Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab")
    (tmp_path / "meminfo").write_text(told + "".join(f"{name}: 0 kB\n" for name in others))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert gpus.available_bytes() == 3 * 2**30
    words = rf"while decoding the frames: {2**28:.1f} GiB asked for, 3\.0 GiB free"
    with pytest.raises(OutOfMemoryError, match=words), out_of_memory_named(DECODE):
        torch.empty(2**58, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), RuntimeError),
        (lambda: _raise(OutOfMemoryError("said already", "a knob")), OutOfMemoryError),
    ],
)
def test_other_errors_pass_through(work: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"mat1 and mat2|^said already$"), out_of_memory_named(None):
        work()
