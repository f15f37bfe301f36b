"""The layout that the options give, and the costs that `auto` uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from svdpp.cli.request import PipelineOptions, PipelineRequest, default_world
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from tests.cli.shell import assert_error, svdpp_here


@pytest.mark.parametrize("option", ["layout", "cfg_parallel"])
def test_auto_needs_the_number_of_clips(option: str) -> None:
    layout: dict[str, Any] = {option: "auto"}
    options = PipelineOptions(model="demo", world=4, threads=1, steps=25, **layout)
    with pytest.raises(RequestError, match=r"auto needs .* only rank 0 knows it"):
        PipelineRequest(options=options, num_clips=None, device="cpu").resolve()


def test_all_ranks_may_be_used_where_nothing_must_divide() -> None:
    def world(**given: Any) -> int:
        return default_world("cpu", 25, divide=PipelineOptions(**given).must_divide)

    assert world() == world(layout="pipeline") == 1
    assert world(split="alternating") == world(layout="auto") == world(layout="data-parallel") == 2


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
