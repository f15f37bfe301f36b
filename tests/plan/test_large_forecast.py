"""The recurrence equals the replay; alternating ranges reach the rate of data parallel."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout
from tests.plan.plans import layouts

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


# --- throughput ---------------------------------------------------------------------------------


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
    assert [share.mean_steps for share in alternating.shares(0)] == pytest.approx([10, 10, 5, 5])
    data_parallel = Layout(num_steps=30, world_size=4, replicas=4, costs=costs)
    assert forecast_layout(data_parallel, 200).seconds_per_clip == pytest.approx(15)


def test_a_transfer_between_hosts_that_nobody_measured_is_no_guess() -> None:
    costs = Costs(decode_seconds=2.0, ranks_per_host=4)
    layout = Layout(num_steps=16, world_size=8, costs=costs)
    with pytest.raises(RequestError, match=r"between hosts \(rank 3 to rank 4\)") as caught:
        forecast_layout(layout, 4)
    assert "--inter-host-transfer-seconds SECONDS" in caught.value.hint
    assert forecast_layout(replace(layout, replicas=2), 4).clips == 4, "these need none"


# --- large worlds ---------------------------------------------------------------------------------


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
