"""The layout that the options give, and the costs that `auto` uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from svdpp.cli.options.layout import LayoutOptions, RankOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.request import PipelineOptions, PipelineRequest, default_world
from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.plan.costs import PRESETS, Costs
from tests.cli.shell import assert_error, svdpp_here


def config_with(num_clips: int | None = 40, **layout: Any) -> tuple[PipelineConfig, str]:
    """The configuration of clips of 25 steps on 4 ranks, and the remark on its layout."""
    options = PipelineOptions(
        layout=LayoutOptions(**layout),
        model=ModelOptions(model="demo"),
        ranks=RankOptions(world=4, threads=1),
        sampling=SamplingOptions(steps=25),
    )
    how: dict[str, Any] = {"launched": None, "device": "cpu", "from_image": True}
    return PipelineRequest(options=options, num_clips=num_clips, **how).resolve()


def test_what_is_given_is_taken_and_the_rest_left_to_the_default() -> None:
    config, why = config_with(split="alternating", decoders=2)
    assert str(config.layout) == "1 replica of 4 ranks, alternating, 2 decoders"
    assert (config.costs, why) == (PRESETS["svd-xt-a100"], "")
    assert LayoutOptions().assumed_costs(decodes=False) == Costs()
    config, why = config_with(layout="data-parallel")
    assert (config.replicas, why) == (4, "")
    with pytest.raises(RequestError, match="neither a file nor a preset"):
        config_with(costs="a-card")


@pytest.mark.parametrize("option", ["layout", "cfg_parallel"])
def test_auto_needs_the_number_of_clips(option: str) -> None:
    with pytest.raises(RequestError, match=r"auto needs .* only rank 0 knows it"):
        config_with(num_clips=None, **{option: "auto"})


def test_all_ranks_may_be_used_where_nothing_must_divide() -> None:
    def world(**given: Any) -> int:
        return default_world("cpu", 25, divide=LayoutOptions(**given).must_divide)

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
