"""The default number of ranks of a command."""

from __future__ import annotations

import pytest
import torch

from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from tests.cli.shell import assert_error, svdpp_here


@pytest.mark.parametrize(
    ("device", "gpus", "steps", "world_size"),
    [("cuda", 3, 6, 3), ("cuda", 8, 28, 7), ("cuda", 1, 6, 1), ("cpu", 3, 8, 4), ("cpu", 3, 6, 3)],
)
def test_simulate_starts_as_many_ranks_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, steps: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started: list[int] = []

    def start(self: Pipeline) -> None:
        started.append(self.config.world_size)
        raise RequestError("this test starts no ranks")

    monkeypatch.setattr(Pipeline, "__enter__", start)
    answer = svdpp_here("simulate", "--device", device, "--steps", str(steps))
    assert_error(answer, 2, "this test starts no ranks")
    assert started == [world_size]
