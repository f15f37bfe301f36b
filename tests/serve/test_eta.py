"""The ETA of a clip is that of a replay of the action lists, with measured costs of its size."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from svdpp.config import SvdSampling
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import Span, replay
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route, build_schedule
from svdpp.serve import eta
from svdpp.serve.eta import ClipAhead, Estimate, JobEstimates, MeasuredCosts, estimate
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, StepDone, TransferDone
from tests.serve.engines import SAMPLING as STORED
from tests.serve.engines import dummy_config, dummy_job

COSTS = Costs(step_seconds=1.0, encode_seconds=0.5, decode_seconds=4.0, transfer_seconds=0.1)
LAYOUTS = [
    Layout(num_steps=28, world_size=4, split="alternating", costs=COSTS),
    Layout(num_steps=28, world_size=7, split="uniform", costs=COSTS),
    Layout(num_steps=28, world_size=4, split="alternating", decoders=2, costs=COSTS),
    Layout(num_steps=28, world_size=6, split="balanced", replicas=2, costs=COSTS),
    Layout(num_steps=28, world_size=3, replicas=3, costs=COSTS),
]


def _route(layout: Layout, clip: int, num_steps: int = 28, steps_done: int = 0) -> Route:
    route = replace(layout, num_steps=num_steps, split="balanced").route(clip)
    return route.resumed(steps_done) if steps_done else route


def _ends(spans: list[Span]) -> dict[int, float]:
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.action.clip] = max(ends.get(span.action.clip, 0.0), span.end)
    return ends


def _clips(routes: list[Route], costs: Costs = COSTS) -> list[ClipAhead]:
    return [ClipAhead(id=str(route.clip), route=route, costs=costs) for route in routes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_equals_the_replay_of_the_action_lists(layout: Layout) -> None:
    steps = [28, 10, 14, 28, 35, 7, 28, 21, 28, 28]
    routes = [_route(layout, clip, num_steps) for clip, num_steps in enumerate(steps)]
    expected = _ends(replay(build_schedule(routes, layout.world_size), COSTS))
    found = estimate(_clips(routes), delay=3.0)
    assert [found[str(clip)].place for clip in range(len(steps))] == list(range(len(steps)))
    for clip, end in expected.items():
        assert found[str(clip)].eta_seconds == pytest.approx(3.0 + end)


def test_clips_at_work_have_no_place_and_only_their_rest_counts() -> None:
    clips = [
        ClipAhead(id="decoding", route=_route(LAYOUTS[1], 0, 28, 28), costs=COSTS, has_begun=True),
        ClipAhead(
            id="half",
            route=_route(LAYOUTS[1], 1, 28, 14),
            costs=COSTS,
            has_begun=True,
            begun_seconds=0.25,
        ),
        ClipAhead(id="next", route=_route(LAYOUTS[1], 2), costs=COSTS),
        ClipAhead(id="resumed", route=_route(LAYOUTS[1], 3, 28, 24), costs=COSTS),
    ]
    found = estimate(clips)
    assert found["decoding"] == Estimate(None, 4.0)
    # 13.75 s of steps on four ranks, three transfers, the decode.
    assert found["half"].place is None
    assert found["half"].eta_seconds == pytest.approx(13.75 + 0.3 + 4)
    assert found["next"].place == 0
    assert found["next"].eta_seconds == pytest.approx(0.5 + 28 + 0.6 + 4)
    assert found["resumed"].place == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_long_queue_is_extrapolated_closely(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, replayed = random.Random(0), eta.MAX_REPLAYED
    steps = [chance.choice([28, 14, 35]) for _ in range(2 * replayed)]
    routes = [_route(layout, clip, num_steps) for clip, num_steps in enumerate(steps)]
    found = estimate(_clips(routes))
    monkeypatch.setattr(eta, "MAX_REPLAYED", 2 * replayed)
    whole = estimate(_clips(routes))
    for clip in (str(replayed), str(2 * replayed - 1)):
        assert found[clip].eta_seconds == pytest.approx(whole[clip].eta_seconds, rel=0.03)


def test_the_servers_of_a_fleet_begin_as_many_clips_at_a_time(tmp_path: Path) -> None:
    with closing(JobQueue(tmp_path)) as store:
        ids = [store.add(dummy_job(seed), max_open=None).id for seed in range(7)]
        assert store.take_next() is not None
        feeder: Any = SimpleNamespace(clips=list, preparing=None, num_free=1)
        costs: Any = MeasuredCosts(Costs(step_seconds=1.0), STORED)
        etas = JobEstimates(dummy_config(1), store, feeder, costs, lambda: 0.0)
        etas.others = lambda: 2
        found = etas.all()
    assert [found[id].place for id in ids] == list(range(7))
    turns = [1, 1, 1, 2, 2, 2]  # the first one is taken
    steps = STORED.num_inference_steps
    expected = [steps] + [steps + turn * steps for turn in turns]
    assert [found[id].eta_seconds for id in ids] == pytest.approx(expected)


# --- measured costs -------------------------------------------------------------------------------

SAMPLING = SvdSampling(num_frames=25)
HALF = replace(SAMPLING, width=512)


def _step(seconds: float) -> StepDone:
    return StepDone(clip=0, step=1, seconds=seconds)


def test_before_a_measurement_the_preset_is_scaled_by_size() -> None:
    costs_of = MeasuredCosts(None, HALF)
    preset = PRESETS["svd-xt-a100"]
    assert costs_of.costs(SAMPLING) == preset
    assert costs_of.costs(HALF).step_on(0) == pytest.approx(preset.step_on(0) / 2)


def test_what_is_not_measured_is_scaled_by_the_time_of_a_step() -> None:
    costs_of = MeasuredCosts(Costs(step_seconds=2.0, decode_seconds=6.0), SAMPLING)
    costs_of.add(_step(9.0), SAMPLING)
    assert costs_of.costs(SAMPLING).step_on(0) == 9.0, "the only one, though the rank warms up"
    for seconds in (1.0, 1.0, 9.0):
        costs_of.add(_step(seconds), SAMPLING)
    costs = costs_of.costs(SAMPLING)
    assert (costs.step_on(0), costs.decode_on(0)) == (1.0, 3.0)
    for event in (
        ActionDone(action="DECODE c0 @28", start=1.0, end=5.0, waited=0.0),
        TransferDone(
            direction="recv", clip=0, next_step=7, peer=0, num_bytes=1, seconds=0.5, end=1.0
        ),
    ):
        costs_of.add(event, SAMPLING)
    costs = costs_of.costs(SAMPLING)
    assert (costs.decode_on(0), costs.transfer(0, 1)) == (4.0, 0.5)
    assert costs_of.costs(HALF) == replace(costs, step_seconds=0.5, decode_seconds=2.0)


def test_each_size_has_its_own_and_the_newest_counts_for_others() -> None:
    costs_of = MeasuredCosts(None, SAMPLING)
    for width in range(64, 64 + 8 * 50, 8):
        costs_of.add(_step(float(width)), replace(SAMPLING, width=width))
    assert costs_of.costs(replace(SAMPLING, width=448)).step_on(0) == 448
    assert costs_of.costs(replace(SAMPLING, width=64)).step_on(0) == pytest.approx(64)
    assert len(costs_of._samples) == 32
