"""The costs that a profile computes from its measurements."""

from __future__ import annotations

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.cost_profile import Profile, _moving_photo
from svdpp.diagnostics.rank_probe import LinkSpeed
from svdpp.driver.trace import Trace
from svdpp.worker.messages import ActionDone, StepDone, TransferDone


def _profile(device: str, *steps: float) -> Profile:
    config = PipelineConfig(
        world_size=len(steps),
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=len(steps)),
        device=device,
    )
    return Profile(config, step_seconds=list(steps))


@pytest.mark.parametrize(
    ("device", "steps", "costs"),
    [
        ("cuda", (1.0, 1.05, 1.02), 1.02),  # the same GPUs: one number
        ("cuda", (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)),
        ("cpu", (1.0, 2.0, 1.1), 1.1),  # one processor: noise
    ],
)
def test_ranks_are_told_apart_where_gpus_differ(
    device: str, steps: tuple[float, ...], costs: object
) -> None:
    assert _profile(device, *steps)._step_costs() == costs


def test_the_slowest_wire_counts() -> None:
    profile = _profile("cpu", 1.0, 1.0, 1.0)
    profile.transfers = [LinkSpeed(0, 1, 0.001, 2e9), LinkSpeed(1, 2, 0.003, 1e9)]
    profile.packet_bytes = 1_000_000
    profile.offload_gib_per_second = 12.5
    profile.weight_bytes, profile.work_bytes = {"denoise": 2**30}, {"denoise": 2**29}

    costs = profile.costs("svdpp profile")

    assert costs.local_transfer_seconds == pytest.approx(0.003 + 0.001)
    assert costs.peak_gib(encode=False, denoise=True, decode=False) == 1.5
    assert costs.offload_gib_per_second == 12.5
    assert costs.source == "measured by: svdpp profile"
    assert costs.name == "dummy 1x4x14x64x64 fp32"


def test_the_first_clip_warms_up_and_does_not_count() -> None:
    trace = Trace(2)
    for clip in (0, 1, 2):
        seconds = 10.0 - clip
        done = ActionDone(action=f"ENCODE c{clip} @0", start=0.0, end=seconds, waited=0.0)
        trace.add(0, done)
        trace.add(1, StepDone(clip=clip, step=0, seconds=seconds))
        done = ActionDone(action=f"DENOISE c{clip} 0:1", start=0.0, end=seconds, waited=0.0)
        trace.add(1, done)
        about = {"clip": clip, "next_step": 1, "peer": 0, "num_bytes": 77, "end": 1.0}
        trace.add(1, TransferDone(direction="recv", seconds=1.0 if clip == 0 else 0.1, **about))

    profile = _profile("cpu", 1.0, 1.0)
    profile.set_times(trace)

    assert profile.step_seconds == [0.0, 8.5]
    assert profile.encode_seconds == 8.5
    assert profile.packet_bytes == 77
    assert profile.transfer_seconds == pytest.approx(0.1)


def test_the_clip_whose_writing_is_timed_moves() -> None:
    sampling = SvdSampling(num_inference_steps=1, height=32, width=48, num_frames=3)
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)

    frames = _moving_photo(config)

    assert frames.shape == (3, 32, 48, 3)
    assert (frames[1, :, 1:] == frames[0, :, :-1]).all()
    assert (frames[0] != frames[1]).any()
