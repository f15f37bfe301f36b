"""Choice of backend and device, and leaving the process group."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loguru import logger

from svdpp.errors import RankError, RequestError
from svdpp.launch.process_group import (
    check_devices,
    choose_backend,
    destroy,
    device_of_rank,
    join_file_store,
)
from svdpp.launch.world import World

FOURTH = World(rank=3, local_rank=3, size=4, local_size=4)


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
def test_unusable_backends_are_refused(device: str, backend: str) -> None:
    with pytest.raises(RequestError):
        choose_backend(device, 2, {"PIPELINE_BACKEND": backend})


def test_ranks_use_the_gpu_of_their_local_rank_or_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = [device_of_rank(device, FOURTH) for device in ("cuda", "cuda:0", "cpu")]
    assert devices == ["cuda:3", "cuda:0", "cpu"]


def test_a_task_that_sees_one_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm with --gpus-per-task=1 shows each task its own GPU as cuda:0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank("cuda", FOURTH) == "cuda:0"
    check_devices("cuda", 4, launched=True)
    with pytest.raises(RequestError, match="4 CUDA devices asked for, 1 found"):
        check_devices("cuda", 4)


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cuda", 2)
    check_devices("cuda:1", 7)
    check_devices("cpu", 99)
    with pytest.raises(RequestError, match="3 CUDA devices asked for, 2 found"):
        check_devices("cuda", 3)
    with pytest.raises(RequestError, match="device cuda:2 asked for, 2 found"):
        check_devices("cuda:2", 1)


def test_leaving_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """ncclCommDestroy may wait for a peer without end."""
    never = threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", never.wait)
    logged: list[str] = []
    sink = logger.add(logged.append, format="{message}")
    try:
        destroy(0.05)
    finally:
        never.set()
        logger.remove(sink)
    assert logged == ["the process group did not close within 0 s\n"]


def test_work_after_a_group_that_did_not_close_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RankError, match="still in a process group") as caught:
        join_file_store(World(rank=0, local_rank=0, size=1, local_size=1), "gloo", tmp_path / "it")
    assert "PIPELINE_BACKEND=gloo" in caught.value.hint
