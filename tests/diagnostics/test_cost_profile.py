"""The costs that a profile computes from its measurements."""

from __future__ import annotations

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.cost_profile import median_costs
from svdpp.driver.trace import Trace
from svdpp.launch import gpus
from svdpp.worker.messages import ActionDone, StepDone, TransferDone


def _config(device: str, world_size: int) -> PipelineConfig:
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=world_size),
        device=device,
    )


@pytest.mark.parametrize(
    ("device", "steps", "costs"),
    [
        ("cuda", (1.0, 1.05, 1.02), 1.02),  # the same GPUs: one number
        ("cuda", (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)),
        ("cpu", (1.0, 2.0, 1.1), 1.1),  # one processor: noise
    ],
)
def test_ranks_are_told_apart_where_gpus_differ(
    device: str, steps: tuple[float, ...], costs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    trace = Trace(3)
    for rank, seconds in enumerate(steps):
        trace(rank, StepDone(clip=0, step=rank, seconds=seconds))
        done = ActionDone(action=f"DENOISE c0 {rank}:{rank + 1}", start=0.0, end=9.0, waited=0.0)
        trace(rank, done)
    assert median_costs(_config(device, 3), None, [trace], source="").step_seconds == pytest.approx(
        costs
    )


def test_the_first_clip_warms_up_and_does_not_count() -> None:
    trace = Trace(2, first_clip=1)
    for clip in (0, 1, 2):
        seconds = 10.0 - clip
        done = ActionDone(action=f"ENCODE c{clip} @0", start=0.0, end=seconds, waited=0.0)
        trace(0, done)
        trace(1, StepDone(clip=clip, step=0, seconds=seconds))
        done = ActionDone(action=f"DENOISE c{clip} 0:1", start=0.0, end=seconds, waited=0.0)
        trace(1, done)
        about = {"clip": clip, "next_step": 1, "peer": 0, "num_bytes": 77, "end": 1.0}
        trace(1, TransferDone(direction="recv", seconds=1.0 if clip == 0 else 0.1, **about))

    costs = median_costs(_config("cpu", 2), None, [trace], source="a test")

    assert (costs.step_seconds, costs.encode_seconds) == (8.5, 8.5)
    assert (costs.packet_bytes, costs.transfer_seconds) == (77, pytest.approx(0.1))
    assert (costs.name, costs.source) == ("dummy 1x4x14x64x64 fp32", "a test")
