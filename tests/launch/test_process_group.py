"""Backends and devices are what was asked for, or an error."""

from __future__ import annotations

import pytest
import torch

from svdpp.errors import RequestError
from svdpp.launch.process_group import (
    check_devices,
    choose_backend,
    device_of_rank,
)


@pytest.mark.parametrize(
    ("device", "world_size", "environment", "backend"),
    [
        ("cpu", 4, {}, "gloo"),
        ("cuda", 4, {}, "nccl"),
        ("cuda:0", 4, {}, "gloo"),
        ("cuda", 4, {"PIPELINE_BACKEND": "gloo"}, "gloo"),
        ("cuda:0", 1, {"PIPELINE_BACKEND": "nccl"}, "nccl"),
    ],
)
def test_backend_follows_the_device(
    device: str, world_size: int, environment: dict[str, str], backend: str
) -> None:
    assert choose_backend(device, world_size, environment) == backend


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "nccl"), ("cuda:0", "nccl"), ("cpu", "mpi"), ("cuda", "ucc")]
)
def test_backends_that_cannot_carry_latents_are_refused(device: str, backend: str) -> None:
    with pytest.raises(RequestError):
        choose_backend(device, 2, {"PIPELINE_BACKEND": backend})


def test_ranks_take_the_gpu_of_their_number_or_share_one() -> None:
    assert device_of_rank("cuda", 3) == "cuda:3"
    assert device_of_rank("cuda:0", 3) == "cuda:0"
    assert device_of_rank("cpu", 3) == "cpu"


def test_missing_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cuda", 2)
    check_devices("cuda:1", 7)
    check_devices("cpu", 99)
    with pytest.raises(RequestError, match="3 CUDA devices asked for, 2 found"):
        check_devices("cuda", 3)
    with pytest.raises(RequestError, match="device cuda:2 asked for, 2 found"):
        check_devices("cuda:2", 1)
