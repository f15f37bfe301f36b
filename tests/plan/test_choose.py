"""The layout that `auto` chooses, its reason, and the comparison of layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.choose import choose_layout, compare_layouts
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import forecast_layout
from svdpp.plan.layout import Layout
from svdpp.plan.split import divisors
from tests.plan.plans import costs, memory

A100 = PRESETS["svd-xt-a100"]
WITH_MEMORY = replace(A100, **memory((1.5, 3.0, 0.5), (1.0, 6.0, 8.0)))


def choose(**options: Any) -> tuple[Layout, str]:
    choice = choose_layout(
        **{"num_steps": 25, "world_size": 8, "num_clips": 80, "costs": A100, **options}
    )
    return choice.layout, choice.reason


def test_equal_devices_with_room_for_all_are_data_parallel() -> None:
    layout, reason = choose()

    assert str(layout) == "data parallel"
    assert reason == (
        "data parallel: the next best, 4 replicas of 2 ranks, alternating, takes 5.6% longer for "
        "80 clips"
    )


def test_where_memory_is_short_decode_gets_ranks_of_its_own() -> None:
    """All parts on one rank need 13 GiB, steps and decode together 11.5."""
    layout, reason = choose(costs=WITH_MEMORY, memory_gib=(11.0,) * 8)

    assert str(layout) == "1 replica of 8 ranks, balanced"
    assert max(peak or 99 for peak in layout.peak_gib) <= 11
    assert not layout.roles[7].denoise
    assert reason.endswith("longer for 80 clips; 7 of 9 layouts need more memory")


def test_devices_of_unequal_speed_share_replicas() -> None:
    costs = replace(A100, step_seconds=(1.0,) * 4 + (2.0,) * 4)
    layout, reason = choose(costs=costs)

    assert layout.replica_size > 1
    assert layout.split == "alternating"
    assert "the next best" in reason


def test_one_rank_has_no_choice() -> None:
    assert choose(world_size=1)[1] == "one rank: no other layout is possible"


def test_memory_that_nothing_fits() -> None:
    with pytest.raises(RequestError) as caught:
        choose(costs=WITH_MEMORY, memory_gib=(8.0,) * 8)

    assert caught.value.message == (
        "no layout of 8 ranks fits in 8 GiB a rank: the smallest one needs 10.5"
    )


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 20), costs)
@settings(max_examples=50)
def test_nothing_simple_is_better(
    num_steps: int, world_size: int, num_clips: int, costs: Costs
) -> None:
    counts = {"num_steps": num_steps, "world_size": world_size, "costs": costs}
    chosen, reason = choose(**counts, num_clips=num_clips)

    makespan = forecast_layout(chosen, num_clips).makespan
    for replicas in divisors(world_size):
        for split in ("balanced", "alternating"):
            other = Layout(**counts, replicas=replicas, split=split)  # type: ignore[arg-type]
            if other.replica_size <= num_steps + 2:
                assert makespan <= forecast_layout(other, num_clips).makespan * 1.002
    assert "\n" not in reason
    assert reason.startswith(f"{chosen}: ")


def test_a_layout_that_does_not_fit_is_shown_with_a_note() -> None:
    rows = compare_layouts(
        num_steps=25,
        world_size=8,
        num_clips=16,
        costs=WITH_MEMORY,
        memory_gib=(11.0,) * 8,
    )
    notes = {row.name: row.note for row in rows}

    assert notes["data parallel"] == "rank 0 needs 13 GiB and has 11"
    assert notes["alternating"] == ""


STEPS_ONLY = Costs()
BOTH = "a clip takes {} s and {} {} s, with {} {} s and {} s"


@pytest.mark.parametrize(
    ("options", "layout", "reason"),
    [
        (  # fewer clips than ranks
            {"num_clips": 3, "pairs": True, "sooner": True},
            "data parallel of pairs",
            BOTH.format("18.41", "3 clips", "18.41", "data parallel", "32.15", "32.15"),
        ),
        (  # of a long queue the rate decides
            {"pairs": True},
            "data parallel",
            BOTH.format("32.15", "80 clips", "321.5", "data parallel of pairs", "18.41", "368.2"),
        ),
        (  # so much of the rate is not given up: pairs would have 0.87 of it
            {"pairs": True, "sooner": True},
            "data parallel",
            BOTH.format("32.15", "80 clips", "321.5", "data parallel of pairs", "18.41", "368.2"),
        ),
        (
            {"pairs": True, "sooner": True, "costs": STEPS_ONLY},
            "data parallel of pairs",
            BOTH.format("12.5", "80 clips", "250", "data parallel", "25", "250"),
        ),
        ({"pairs": True, "costs": STEPS_ONLY}, "data parallel", "80 clips 250 s, with"),
        ({"pairs": True, "world_size": 7}, "data parallel", "the next best"),
        (  # only pairs can divide these steps evenly
            {"pairs": True, "fixed": {"replicas": 1}, "num_steps": 28},
            "1 replica of 4 pairs, uniform",
            "no other layout is possible",
        ),
        (
            {
                **{"pairs": True, "sooner": True, "costs": STEPS_ONLY, "num_steps": 24},
                "fixed": {"replicas": 2, "split": "balanced"},
            },
            "2 replicas of 2 pairs, balanced",
            "a clip takes 12 s and 80 clips 246 s, with 2 replicas of 4 ranks, balanced 24 s",
        ),
    ],
)
def test_pairs_are_chosen_for_latency(options: dict[str, Any], layout: str, reason: str) -> None:
    chosen, why = choose(**options)
    assert str(chosen) == layout
    assert reason in why


def test_what_is_fixed_and_impossible_is_said_of_single_ranks() -> None:
    with pytest.raises(RequestError, match="over 8 ranks"):
        choose(pairs=True, fixed={"replicas": 1})


HOSTS = replace(A100, ranks_per_host=4, inter_host_transfer_seconds=None)


def test_what_costs_do_not_tell_of_hosts_is_left_out_and_said() -> None:
    """The presets have no time for transfers between hosts."""
    layout, reason = choose(costs=HOSTS)
    assert str(layout) == "data parallel"
    # Replicas of 8, balanced and alternating, with 1 and 2 decoders; shorter ones fit on one host.
    assert reason.endswith(
        "4 of 9 layouts have transfers between hosts, whose time the costs do not give: "
        "set --inter-host-transfer-seconds"
    )
    assert "hosts" not in choose(costs=replace(HOSTS, inter_host_transfer_seconds=0.1))[1]


def test_where_only_layouts_over_hosts_fit_the_forecast_says_what_lacks() -> None:
    costs = replace(WITH_MEMORY, ranks_per_host=4)
    with pytest.raises(RequestError, match="do not give the time of a transfer between hosts"):
        choose(costs=costs, memory_gib=(11.0,) * 8)
