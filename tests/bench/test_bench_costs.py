"""The costs that a profile computes from its measurements, and a bench from its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from svdpp.bench.compare import DATA_PARALLEL, PIPELINE
from svdpp.bench.config import read_config
from svdpp.bench.runner import Bench, Round, costs_of
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.cost_profile import median_costs
from svdpp.driver.trace import Trace
from svdpp.launch import gpus
from svdpp.launch.world import World
from svdpp.plan.layout import Layout
from svdpp.worker.messages import ActionDone, StepDone, TransferDone
from tests.bench.made_up_benches import round_of

TWO_HOSTS = World(rank=0, local_rank=0, size=4, local_size=2, num_hosts=2, launcher="torchrun")


def _bench(world_size: int, device: str = "cpu") -> Bench:
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="dummy"),
        sampling=SvdSampling(num_inference_steps=world_size),
        device=device,
    )
    return Bench(read_config("smoke", ["model.name=dummy"]), config)


def _note(
    trace: Trace,
    step_seconds: Mapping[int, float],
    transfers: Mapping[tuple[int, int], float],
    *,
    clip: int = 0,
    encode_seconds: float = 0.25,
) -> Trace:
    """Adds a clip in which each rank does one step."""
    encode = ActionDone(action=f"ENCODE c{clip} @0", start=0.0, end=encode_seconds, waited=0.0)
    trace(0, encode)
    for rank, seconds in step_seconds.items():
        trace(rank, StepDone(clip=clip, step=rank, seconds=seconds))
        action = f"DENOISE c{clip} {rank}:{rank + 1}"
        trace(rank, ActionDone(action=action, start=1.0, end=1 + seconds, waited=0.0))
    for (source, target), seconds in transfers.items():
        about = {"clip": clip, "next_step": 1, "num_bytes": 77, "end": 9.0}
        trace(target, TransferDone(direction="recv", peer=source, seconds=seconds, **about))
        trace(source, TransferDone(direction="send", peer=target, seconds=5.0, **about))
    return trace


def _round(
    case: str, step_seconds: Mapping[int, float], transfers: Mapping[tuple[int, int], float]
) -> Round:
    return replace(round_of(case, 0), trace=_note(Trace(4), step_seconds, transfers))


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
    trace = _note(Trace(3), dict(enumerate(steps)), {})
    found = median_costs(_bench(3, device).config, None, [trace], source="")
    assert found.step_seconds == pytest.approx(costs)


def test_the_first_clip_warms_up_and_does_not_count() -> None:
    trace = Trace(2, first_clip=1)
    for clip, transfer in enumerate((1.0, 0.1, 0.1)):
        took = 10.0 - clip
        _note(trace, {1: took}, {(0, 1): transfer}, clip=clip, encode_seconds=took)
    costs = median_costs(_bench(2).config, None, [trace], source="a test")
    assert (costs.step_seconds, costs.encode_seconds) == (8.5, 8.5)
    assert (costs.packet_bytes, costs.transfer_seconds) == (77, pytest.approx(0.1))
    assert (costs.name, costs.source) == ("dummy 1x4x14x64x64 fp32", "a test")


def test_a_rank_has_its_median_and_a_hop_the_receivers() -> None:
    one = _bench(2)
    one.rounds = [_round(PIPELINE, {0: s, 1: s}, {(0, 1): s / 10}) for s in (1.0, 9.0, 2.0)]
    costs = costs_of(one, "run")
    assert costs.step_seconds == 2.0
    assert (costs.encode_seconds, costs.decode_seconds) == (0.25, 0.0)
    assert costs.transfer_seconds == pytest.approx(0.2)
    assert (costs.packet_bytes, costs.transfer_bytes_per_second) == (77, None)
    assert costs.source == "measured by: svdpp bench, smoke/run"


def test_a_slow_host_gets_fewer_steps() -> None:
    """Ranks on different hosts get separate costs, and so do their transfers."""
    config = _bench(4).config
    steps = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    done = _round(PIPELINE, steps, {(0, 1): 0.1, (1, 2): 0.5, (2, 3): 0.1})
    costs = median_costs(config, TWO_HOSTS, [done.trace], source="")
    assert costs.step_seconds == (1.0, 1.0, 3.0, 3.0)
    assert costs.ranks_per_host == 2
    assert (costs.transfer_seconds, costs.inter_host_transfer_seconds) == pytest.approx((0.1, 0.5))
    shares = Layout(num_steps=28, world_size=4, split="balanced", costs=costs).all_shares
    sizes = [share.end - share.start for share in shares]
    assert sum(sizes) == 28
    assert max(sizes[2:]) < min(sizes[:2])


@pytest.mark.parametrize("elsewhere", [{2: 3.0, 3: 4.0}, {}])
def test_a_rank_that_only_decodes_is_as_fast_as_elsewhere(
    elsewhere: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    one = _bench(4, "cuda")
    one.rounds = [_round(PIPELINE, {0: 1.0, 1: 2.0, 2: 3.0}, {})]
    if elsewhere:
        one.rounds.append(_round(DATA_PARALLEL, elsewhere, {}))
    assert costs_of(one, "run").step_seconds == (1.0, 2.0, 3.0, elsewhere.get(3, 2.0))
