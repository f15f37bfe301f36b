"""The GPUs that a process may use, in CUDA's order, read without CUDA."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from svdpp.errors import RequestError
from svdpp.launch import gpus

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
EQUAL = ["A100"] * 4
MIXED = ["A100", "H100", "A100", "A100"]


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        ("2,0", [2, 0]),
        ("GPU-cc33,GPU-aa", [2, 0]),
        ("1, 3", [1, 3]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-a,0", []),  # two UUIDs have this prefix
        ("1,1,2", [1]),
    ],
)
def test_visible_gpus_are_in_cudas_order(visible: str | None, order: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus._visible_order(UUIDS, EQUAL, environment) == order


def test_mixed_gpus_need_an_explicit_order() -> None:
    with pytest.raises(RequestError, match="CUDA's order is unknown") as caught:
        gpus._visible_order(UUIDS, MIXED, {})
    assert caught.value.hint == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus._visible_order(UUIDS, MIXED, by_bus) == [0, 1, 2, 3]
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-ab22,GPU-aa11"}
    assert gpus._visible_order(UUIDS, MIXED, by_uuid) == [1, 0]


def test_mig_slices_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="MIG slice 'MIG-1'"):
        gpus._visible_order(UUIDS, EQUAL, {"CUDA_VISIBLE_DEVICES": "MIG-1"})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with two GPUs, of which CUDA shows the second one first."""
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": UUIDS.__getitem__,
        "nvmlDeviceGetUUID": lambda uuid: uuid,
        "nvmlDeviceGetName": lambda _: "A100",
        "nvmlDeviceGetCudaComputeCapability": lambda _: (8, 0),
        "nvmlDeviceGetMemoryInfo": lambda uuid: types.SimpleNamespace(
            total=100, free=10 + UUIDS.index(uuid)
        ),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")


@pytest.mark.usefixtures("two_gpus")
def test_free_memory_follows_cudas_numbering() -> None:
    assert [gpus.free_bytes(f"cuda:{index}") for index in (0, 1)] == [11, 10]
    assert [gpu.uuid for gpu in gpus.visible_gpus()] == ["GPU-ab22", "GPU-aa11"]
    assert gpus.driver_version() == "580.1"
    with pytest.raises(RequestError, match="device cuda:2 asked for, 2 GPUs found"):
        gpus.free_bytes("cuda:2")


def test_there_are_no_gpus_without_a_driver() -> None:
    if gpus.driver_version() is not None:
        pytest.skip("this machine has an NVIDIA driver")
    assert gpus.visible_gpus() == []
