"""Exceptions of gloo, NCCL and CUDA become errors that name the right rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from svdpp.comm.transport import translated_errors
from svdpp.errors import BrokenLinkError, DeviceError, OutOfMemoryError, RankError

# As torch 2.13 and NCCL 2.27 print them (ProcessGroupNCCL.cpp, NCCLUtils.cpp).
NCCL_UNHANDLED = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, \
unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
NCCL_XID = NCCL_UNHANDLED.replace("2 'out of memory'", "719 'unspecified launch failure'")
NCCL_REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, \
remote process exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer host0<51234>"""
XID = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in the documentation for more information.
CUDA kernel errors might be asynchronously reported at some other API call."""
NO_MEMORY = XID.replace("an illegal memory access was encountered", "out of memory")
ALLOCATOR = "CUDA out of memory. Tried to allocate 2.00 GiB"
GLOO = "[../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (RuntimeError(GLOO), BrokenLinkError, "Connection closed by peer"),
        (RuntimeError(""), BrokenLinkError, "RuntimeError"),
        (
            dist.DistBackendError(NCCL_REMOTE),
            BrokenLinkError,
            "last error: socketProgress: Connection closed by remote peer host0",
        ),
        (dist.DistBackendError(NCCL_XID), DeviceError, "CUDA error: unspecified launch failure"),
        (dist.DistBackendError(NCCL_UNHANDLED), OutOfMemoryError, "out of memory in NCCL"),
        (torch.OutOfMemoryError(ALLOCATOR), OutOfMemoryError, "out of memory: "),
        (torch.AcceleratorError(NO_MEMORY), OutOfMemoryError, "out of memory: "),
        (torch.AcceleratorError(XID), DeviceError, "an illegal memory access was encountered"),
        (BrokenLinkError("clip: sent 7, expected 8"), BrokenLinkError, "clip: sent 7, expected 8"),
    ],
)
def test_errors_are_told_apart(raised: Exception, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught, translated_errors("send clip 3 to rank 1"):
        raise raised
    assert type(caught.value) is kind
    assert "could not send clip 3 to rank 1" in str(caught.value)
    assert words in str(caught.value)


def test_a_gpu_that_fails_is_its_ranks_own_fault() -> None:
    """The parent treats a `BrokenLinkError` as a consequence of another rank's failure."""
    assert issubclass(DeviceError, RankError)
    assert not issubclass(DeviceError, BrokenLinkError)
    assert DeviceError.exit_code == 6
    assert OutOfMemoryError.exit_code == 4
