"""Makes a Python process see two fake GPUs until it uses one.

Python imports this module first if its folder is on PYTHONPATH. The first call of each kind that
would initialise CUDA is written to the file FAKE_GPU_RECORD, as process id and name. As in torch, a
process that was forked after its parent initialised CUDA cannot use it.
"""

import os
import types

import pynvml
import torch
import torch.accelerator

_state = {"initialised": False, "bad_fork": False}
_recorded: set[tuple[int, str]] = set()


def _record(call: str) -> None:
    if (os.getpid(), call) not in _recorded:
        _recorded.add((os.getpid(), call))
        with open(os.environ["FAKE_GPU_RECORD"], "a") as file:
            file.write(f"{os.getpid()} {call}\n")


def _initialise(call: str) -> None:
    if _state["bad_fork"]:
        _record("bad fork")
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
    _state["initialised"] = True
    _record(call)


def _get_device_count() -> int:
    _initialise("counts devices")
    return 2


def _set_device(device: torch.device) -> None:
    _initialise(f"sets {device}")
    raise RuntimeError("this is a fake GPU")


def _creates_a_context(*_: object) -> None:
    _initialise("creates a context")


def _after_fork() -> None:
    _state["bad_fork"] = _state["initialised"]


def _replace_nvml() -> None:
    """Two GPUs with 80 GB each, of which 70 GB are free."""
    total, free = 80 * 10**9, 70 * 10**9
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda: None
    pynvml.nvmlSystemGetDriverVersion = lambda: "999.0"
    pynvml.nvmlDeviceGetCount = lambda: 2
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
    pynvml.nvmlDeviceGetName = lambda index: "Fake GPU"  # noqa: ARG005
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda index: (9, 0)  # noqa: ARG005
    pynvml.nvmlDeviceGetMemoryInfo = lambda index: types.SimpleNamespace(  # noqa: ARG005
        total=total, free=free, used=total - free
    )


_replace_nvml()
os.register_at_fork(after_in_child=_after_fork)
torch._C._cuda_getDeviceCount = _get_device_count
torch._C._cuda_getCurrentRawStream = lambda *_: 0  # libraries import it if CUDA is compiled in
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 2
torch.cuda.set_device = _set_device
torch.cuda.mem_get_info = _creates_a_context
torch.cuda.get_device_properties = _creates_a_context
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
