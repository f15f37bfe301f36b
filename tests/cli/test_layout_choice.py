"""The layout that the options give, and the costs that `auto` uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from svdpp.cli.options.layout import LayoutOptions, RankOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.request import PipelineOptions, PipelineRequest, auto_layout, default_world
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.diagnostics.memory_estimate import CUDA_PROCESS_BYTES, memory_of_devices
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.plan.costs import PRESETS, Costs
from tests.cli.shell import assert_error, svdpp_here

NEEDS = {
    "encode_weights_gib": 2.0,
    "encode_work_gib": 1.0,
    "denoise_weights_gib": 3.0,
    "denoise_work_gib": 4.0,
    "decode_weights_gib": 0.2,
    "decode_work_gib": 9.0,
}


def config_with(**layout: Any) -> tuple[PipelineConfig, str]:
    """The configuration of 40 clips of 25 steps on 4 ranks, and the remark on its layout."""
    options = PipelineOptions(
        layout=LayoutOptions(**layout),
        model=ModelOptions(model="demo"),
        ranks=RankOptions(world=4, threads=1),
        sampling=SamplingOptions(steps=25),
    )
    how: dict[str, Any] = {"launched": None, "device": "cpu", "from_image": True}
    return PipelineRequest(options=options, num_clips=40, **how).resolve()


def auto(*has: float, needs: dict[str, float] = NEEDS, **plan: Any) -> tuple[dict[str, Any], str]:
    """The layout that auto chooses for devices with this memory, one rank each; and why."""
    counts = {"num_steps": 25, "world_size": len(has), "num_clips": 40}
    given: dict[str, Any] = {"costs": PRESETS["svd-xt-a100"], **plan}
    layout = LayoutOptions(layout="auto")
    return auto_layout(layout, counts, lambda _: (needs, has), decodes=True, **given)


def test_what_is_given_is_taken_and_the_rest_left_to_the_default() -> None:
    config, why = config_with(split="dithered", decoders=2)
    assert str(config.layout) == "1 replica of 4 ranks, dithered, 2 decoders"
    assert (config.costs, why) == (PRESETS["svd-xt-a100"], "")
    assert LayoutOptions().assumed_costs(decodes=False) == Costs()
    config, why = config_with(layout="data-parallel")
    assert (config.replicas, why) == (4, "")
    with pytest.raises(RequestError, match="neither a file nor a preset"):
        config_with(costs="a-card")


def test_auto_says_why_and_whose_costs_it_took() -> None:
    config, why = config_with(layout="auto")
    assert config.replicas == 4
    assert why.startswith("layout: data parallel: ")
    assert "by the costs of svd-xt-a100" in why


def test_auto_heeds_the_memory_of_devices() -> None:
    """All parts on one rank need 14.2 GiB; steps with encode need 9, with decode 12.2."""
    shape, why = auto(*(13.0,) * 4)
    assert shape["replicas"] == 2
    assert "need more memory" in why
    with pytest.raises(RequestError, match="no layout of 4 ranks fits in 5 GiB a rank"):
        auto(*(5.0,) * 4)


def test_auto_may_let_a_rank_hold_both_experts() -> None:
    needs = {**NEEDS, "denoise_weights_gib": 27.0}
    experts = {"expert_boundary": 9, "share_experts": False}
    shape, why = auto(41.0, 62.0, 41.0, 41.0, needs=needs, **experts)
    assert shape["share_experts"] is True
    assert "1 of 4 ranks hold both experts" in why
    assert "share_experts" not in auto(*(41.0,) * 4, needs=needs, **experts)[0]


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        (LayoutOptions(layout="auto"), "--layout auto"),
        (LayoutOptions(cfg_parallel="auto"), "--cfg-parallel auto"),
    ],
)
def test_auto_needs_the_number_of_clips(layout: LayoutOptions, option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} needs .* only rank 0 knows it"):
        auto_layout(layout, {"num_clips": None}, None, costs=Costs())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layout": "best"}, "--layout must be auto, pipeline or data-parallel, got 'best'"),
        (
            {"layout": "auto", "replicas": 2},
            "--layout auto chooses the layout: leave out --replicas",
        ),
        ({"layout": "data-parallel", "split": "uniform"}, "leave out --split"),
    ],
)
def test_layouts_that_contradict_themselves(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        LayoutOptions(**given)


def test_all_ranks_may_be_used_where_nothing_must_divide() -> None:
    def world(**given: Any) -> int:
        return default_world("cpu", 25, divide=LayoutOptions(**given).must_divide)

    assert world() == world(layout="pipeline") == 1
    assert world(split="dithered") == world(layout="auto") == world(layout="data-parallel") == 2


@pytest.mark.long
def test_what_devices_have_and_the_model_needs() -> None:
    model = ModelConfig(name="demo", dtype="fp16")
    sampling = SvdSampling(**sampling_defaults("demo"))
    free = {"cuda:0": 8 * 2**30, "cuda:1": 6 * 2**30}
    needs, has = memory_of_devices(model, sampling, "cuda", 2, free.__getitem__)
    nccl_bytes = 200_000_000  # a pair of ranks on each side
    assert has == pytest.approx(
        [
            8 - (CUDA_PROCESS_BYTES + nccl_bytes) / 2**30,
            6 - (CUDA_PROCESS_BYTES + nccl_bytes) / 2**30,
        ]
    )
    peak = Costs(**needs).peak_gib(encode=True, denoise=True, decode=True)  # type: ignore[arg-type]
    assert peak is not None
    assert 0.01 < peak < 2
    shared = memory_of_devices(model, sampling, "cuda:1", 3, free.__getitem__)[1]
    assert shared == pytest.approx([2 - CUDA_PROCESS_BYTES / 2**30] * 3)
    assert memory_of_devices(model, sampling, "cpu", 2) == ({}, ())


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
