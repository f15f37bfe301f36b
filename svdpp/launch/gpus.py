"""Queries of this machine's hardware: GPUs (by NVML, not by CUDA) and available host memory.

`torch.cuda` is not used, because it would create a CUDA context of about 0.5 GB on every GPU, and
processes that are forked afterwards could not use CUDA.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU that is visible to this process, with its name, memory and compute capability."""

    index: int
    """Number N in the GPU's device name `cuda:N` in this process."""
    uuid: str
    name: str
    capability: str
    """CUDA compute capability, such as 9.0."""
    total_bytes: int
    free_bytes: int


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that are visible to this process, in CUDA's order.

    Args:
        environment: Environment variables; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read.

    Returns:
        List of GPUs; empty if there is no NVIDIA driver.

    Raises:
        RequestError: CUDA_VISIBLE_DEVICES names a MIG slice, or the machine has different GPUs and
            their order in CUDA is unknown.
    """
    with open_nvml() as nvml:
        if nvml is None:
            return []
        indices = range(nvml.nvmlDeviceGetCount())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        uuids = list(map(nvml.nvmlDeviceGetUUID, handles))
        names = list(map(nvml.nvmlDeviceGetName, handles))
        gpus = []
        for index, i in enumerate(visible_order(uuids, names, environment)):
            memory = nvml.nvmlDeviceGetMemoryInfo(handles[i])
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handles[i])
            gpu = Gpu(
                index=index,
                uuid=uuids[i],
                name=names[i],
                capability=f"{major}.{minor}",
                total_bytes=memory.total,
                free_bytes=memory.free,
            )
            gpus.append(gpu)
        return gpus


def free_bytes(device: str) -> int:
    """Return the free memory of `cuda:N`, in bytes.

    Args:
        device: Name of the device; `cuda` means `cuda:0`.

    Raises:
        RequestError: This machine has no such GPU.
    """
    index, gpus = int(device.partition(":")[2] or 0), visible_gpus()
    if index >= len(gpus):
        raise RequestError(
            f"device {device} was requested, but the number of GPUs found is {len(gpus)}",
            details={"device": device, "found": len(gpus)},
        )
    return gpus[index].free_bytes


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as `580.95.05`; None if there is no driver."""
    with open_nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the initialised NVML module; None if there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible_order(
    uuids: Sequence[str], names: Sequence[str], environment: Mapping[str, str]
) -> list[int]:
    """Return the NVML indices of the GPUs that CUDA can see, in CUDA's order.

    CUDA_VISIBLE_DEVICES lists indices or prefixes of UUIDs. CUDA ignores the first entry that
    matches no GPU, and all entries after it (CUDA programming guide). NVML numbers GPUs by PCI bus
    id. CUDA puts the fastest GPU first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Args:
        uuids: UUIDs of all GPUs, in NVML's order.
        names: Names of all GPUs, in NVML's order.
        environment: Environment variables.

    Raises:
        RequestError: CUDA_VISIBLE_DEVICES names a MIG slice, or the machine has different GPUs and
            their order in CUDA is unknown.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [str(index) for index in range(len(uuids))] if listed is None else listed.split(",")
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    order: list[int] = []
    for entry in map(str.strip, entries):
        if entry.startswith("MIG-"):
            raise RequestError(
                f"CUDA_VISIBLE_DEVICES names the MIG slice {entry!r}: slices are not supported",
                "name whole GPUs, by index or UUID",
                details={"entry": entry},
            )
        if entry.isdecimal() and not by_bus and len(set(names)) > 1:
            raise RequestError(
                f"the GPUs differ ({', '.join(sorted(set(names)))}), so CUDA's order is unknown",
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
                details={"names": sorted(set(names))},
            )
        matches = _matching_gpus(entry, uuids)
        if len(matches) != 1 or matches[0] in order:
            break
        order += matches
    return order


def _matching_gpus(entry: str, uuids: Sequence[str]) -> list[int]:
    """Return the NVML indices of the GPUs that match an entry of CUDA_VISIBLE_DEVICES."""
    if entry.isdecimal():
        return [int(entry)] if int(entry) < len(uuids) else []
    if not entry:
        return []
    return [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]


def available_bytes() -> int:
    """Return the bytes of host memory that a new process can use without swapping."""
    return int(psutil.virtual_memory().available)


def format_gib(num_bytes: int) -> str:
    """Return an amount of memory for messages, such as `1.5 GiB`.

    Args:
        num_bytes: Amount of memory in bytes.
    """
    return f"{num_bytes / 2**30:.1f} GiB"
