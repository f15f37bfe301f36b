"""A rank takes its device first, in each of its threads, and names the reason if it cannot."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch

from svdpp.comm import streams
from svdpp.config import ModelConfig, PipelineConfig
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.launch.world import World
from svdpp.worker import side_threads
from svdpp.worker.device import MemoryPressure, take_device
from svdpp.worker.side_threads import BoundedExecutor

GPU = torch.device("cuda:1")
WORLD = World(rank=1, local_rank=1, size=2, local_size=2)
CONFIG = PipelineConfig(world_size=2, model=ModelConfig(name="dummy"), device="cuda")


def test_each_thread_beside_the_work_takes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    took: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: took.update({threading.current_thread().name: d})
    )
    monkeypatch.setattr(side_threads, "SideStream", Mock())
    executor, names = BoundedExecutor("writer", GPU, Mock()), list[str]()
    executor.submit(lambda: names.append(threading.current_thread().name))
    executor.finish()
    assert took == {names[0]: GPU}
    link = streams.one_thread("to-1", GPU)
    assert took[link.submit(lambda: threading.current_thread().name).result()] == GPU


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), RequestError, "cuda:1 cannot be"),
        (RuntimeError("CUDA error: invalid device ordinal\nmore"), RequestError, "invalid device"),
        (RuntimeError("CUDA error: out of memory\nmore"), OutOfMemoryError, "CUDA context"),
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


def test_memory_pressure_is_what_came_since_it_was_last_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"num_alloc_retries": 1, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: dict(stats))
    pressure = MemoryPressure(GPU)
    assert not pressure.rose()
    stats["num_alloc_retries"] = 2
    assert pressure.rose()
    assert not pressure.rose()
    stats["num_ooms"] = 1
    assert pressure.rose()
    assert not MemoryPressure(torch.device("cpu")).rose()
