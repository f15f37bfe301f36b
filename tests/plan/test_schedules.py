"""Action lists: golden texts, links, checks, simulation, forecast, and grid."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan import forecast
from svdpp.plan.actions import (
    Action,
    Kind,
    Schedule,
    build_schedule,
    connect_rounds,
)
from svdpp.plan.costs import PRESETS, CostModel
from svdpp.plan.forecast import (
    DeadlockError,
    Span,
    draw_grid,
    forecast_layout,
    simulate_schedule,
    summarise,
)
from svdpp.plan.layout import Layout
from tests.support.plans import check_schedule, costs, layouts

GOLDEN = Path(__file__).parent.parent / "golden"


def layout(num_steps: int, world_size: int, **options: Any) -> Layout:
    return Layout(num_steps=num_steps, world_size=world_size, **options)


def last_resumed(layout: Layout, num_clips: int, at: int) -> Schedule:
    *routes, last = map(layout.route, range(num_clips))
    return build_schedule([*routes, last.resumed(at)], layout.world_size)


PAIRS = layout(4, 4, cfg_parallel_size=2)
PAIR = layout(4, 2, cfg_parallel_size=2, decode_parallel_size=2, chunks=(8, 8, 8, 1))
GOLDEN_SCHEDULES = {
    "schedule_w4_n28_m3.txt": layout(28, 4).schedule(3),
    "schedule_w2_n4_m2_no_decode.txt": layout(4, 2, decodes=False).schedule(2),
    "schedule_data_parallel_w2_n4_m3.txt": layout(4, 2, data_parallel_size=2).schedule(3),
    # A decode takes as long as 2.5 steps. A third of 10.5 steps is 3.5, so the cuts are 3.5 and 7,
    # rounded differently for each clip.
    "schedule_alternating_w3_n8_m4.txt": layout(
        8, 3, split="alternating", costs=CostModel(decode_seconds=2.5)
    ).schedule(4),
    # Rank 0 starts all clips; ranks 1 and 2 alternate to finish them.
    "schedule_two_decoders_w3_n8_m4.txt": layout(
        8, 3, split="balanced", num_decoders=2, costs=CostModel(decode_seconds=4)
    ).schedule(4),
    # Ranks 0 and 1 are a CFG pair, and so are ranks 2 and 3. The last clip resumes after three
    # steps.
    "schedule_pairs_w4_n4_m3.txt": last_resumed(PAIRS, 3, 3),
    # Both ranks of a CFG pair decode. The last clip resumes after its last step.
    "schedule_pair_decodes_w2_n4_m3.txt": last_resumed(PAIR, 3, 4),
    # All ranks decode. Ranks 0 and 1 decode between their steps of later clips.
    "schedule_decode_ranks_w3_n6_m4.txt": layout(
        6, 3, decode_parallel_size=3, chunks=(8, 8, 8)
    ).schedule(4),
}


@pytest.mark.parametrize("name", GOLDEN_SCHEDULES)
def test_golden_text(name: str) -> None:
    lines = [
        f"rank {rank}: {action}\n"
        for rank, rank_actions in enumerate(GOLDEN_SCHEDULES[name])
        for action in rank_actions
    ]
    assert "".join(lines) == (GOLDEN / name).read_text(encoding="utf-8")


@given(st.sets(st.tuples(*[st.integers(0, 9)] * 2).filter(lambda p: p[0] != p[1]), max_size=30))
def test_links_open_in_rounds_of_disjoint_pairs(links: set[tuple[int, int]]) -> None:
    rounds = connect_rounds(links)
    assert sorted(pair for each in rounds for pair in each) == sorted(links)
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(set(ranks)) == len(ranks)
    busiest = max((sum(rank in pair for pair in links) for rank in range(10)), default=0)
    assert len(rounds) <= max(0, 2 * busiest - 1)


@pytest.mark.parametrize(
    "schedule", [layout(4, 2).schedule(2), layout(4, 1).schedule(2), PAIRS.schedule(2)]
)
def test_the_check_catches_a_missing_or_doubled_action(schedule: Schedule) -> None:
    check_schedule(schedule, 4)
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            # A missing DECODE is allowed, because clips can end with their latents.
            for instead in ((action, action), *([()] * (action.kind is not Kind.DECODE))):
                broken = (*actions[:index], *instead, *actions[index + 1 :])
                with pytest.raises(AssertionError, match=r"clip|transfer"):
                    check_schedule((*schedule[:rank], broken, *schedule[rank + 1 :]), 4)


# --- the simulation -------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.integers(1, 12), costs)
def test_makespan_with_all_costs(
    world_size: int, per_rank: int, decodes: bool, num_clips: int, costs: CostModel
) -> None:
    """The makespan of equal clips depends on the slowest stage, as in a flow shop.

    Transfers count as stages too.
    """
    schedule = layout(world_size * per_rank, world_size, decodes=decodes).schedule(num_clips)
    stages = [per_rank * costs.step_on(0)] * world_size
    stages[0] += costs.encode_on(0)
    stages[-1] += costs.decode_on(0) * decodes
    transfers = [costs.transfer_seconds] * (world_size - 1)
    first, pace = sum(stages) + sum(transfers), max(stages + transfers)
    makespan = first + (num_clips - 1) * pace
    result = summarise(simulate_schedule(schedule, costs), world_size)

    assert result.clips == num_clips
    assert result.first_clip == first
    assert result.makespan == makespan
    assert result.seconds_per_clip == (pace if num_clips > 1 else first)
    busy = num_clips * sum(stages)
    assert result.bubble == pytest.approx(1 - busy / (makespan * world_size), abs=1e-12)
    assert 0 <= result.bubble < 1


@given(layouts(pairs=True), st.integers(1, 12))
def test_a_rank_does_one_thing_at_a_time_in_the_order_of_its_list(
    layout: Layout, num_clips: int
) -> None:
    schedule = layout.schedule(num_clips)
    spans = simulate_schedule(schedule, layout.costs)
    for rank, rank_actions in enumerate(schedule):
        own = [span for span in spans if span.rank == rank]
        assert tuple(Action.parse(str(action)) for action in rank_actions) == rank_actions
        work = [action for action in rank_actions if action.is_compute]
        assert [span.action for span in own if span.action.is_compute] == work
        for before, after in itertools.pairwise(own):
            assert before.end <= after.start
        for span in own:
            assert span.end == span.start + layout.costs.action_seconds(span.action, span.rank)


DEADLOCKS = {
    "^deadlock: rank 0 at DENOISE c1 2:4, rank 1 at DENOISE c0 0:4$": (
        "RECV c1 @2 <1 | DENOISE c1 2:4 | ENCODE c0 @0 | SEND c0 @0 >1",
        "RECV c0 @0 <0 | DENOISE c0 0:4 | ENCODE c1 @0 | SEND c1 @2 >0",
        "ENCODE c2 @0 | DENOISE c2 0:4",
    ),
    "rank 1 at DENOISE c0 2:4, rank 2 at DECODE c0 @4": (
        "ENCODE c0 @0",
        "RECV c0 @2 <0 | DENOISE c0 2:4 | SEND c0 @4 >2",
        "RECV c0 @4 <1 | DECODE c0 @4",
    ),
    "rank 0 at SEND c1 @0 >1": ("SEND c0 @0 >1 | SEND c1 @0 >1", ""),
    "rank 0 and rank 1 do not match: .*c0 @2": (
        "ENCODE c0 @0 | DENOISE c0 0:2 | SEND c0 @2 >1",
        "RECV c1 @2 <0",
    ),
}


@pytest.mark.parametrize("words", DEADLOCKS)
def test_lists_that_cannot_be_performed_name_where_they_stop(words: str) -> None:
    schedule: Schedule = tuple(
        tuple(map(Action.parse, filter(None, text.split(" | ")))) for text in DEADLOCKS[words]
    )
    with pytest.raises(DeadlockError, match=words):
        simulate_schedule(schedule, CostModel())


# --- summaries ------------------------------------------------------------------------------------


def at(clip: int, start: float, end: float, rank: int = 0) -> Span:
    return Span(rank, Action(Kind.DENOISE, clip, 0, 1), start, end)


@pytest.mark.parametrize(
    ("ends", "seconds_per_clip", "jitter"),
    [([10], 10, 0), ([10, 13], 3, 0), ([10, 13, 14], 2, 1), ([10, 13, 14, 20], 3.5, 2.5)],
)
def test_cadence_and_jitter_are_those_of_the_second_half(
    ends: list[float], seconds_per_clip: float, jitter: float
) -> None:
    """The seconds per clip and the jitter are those of the second half of the clips.

    If clips finish at 10, 13, 14 and 20 s, the last two took 1 s and 6 s, which is 3.5 s each.
    """
    result = summarise([at(clip, 0, end) for clip, end in enumerate(ends)], 1)
    assert (result.seconds_per_clip, result.jitter) == (seconds_per_clip, jitter)


def test_cadence_of_groups_does_not_depend_on_where_the_half_lies() -> None:
    """The rate of clips that finish in groups does not depend on where the second half begins.

    With data parallel over 7 ranks, seven clips finish every 28 steps, which is one every 4 steps.
    """
    for num_clips in range(1, 40):
        schedule = layout(28, 7, data_parallel_size=7).schedule(num_clips)
        result = summarise(simulate_schedule(schedule, CostModel()), 7)
        assert result.seconds_per_clip == (4 if num_clips >= 7 else 28 / num_clips)


def test_a_clip_is_not_there_before_those_before_it() -> None:
    """A clip counts as finished only when all earlier clips are.

    Two ranks alternate, and one has half the speed, so the slower one determines the rate.
    """
    spans = [at(clip, 0, 10 * (clip // 2 + 1) * (clip % 2 + 1), clip % 2) for clip in range(8)]
    result = summarise(spans, 2)

    assert (result.makespan, result.seconds_per_clip, result.first_clip) == (80, 10, 10)


def test_measured_times_may_begin_anywhere() -> None:
    spans = [at(0, 100, 104), at(1, 104, 106, rank=1), at(1, 105, 107)]
    result = summarise(spans, 2)

    assert (result.makespan, result.first_clip, result.seconds_per_clip) == (7, 4, 3)
    assert result.latency == (4 + 3) / 2, "from a clip's own beginning"
    assert result.bubble == pytest.approx(1 - 8 / 14)


# --- the forecast by a recurrence -----------------------------------------------------------------


# The decode takes no time, so it ends together with the step before it, on another rank.
@example(
    layout(1, 4, split="alternating", data_parallel_size=2, costs=CostModel(step_seconds=0.25)), 3
)
# The clips skip different ranks, and other ranks help to decode.
@example(
    layout(
        4,
        6,
        split="alternating",
        costs=CostModel(step_seconds=(0.5, 0.5, 0.5, 0.5, 1.0, 0.5)),
        expert_boundary=1,
        decode_parallel_size=3,
        chunks=(8, 4, 4),
    ),
    5,
)
@given(layouts(pairs=True), st.integers(1, 20))
def test_a_layouts_forecast_is_that_of_its_replay(layout: Layout, num_clips: int) -> None:
    layout = replace(layout, decodes=True)
    schedule = layout.schedule(num_clips)
    simulated = summarise(simulate_schedule(schedule, layout.costs), layout.world_size)

    for name, value in vars(forecast_layout(layout, num_clips)).items():
        # The two forecasts add floats in different orders, so the last bits differ.
        assert value == pytest.approx(getattr(simulated, name), rel=1e-9, abs=1e-6), name


@pytest.mark.parametrize("num_steps", [25, 28, 30])
@pytest.mark.parametrize(("world_size", "decoders"), [(2, 1), (4, 1), (7, 1), (8, 2)])
def test_alternating_is_as_fast_as_data_parallel(
    num_steps: int, world_size: int, decoders: int
) -> None:
    costs = PRESETS["svd-xt-a100"]
    options: dict[str, Any] = {"split": "alternating", "num_decoders": decoders, "costs": costs}
    times = forecast_layout(layout(num_steps, world_size, **options), 60 * world_size)
    clip = costs.encode_on(0) + num_steps * costs.step_on(0) + costs.decode_on(0)
    assert 0.99 <= clip / world_size / times.seconds_per_clip <= 1.001


def test_what_would_take_minutes_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        forecast_layout(layout(28, 4096, split="alternating"), 100_000)

    assert caught.value.message == (
        "100000 clips on 4096 ranks in replicas of 4096 are too many to forecast"
    )
    assert caught.value.hint == "use `clips` 512 or fewer, or use replicas with fewer ranks"


@pytest.mark.parametrize(
    "options",
    [
        {"split": "alternating"},
        {"split": "balanced", "num_decoders": 2},
        {"data_parallel_size": 3},
        {"data_parallel_size": 2, "split": "alternating"},
        {"split": "balanced", "decode_parallel_size": 3, "chunks": (8, 4, 4)},
    ],
)
def test_clips_beyond_those_computed_continue_at_the_same_rate(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = PRESETS["svd-xt-a100"]
    shape = layout(28, 6, costs=costs, **options)
    whole = forecast_layout(shape, 500)
    assert whole.computed_clips == 500

    monkeypatch.setattr(forecast, "MAX_VISITS", 600 * (20 if "chunks" in options else 1))
    extended = forecast_layout(shape, 500)

    assert extended.clips == 500
    assert extended.computed_clips < 500
    for name in ("makespan", "first_clip", "seconds_per_clip"):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.01), name
    assert extended.bubble == pytest.approx(whole.bubble, abs=0.01)


# --- the grid ------------------------------------------------------------------------------------


def test_the_grid_of_a_run_that_broke_off() -> None:
    costs = CostModel(step_seconds=1, encode_seconds=2, decode_seconds=4, transfer_seconds=1)
    spans = simulate_schedule(layout(28, 4).schedule(3), costs)
    lines = draw_grid(spans, 4, width=80, marks={3: "rank 3 died here"})
    golden = (GOLDEN / "grid_w4_n28_m3_all_costs.txt").read_text(encoding="utf-8")
    assert "\n".join(lines) + "\n" == golden
    assert draw_grid([], 2, width=6, marks={1: "died here"}) == [
        "rank 0 |......|",
        "rank 1 |......|  <-- died here",
    ]


def test_what_fills_most_of_a_column_is_shown_from_the_first_span_on() -> None:
    spans = [
        Span(0, Action.at(Kind.ENCODE, 0, 0), 1000, 1002.5),
        Span(0, Action(Kind.DENOISE, 0, 0, 2), 1002.5, 1006.5),
        Span(0, Action.at(Kind.DECODE, 0, 2), 1008, 1010),
    ]
    assert draw_grid(spans, 1, width=80) == ["rank 0 |<00.>|"]
