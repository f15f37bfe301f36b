"""Make a Python process see two fake GPUs, which fail when they are used.

Python imports this module at its start if its folder is on PYTHONPATH. The first call of each kind
that would initialise CUDA is appended to the file that the variable FAKE_GPU_RECORD names, as
process id and name. As in torch, a process cannot use CUDA if its parent initialised CUDA before
the fork.
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


def _set_device(device: torch.device) -> None:
    _initialise(f"sets {device}")
    raise RuntimeError("this is a fake GPU")


def _after_fork() -> None:
    _state["bad_fork"] = _state["initialised"]


_NVML = {
    "Init": None,
    "Shutdown": None,
    "SystemGetDriverVersion": "999.0",
    "DeviceGetCount": 2,
    "DeviceGetName": "Fake GPU",
    "DeviceGetCudaComputeCapability": (9, 0),
    "DeviceGetMemoryInfo": types.SimpleNamespace(total=80 * 10**9, free=70 * 10**9),
}
for _name, _value in _NVML.items():
    setattr(pynvml, f"nvml{_name}", lambda *_, value=_value: value)
pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
pynvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"

os.register_at_fork(after_in_child=_after_fork)
torch._C._cuda_getDeviceCount = lambda: _initialise("counts devices") or 2
torch._C._cuda_getCurrentRawStream = lambda *_: 0  # libraries import the name if torch has CUDA
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 2
torch.cuda.set_device = _set_device
torch.cuda.mem_get_info = lambda *_: _initialise("creates a context")
torch.cuda.get_device_properties = lambda *_: _initialise("creates a context")
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
