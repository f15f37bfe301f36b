"""Device of a rank: selected before anything else; errors name what is missing, such as memory."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from svdpp.config import ModelConfig, PipelineConfig
from svdpp.errors import OutOfMemoryError, RequestError, first_line
from svdpp.launch.world import World
from svdpp.plan.actions import Action
from svdpp.worker import device
from svdpp.worker.device import MemoryPressure, out_of_memory_named, take_device

GPU = torch.device("cuda:1")
WORLD = World(rank=1, local_rank=1, size=2, local_size=2)
CONFIG = PipelineConfig(world_size=2, model=ModelConfig(name="dummy"), device="cuda")


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), RequestError, "cuda:1 cannot be"),
        (RuntimeError("CUDA error: invalid device ordinal\nmore"), RequestError, "invalid device"),
        (
            torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization"),
            RequestError,
            "cuda:1 cannot be used: CUDA call failed lazily",
        ),
        (
            RuntimeError("CUDA error: out of memory\nmore"),
            OutOfMemoryError,
            "creating the CUDA context: CUDA error: out of memory",
        ),
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


@pytest.mark.parametrize("name", ["num_alloc_retries", "num_ooms"])
def test_memory_pressure_lasts_for_the_life_of_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A shortage of memory counts for all later clips of the process.

    cuDNN keeps a kernel that it chose when memory was short.
    """
    stats = {"num_alloc_retries": 1, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: dict(stats))
    monkeypatch.setattr(device, "_events_before", {})
    pressure = MemoryPressure(GPU)
    assert not pressure.has_occurred()
    stats[name] += 1
    assert [pressure.has_occurred(), pressure.has_occurred()] == [True, True]
    assert MemoryPressure(GPU).has_occurred(), "of a later pipeline in the same process"
    assert not MemoryPressure(torch.device("cpu")).has_occurred()


# Message of torch 2.x (c10/cuda/CUDACachingAllocator.cpp).
CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 5.25 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB in use."
)
# Errors from outside the caching allocator: pinned or stream memory, cuBLAS, cuDNN.
PINNED = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
CUDNN = RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
ENCODE, DENOISE, DECODE = map(Action.parse, ("ENCODE c0 @0", "DENOISE c0 0:4", "DECODE c0 @4"))


@pytest.mark.parametrize(
    ("error", "doing", "words", "knob"),
    [
        (CUDA, ENCODE, "encoding the image", "`height`"),
        (CUDA, DENOISE, "running a denoising step", "`memory_opt`"),
        (CUDA, DECODE, "decoding the frames", "`decode_chunk_size`"),
        (CUDA, None, "loading the model", "fewer ranks"),
        (MemoryError(), "reference", "computing a clip in one process", "`num_frames`"),
        *((error, DENOISE, "running a denoising step", "") for error in (PINNED, CUBLAS, CUDNN)),
    ],
)
def test_a_lack_of_memory_names_part_cause_and_knob(
    error: Exception, doing: Action | Literal["reference"] | None, words: str, knob: str
) -> None:
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory_named(doing, "cpu", 3):
        raise error
    assert str(caught.value) == f"out of memory while {words}: {first_line(error)}"
    assert knob in caught.value.hint
    assert caught.value.exit_code == 4
    details = caught.value.details
    assert (details["device"], details["rank"]) == ("cpu", 3)
    if error is CUDA:
        sizes = round(5.25 * 2**30), round(1.06 * 2**30)
        assert (details["requested_bytes"], details["free_bytes"]) == sizes
    else:
        assert details["free_bytes"] > 2**20
    if doing is DENOISE:
        assert (details["clip"], details["step"]) == (0, 0)


def test_a_load_without_memory_keeps_its_words_and_gets_the_rank() -> None:
    inner = OutOfMemoryError("unet needs more", "use fp16", details={"requested_bytes": 7})
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory_named(None, "cpu", 1):
        raise inner
    assert (caught.value.message, caught.value.hint) == (inner.message, inner.hint)
    details = caught.value.details
    assert details.pop("free_bytes") > 2**20
    assert details.pop("cause") == inner.message
    assert details == {"requested_bytes": 7, "device": "cpu", "rank": 1}


def test_the_host_allocators_refusal_is_a_lack_of_memory() -> None:
    words = f"while decoding the frames: .*you tried to allocate {2**58} bytes"
    with pytest.raises(OutOfMemoryError, match=words) as caught, out_of_memory_named(DECODE):
        torch.empty(2**58, dtype=torch.uint8)
    assert caught.value.details["requested_bytes"] == 2**58


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), out_of_memory_named(None):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
