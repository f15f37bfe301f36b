"""Worlds and backends come from the environment, and from nothing that contradicts itself."""

from __future__ import annotations

import pytest
import torch

from svdpp.distributed.process_group import (
    World,
    check_devices,
    choose_backend,
    device_of_rank,
    torchrun_world,
)
from svdpp.errors import RequestError


def test_no_torchrun_variables_is_no_world() -> None:
    assert torchrun_world({}) is None


def test_torchrun_variables_are_a_world() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    assert torchrun_world(environment) == World(3, 1, 4)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_half_a_world_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        torchrun_world(environment)


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
