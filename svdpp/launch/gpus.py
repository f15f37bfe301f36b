"""Owns which NVIDIA GPUs this process may use, through NVML: no CUDA context, no initialisation.

A parent process asks here: `torch.cuda` would create a context of some 0.5 GB on every card, and
would make processes that are forked afterwards unable to use CUDA.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as CUDA numbers it in this process."""

    index: int
    """N of `cuda:N`."""
    uuid: str
    name: str
    capability: str
    """Compute capability, such as 9.0."""
    total_bytes: int
    free_bytes: int


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA would show this process, in its order; none without an NVIDIA driver.

    Raises:
        RequestError: their order cannot be known, or a name in CUDA_VISIBLE_DEVICES means none.
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
        order = _visible_order(uuids, names, environment)
        return [_read(nvml, handles[at], index) for index, at in enumerate(order)]


def free_bytes(device: str) -> int:
    """Bytes that no process uses of `cuda:N`.

    Raises:
        RequestError: there is no such GPU.
    """
    index, gpus = int(device.partition(":")[2] or 0), visible_gpus()
    if index >= len(gpus):
        raise RequestError(f"device {device} asked for, {len(gpus)} GPUs found")
    return gpus[index].free_bytes


def peer_access() -> list[list[bool]]:
    """Whether each visible GPU (row) reads the memory of each other one (column) directly."""
    uuids = [gpu.uuid for gpu in visible_gpus()]
    with _nvml() as nvml:
        if nvml is None:
            return []
        read, ok = nvml.NVML_P2P_CAPS_INDEX_READ, nvml.NVML_P2P_STATUS_OK

        def reads(one: str, other: str) -> bool:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (one, other)]
            return one == other or nvml.nvmlDeviceGetP2PStatus(*handles, read) == ok

        return [[reads(one, other) for other in uuids] for one in uuids]


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    with _nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The NVML module, initialised; None where there is no NVIDIA driver."""
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


def _read(nvml: Any, handle: Any, index: int) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        capability=f"{major}.{minor}",
        total_bytes=memory.total,
        free_bytes=memory.free,
    )


def _visible_order(
    uuids: Sequence[str], names: Sequence[str], environment: Mapping[str, str]
) -> list[int]:
    """NVML's index of each GPU that CUDA shows, in CUDA's order.

    As the CUDA programming guide has it: a list of indices or of beginnings of UUIDs, which ends
    at the first entry that means no GPU. NVML counts by bus; CUDA puts the fastest first unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID, which is the same where all are alike.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(uuids))] if listed is None else listed.split(",")
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    order: list[int] = []
    for entry in map(str.strip, entries):
        if entry.startswith("MIG-"):
            raise RequestError(
                f"CUDA_VISIBLE_DEVICES names the MIG slice {entry!r}: slices are not supported",
                "name whole GPUs, by index or UUID",
            )
        if entry.isdecimal() and not by_bus and len(set(names)) > 1:
            raise RequestError(
                f"GPUs of several kinds ({', '.join(sorted(set(names)))}): their order is not sure",
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            )
        at = _index_of(entry, uuids)
        if at is None or at in order:
            break
        order.append(at)
    return order


def _index_of(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [at for at, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
