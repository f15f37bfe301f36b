"""The ETA of a clip is that of a replay of the action lists, also in the middle of a run."""

from __future__ import annotations

import random
import time

import pytest

from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Span, replay
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route, build_schedule
from svdpp.serve.eta import MAX_REPLAYED, ClipAhead, Estimate, Layouts, estimate

COSTS = Costs(step_seconds=1.0, encode_seconds=0.5, decode_seconds=4.0, transfer_seconds=0.1)
LAYOUTS = [
    Layout(num_steps=28, world_size=4, split="dithered", costs=COSTS),
    Layout(num_steps=28, world_size=7, split="uniform", costs=COSTS),
    Layout(num_steps=28, world_size=4, split="dithered", decoders=2, costs=COSTS),
    Layout(num_steps=28, world_size=6, split="balanced", replicas=2, costs=COSTS),
    Layout(num_steps=28, world_size=3, replicas=3, costs=COSTS),
]


def _ends(spans: list[Span]) -> dict[int, float]:
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.action.clip] = max(ends.get(span.action.clip, 0.0), span.end)
    return ends


def _clips(routes: list[Route], costs: Costs = COSTS) -> list[ClipAhead]:
    return [ClipAhead(id=str(route.clip), route=route, costs=costs) for route in routes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_equals_the_replay_of_the_action_lists(layout: Layout) -> None:
    layouts = Layouts(layout)
    steps = [28, 10, 14, 28, 35, 7, 28, 21, 28, 28]
    routes = [layouts.route(clip, num_steps) for clip, num_steps in enumerate(steps)]
    expected = _ends(replay(build_schedule(routes, layout.world_size), COSTS))
    found = estimate(_clips(routes), delay=3.0)
    assert [found[str(clip)].place for clip in range(len(steps))] == list(range(len(steps)))
    for clip, end in expected.items():
        assert found[str(clip)].eta_seconds == pytest.approx(3.0 + end)


def test_clips_at_work_have_no_place_and_only_their_rest_counts() -> None:
    layouts = Layouts(LAYOUTS[1])
    clips = [
        ClipAhead(id="decoding", route=layouts.route(0, 28, 28), costs=COSTS, has_begun=True),
        ClipAhead(
            id="half",
            route=layouts.route(1, 28, 14),
            costs=COSTS,
            has_begun=True,
            begun_seconds=0.25,
        ),
        ClipAhead(id="next", route=layouts.route(2, 28), costs=COSTS),
        ClipAhead(id="resumed", route=layouts.route(3, 28, 24), costs=COSTS),
    ]
    found = estimate(clips)
    assert found["decoding"] == Estimate(None, 4.0)
    # 13.75 s of steps on four ranks, three transfers, the decode.
    assert found["half"].place is None
    assert found["half"].eta_seconds == pytest.approx(13.75 + 0.3 + 4)
    assert found["next"].place == 0
    assert found["next"].eta_seconds == pytest.approx(0.5 + 28 + 0.6 + 4)
    assert found["resumed"].place == 1


def test_larger_clips_take_longer() -> None:
    layouts = Layouts(LAYOUTS[0])
    small, large = (
        ClipAhead(id=name, route=layouts.route(0, 28), costs=COSTS.scaled(pace))
        for name, pace in (("small", 1.0), ("large", 4.0))
    )
    assert estimate([large])["large"].eta_seconds == pytest.approx(
        4 * estimate([small])["small"].eta_seconds, rel=0.05
    )


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_long_queue_is_extrapolated_closely(layout: Layout) -> None:
    layouts = Layouts(layout)
    chance = random.Random(0)
    steps = [chance.choice([28, 14, 35]) for _ in range(2 * MAX_REPLAYED)]
    routes = [layouts.route(clip, num_steps) for clip, num_steps in enumerate(steps)]
    expected = _ends(replay(build_schedule(routes, layout.world_size), COSTS))
    found = estimate(_clips(routes))
    for clip in (MAX_REPLAYED, 2 * MAX_REPLAYED - 1):
        assert found[str(clip)].eta_seconds == pytest.approx(expected[clip], rel=0.03)


def test_no_clip_no_estimate() -> None:
    assert estimate([]) == {}


@pytest.mark.long
def test_an_estimate_of_a_long_queue_is_quick() -> None:
    layouts = Layouts(LAYOUTS[1])
    seconds = []
    for _ in range(5):
        begun = time.thread_time()
        estimate(_clips([layouts.route(clip, 28) for clip in range(2000)]))
        seconds.append(time.thread_time() - begun)
    print(f"2000 clips on 7 ranks: {1000 * min(seconds):.1f} ms")
    assert min(seconds) < 0.05
