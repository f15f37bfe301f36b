"""The replay equals a closed form, the recurrence the replay; lists that stop; sums; the grid."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.actions import Action, Kind, Route, Schedule, build_schedule
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import (
    DeadlockError,
    Span,
    clip_sign,
    draw_grid,
    forecast_layout,
    replay,
    summarise,
)
from svdpp.plan.layout import Layout
from tests.plan.plans import costs, layouts, route_lists, uniform_layouts


@given(uniform_layouts(), st.integers(1, 12), costs)
def test_makespan_with_all_costs(layout: Layout, num_clips: int, costs: Costs) -> None:
    """A flow shop of equal clips is as fast as its slowest stage; transfers count as stages."""
    world_size = layout.world_size
    stages = [layout.num_steps // world_size * costs.step_on(0)] * world_size
    stages[0] += costs.encode_on(0)
    stages[-1] += costs.decode_on(0) if layout.decodes else 0.0
    transfers = [costs.transfer_seconds] * (world_size - 1)
    first, pace = sum(stages) + sum(transfers), max(stages + transfers)
    makespan = first + (num_clips - 1) * pace
    result = summarise(replay(layout.schedule(num_clips), costs), world_size)

    assert result.clips == num_clips
    assert result.first_clip == first
    assert result.makespan == makespan
    assert result.seconds_per_clip == (pace if num_clips > 1 else first)
    busy = num_clips * sum(stages)
    assert result.bubble == pytest.approx(1 - busy / (makespan * world_size), abs=1e-12)
    assert 0 <= result.bubble < 1


@given(route_lists(), costs)
def test_a_rank_does_one_thing_at_a_time_in_the_order_of_its_list(
    case: tuple[list[Route], int], costs: Costs
) -> None:
    schedule = build_schedule(*case)
    spans = replay(schedule, costs)
    for rank, rank_actions in enumerate(schedule):
        own = [span for span in spans if span.rank == rank]
        assert [span.action for span in own] == [a for a in rank_actions if a.is_compute]
        for before, after in itertools.pairwise(own):
            assert before.end <= after.start
        for span in own:
            assert span.end - span.start == costs.of(span.action, span.rank)


peers = st.integers(0, 2)
small = st.integers(0, 2)
wild_actions = st.one_of(
    st.builds(Action.at, st.just(Kind.ENCODE), small, st.just(0)),
    st.builds(Action, st.just(Kind.DENOISE), small, small, small),
    st.builds(Action.at, st.sampled_from([Kind.RECV, Kind.SEND]), small, small, peers),
    st.builds(Action.at, st.just(Kind.FINISH), small, small),
)


@settings(max_examples=300)
@given(st.lists(st.lists(wild_actions, max_size=6), min_size=3, max_size=3))
def test_wild_lists_end_in_spans_or_a_deadlock(lists: list[list[Action]]) -> None:
    """No list gives an endless loop or another exception."""
    try:
        spans = replay(tuple(map(tuple, lists)), Costs(step_seconds=1))
    except DeadlockError:
        return
    assert len(spans) == sum(a.is_compute for rank_actions in lists for a in rank_actions)


# --- lists that cannot be performed -------------------------------------------------------------


HELD = "ENCODE c0 @0 | DENOISE c0 0:2 | SEND c0 @2 >1"
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
    "rank 0 to 1: .*c0 @2": (HELD, "RECV c1 @2 <0"),
    "rank 0 to 1: .*c0 @2.*": (HELD, "RECV c0 @1 <0"),
}


@pytest.mark.parametrize("words", DEADLOCKS)
def test_lists_that_cannot_be_performed_name_where_they_stop(words: str) -> None:
    schedule: Schedule = tuple(
        tuple(map(Action.parse, filter(None, text.split(" | ")))) for text in DEADLOCKS[words]
    )
    with pytest.raises(DeadlockError, match=words):
        replay(schedule, Costs())


# --- summaries ------------------------------------------------------------------------------------


def at(clip: int, start: float, end: float, rank: int = 0) -> Span:
    return Span(rank, Action(Kind.DENOISE, clip, 0, 1), start, end)


@pytest.mark.parametrize(
    ("ends", "seconds_per_clip"),
    [
        ([10], 10),
        ([10, 13], 3),
        ([10, 13, 14], (14 - 10) / 2),
        ([10, 13, 14, 20], (20 - 13) / 2),
        ([10, 13, 14, 20, 30], (30 - 13) / 3),
    ],
    ids=str,
)
def test_cadence_is_the_mean_over_the_second_half(
    ends: list[float], seconds_per_clip: float
) -> None:
    """If clips finish at 10, 13, 14 and 20, the last two took 1 and 6: 3.5 each."""
    spans = [at(clip, 0, end) for clip, end in enumerate(ends)]

    assert summarise(spans, len(ends)).seconds_per_clip == seconds_per_clip


@pytest.mark.parametrize("num_clips", range(1, 40))
def test_cadence_of_groups_does_not_depend_on_where_the_half_lies(num_clips: int) -> None:
    """Data parallel over 7 ranks: seven clips every 28 steps, so one every 4."""
    schedule = Layout(num_steps=28, world_size=7, replicas=7).schedule(num_clips)
    result = summarise(replay(schedule, Costs()), 7)

    assert result.seconds_per_clip == (4 if num_clips >= 7 else 28 / num_clips)


def test_a_clip_is_not_there_before_those_before_it() -> None:
    """Two ranks alternate, one of half the speed: the slower one sets the rate."""
    spans = [at(clip, 0, 10 * (clip // 2 + 1) * (clip % 2 + 1), clip % 2) for clip in range(8)]
    result = summarise(spans, 2)

    assert (result.makespan, result.seconds_per_clip, result.first_clip) == (80, 10, 10)


def test_jitter_is_the_spread_of_the_same_gaps() -> None:
    def jitter(ends: list[float]) -> float:
        return summarise([at(clip, 0, end) for clip, end in enumerate(ends)], 1).jitter

    assert jitter([10, 20, 30, 40]) == 0
    assert jitter([10, 20, 23, 30]) == 2  # gaps of 3 and 7


def test_measured_times_may_begin_anywhere() -> None:
    spans = [at(0, 100, 104), at(1, 104, 106, rank=1), at(1, 105, 107)]
    result = summarise(spans, 2)

    assert (result.makespan, result.first_clip, result.seconds_per_clip) == (7, 4, 3)
    assert result.latency == (4 + 3) / 2, "from a clip's own beginning"
    assert result.bubble == pytest.approx(1 - 8 / 14)


# --- the recurrence -------------------------------------------------------------------------------

A100 = PRESETS["svd-xt-a100"]


# The decode takes no time, and ends with the step before it, on another rank.
@example(
    Layout(
        num_steps=1, world_size=4, split="alternating", replicas=2, costs=Costs(step_seconds=0.25)
    ),
    3,
)
# Clips that skip different ranks, and ranks that help to decode them.
@example(
    Layout(
        num_steps=4,
        world_size=6,
        split="alternating",
        costs=Costs(step_seconds=(0.5, 0.5, 0.5, 0.5, 1.0, 0.5)),
        expert_boundary=1,
        decode_ranks=3,
        chunks=(8, 4, 4),
    ),
    5,
)
@given(layouts(pairs=True), st.integers(1, 20))
def test_a_layouts_forecast_is_that_of_its_replay(layout: Layout, num_clips: int) -> None:
    layout = replace(layout, decodes=True)
    schedule = layout.schedule(num_clips)
    replayed = summarise(replay(schedule, layout.costs), layout.world_size)

    for name, value in vars(forecast_layout(layout, num_clips)).items():
        # Sums of floats in another order differ in the last bits.
        assert value == pytest.approx(getattr(replayed, name), rel=1e-9, abs=1e-6), name


def share_of_data_parallel(layout: Layout) -> float:
    """Steady throughput, relative to data parallel on as many devices."""
    num_clips = 60 * layout.world_size
    whole = Layout(
        num_steps=layout.num_steps,
        world_size=layout.world_size,
        replicas=layout.world_size,
        costs=layout.costs,
    )
    ours, theirs = forecast_layout(layout, num_clips), forecast_layout(whole, num_clips)
    clip = A100.encode_on(0) + layout.num_steps * A100.step_on(0) + A100.decode_on(0)
    assert theirs.seconds_per_clip == pytest.approx(clip / layout.world_size)
    return theirs.seconds_per_clip / ours.seconds_per_clip


@pytest.mark.parametrize("num_steps", [25, 28, 30])
@pytest.mark.parametrize(("world_size", "decoders"), [(2, 1), (4, 1), (7, 1), (8, 2)])
def test_alternating_is_as_fast_as_data_parallel(
    num_steps: int, world_size: int, decoders: int
) -> None:
    layout = Layout(
        num_steps=num_steps,
        world_size=world_size,
        split="alternating",
        decoders=decoders,
        costs=A100,
    )
    assert 0.99 <= share_of_data_parallel(layout) <= 1.001


def test_a_slow_rank_gets_less() -> None:
    """With two ranks of twice the speed, the rate is 1.5 times that of equal ranges."""
    costs = Costs(step_seconds=(1.0, 1.0, 2.0, 2.0))
    alternating = Layout(num_steps=30, world_size=4, split="alternating", costs=costs)
    forecast = forecast_layout(alternating, 200)

    assert forecast.seconds_per_clip == pytest.approx(30 / (1 + 1 + 0.5 + 0.5), rel=0.01)
    assert [share.mean_steps for share in alternating.all_shares] == pytest.approx([10, 10, 5, 5])
    data_parallel = Layout(num_steps=30, world_size=4, replicas=4, costs=costs)
    assert forecast_layout(data_parallel, 200).seconds_per_clip == pytest.approx(15)


def test_a_transfer_between_hosts_that_nobody_measured_is_no_guess() -> None:
    costs = Costs(decode_seconds=2.0, ranks_per_host=4)
    layout = Layout(num_steps=16, world_size=8, costs=costs)
    with pytest.raises(RequestError, match=r"between hosts \(rank 3 to rank 4\)") as caught:
        forecast_layout(layout, 4)
    assert "--inter-host-transfer-seconds SECONDS" in caught.value.hint
    assert forecast_layout(replace(layout, replicas=2), 4).clips == 4, "these need none"


@pytest.mark.long
def test_the_time_of_a_forecast_grows_with_its_clips() -> None:
    """Not with clips times ranks, nor with their square: four times the clips, a few times as long.

    4096 ranks in replicas and 100,000 clips take some seconds.
    """
    layout = Layout(num_steps=28, world_size=4096, split="alternating", replicas=1024, costs=A100)
    seconds = []
    for clips in (25_000, 100_000):
        begun = time.process_time()
        forecast = forecast_layout(layout, clips)
        seconds.append(time.process_time() - begun)

    assert seconds[1] < 10 * seconds[0]
    assert forecast.clips == 100_000


def test_what_would_take_minutes_is_refused() -> None:
    layout = Layout(num_steps=28, world_size=4096, split="alternating")
    with pytest.raises(RequestError) as caught:
        forecast_layout(layout, 100_000)

    assert caught.value.message == (
        "100000 clips on 4096 ranks in replicas of 4096 are too many to forecast"
    )
    assert caught.value.hint == "use --clips 1220 or fewer: the rate is the same"


# --- the grid ------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent.parent / "golden"
num_clips = st.integers(1, 12)


def grid(layout: Layout, clips: int, costs: Costs | None = None, **options: Any) -> list[str]:
    spans = replay(layout.schedule(clips), costs or Costs())
    return draw_grid(spans, layout.world_size, **options)


@pytest.mark.parametrize(
    ("name", "num_clips", "costs", "marks"),
    [
        ("grid_w4_n28_m8.txt", 8, Costs(), {}),
        (
            "grid_w4_n28_m3_all_costs.txt",
            3,
            Costs(step_seconds=1, encode_seconds=2, decode_seconds=4, transfer_seconds=1),
            {3: "rank 3 died here"},
        ),
    ],
)
def test_golden_text(name: str, num_clips: int, costs: Costs, marks: dict[int, str]) -> None:
    lines = grid(Layout(num_steps=28, world_size=4), num_clips, costs, width=80, marks=marks)
    assert "\n".join(lines) + "\n" == (GOLDEN / name).read_text(encoding="utf-8")


@given(uniform_layouts(), num_clips)
def test_every_step_has_a_column_where_there_is_room(layout: Layout, num_clips: int) -> None:
    """With steps of equal length, each column shows exactly what the replay gives."""
    per_rank = layout.num_steps // layout.world_size
    for rank, line in enumerate(grid(layout, num_clips, width=10_000)):
        row = line.partition("|")[2].removesuffix("|")
        busy = "".join(clip_sign(clip) * per_rank for clip in range(num_clips))
        before = "." * (rank * per_rank)
        after = "." * ((layout.world_size - 1 - rank) * per_rank)
        assert row == before + busy + after


def test_a_mark_needs_no_work_done() -> None:
    assert draw_grid([], 2, width=6, marks={1: "died here"}) == [
        "rank 0 |......|",
        "rank 1 |......|  <-- died here",
    ]


@pytest.mark.parametrize("begin", [0, 1000])
def test_what_fills_most_of_a_column_is_shown_from_the_first_span_on(begin: float) -> None:
    spans = [
        Span(0, Action.at(Kind.ENCODE, 0, 0), begin, begin + 2.5),
        Span(0, Action(Kind.DENOISE, 0, 0, 2), begin + 2.5, begin + 6.5),
        Span(0, Action.at(Kind.DECODE, 0, 2), begin + 8, begin + 10),
    ]
    assert draw_grid(spans, 1, width=80) == ["rank 0 |<00.>|"]
