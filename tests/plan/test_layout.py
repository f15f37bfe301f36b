"""Layouts: their schedules work, their cuts are optimal, invalid layouts are refused; `auto`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.actions import SENDS, Action, Kind, Schedule, build_schedule
from svdpp.plan.choose import choose_layout
from svdpp.plan.costs import PRESETS, CostModel
from svdpp.plan.forecast import forecast_layout, simulate_schedule
from svdpp.plan.layout import Layout, assign_replicas, divide_chunks
from svdpp.plan.roles import Roles
from svdpp.plan.split import (
    Stage,
    StageGroup,
    alternating_cuts,
    balanced_cuts,
    divisors,
    uniform_cuts,
)
from tests.support.plans import (
    WAN,
    check_receives,
    check_schedule,
    costs,
    layouts,
    memory,
    steps_in,
)

num_clips = st.integers(1, 20)


@pytest.mark.parametrize(
    ("chunks", "count", "sizes"),
    [
        ((8, 8, 8, 1), 2, [16, 9]),
        ((5,) * 5, 2, [10, 15]),  # the first of two equally good cuts
        ((8, 4, 4), 3, [8, 4, 4]),
        ((1, 1, 1, 97), 3, [2, 1, 97]),  # no part is empty
        ((1024,) * 4 + (256,), 2, [2048, 2304]),  # tiles in a row; the last one is narrow
        ((256, 128, 32, 16), 2, [256, 176]),
    ],
)
def test_chunks_are_divided_in_order_as_equally_as_possible(
    chunks: tuple[int, ...], count: int, sizes: list[int]
) -> None:
    parts = divide_chunks(chunks, count)
    assert [part.end - part.first for part in parts] == sizes
    assert [part.first for part in parts] == [0, *(part.end for part in parts)][:-1]
    assert {part.total for part in parts} == {sum(chunks)}


@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
@given(layouts(pairs=True), num_clips, st.data())
@settings(max_examples=200)
def test_any_layout_can_be_performed(
    is_resumed: bool, layout: Layout, clips: int, data: st.DataObject
) -> None:
    """The schedule of any layout does each step once and in order, without a deadlock.

    No rank posts too many receives. A rank needs only the roles that the layout gives it. If a
    replica has several ranks that do not share experts, a rank needs only one expert.
    """
    all_stages = is_resumed and data.draw(st.booleans())
    routes = [layout.route(clip, all_stages=all_stages) for clip in range(clips)]
    ats = [data.draw(st.integers(0, layout.num_steps)) if is_resumed else 0 for _ in routes]
    resumed = [route.resumed(at) if at else route for route, at in zip(routes, ats, strict=True)]
    schedule = build_schedule(resumed, layout.world_size)

    check_schedule(schedule, layout.num_steps)
    check_receives(schedule)
    simulate_schedule(schedule, layout.costs)
    loads = {
        act[1:3] for actions in schedule for act in actions if act.kind is Kind.LOAD_CHECKPOINT
    }
    assert loads == {(clip, at) for clip, at in enumerate(ats) if at}
    assert all_stages or talking(schedule) <= set(layout.links)
    assert talking(schedule, decode=True) <= set(layout.decode_links)
    for role, actions in zip(layout.roles, schedule, strict=True):
        assert set(used_roles(layout, actions).by_part()) <= set(role.by_part())
        assert role.denoise == bool(role.experts)
        if layout.separates_experts:
            assert len(role.experts) < 2
        elif layout.replica_size == 1 and layout.expert_boundary is not None:
            assert role.experts == {0, 1}


def talking(schedule: Schedule, *, decode: bool = False) -> set[tuple[int, int]]:
    return {
        (rank, action.peer)
        for rank, actions in enumerate(schedule)
        for action in actions
        if action.kind in SENDS and (action.part is not None) == decode
    }


def used_roles(layout: Layout, actions: Sequence[Action]) -> Roles:
    kinds = {action.kind for action in actions}
    boundary = layout.expert_boundary or layout.num_steps
    steps = [
        step
        for action in actions
        if action.kind is Kind.DENOISE
        for step in range(action.start, action.end)
    ]
    return Roles(
        encode=Kind.ENCODE in kinds,
        denoise=Kind.DENOISE in kinds,
        decode=Kind.DECODE in kinds,
        experts=frozenset(int(step >= boundary) for step in steps),
    )


@pytest.mark.slow
@given(layouts(pairs=True))
def test_links_and_roles_are_those_that_come_to_be_used(layout: Layout) -> None:
    """A layout's links and roles are those that many clips use.

    The alternating split is left out, because its rare cuts may not occur.
    """
    schedule = layout.schedule(60 * layout.data_parallel_size * layout.num_decoders)
    used = [used_roles(layout, actions) for actions in schedule]

    assert list(layout.links) == sorted(set(layout.links))
    if layout.split != "alternating":
        # Only resumed clips use these links, because they can start at a later pair.
        starts = {pair for pair in layout.pairs if layout.roles[pair[0]].denoise}
        assert talking(schedule) | starts == set(layout.links)
        assert list(layout.roles) == used


@given(layouts(pairs=True), num_clips)
def test_a_clip_has_the_ranks_of_its_turn_and_their_shares(layout: Layout, clips: int) -> None:
    """A clip's route has the ranks of its replica, with steps within each rank's share.

    The route skips ranks without steps, except the first and the last rank.
    """
    shares = {share.rank: share for share in layout.all_shares}
    assert sorted(shares) == list(range(layout.world_size))
    for clip in range(clips):
        route, index = layout.route(clip), clip // layout.data_parallel_size
        assert route == replace(layout).route(clip)
        own = layout.replica_ranks[clip % layout.data_parallel_size]
        ranks = [part.rank for part in route.ranges]
        assert set(ranks) <= set(own)
        assert ranks == sorted(ranks)
        assert (
            ranks[-1]
            == own[layout.replica_size - layout.num_decoders + index % layout.num_decoders]
        )
        if layout.num_stages > 1:
            assert ranks[0] == own[0]
        assert all(part.num_steps for part in route.ranges[1:-1])
        for part in route.ranges:
            assert shares[part.rank].start <= part.start <= part.end <= shares[part.rank].end


def test_peak_memory_follows_the_roles() -> None:
    costs = CostModel(decode_seconds=4, **memory((1, 3, 0.5), (1, 5, 9)))
    options: dict[str, Any] = {"num_steps": 12, "world_size": 4, "costs": costs}
    assert Layout(**options, split="balanced").peak_gib == (9, 8, 8, 9.5)
    assert Layout(**options, data_parallel_size=4).peak_gib == (13.5,) * 4
    assert Layout(num_steps=12, world_size=4).peak_gib == (None,) * 4


@pytest.mark.parametrize(
    ("world_size", "replica_size", "ranks_per_host", "replica_ranks"),
    [
        (8, 4, None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 8, 4, [tuple(range(8))]),
        (8, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # If the ranks were taken in order, two of these four replicas would span two hosts.
        (12, 3, 4, [(0, 1, 2), (3, 7, 11), (4, 5, 6), (8, 9, 10)]),
        (12, 6, 4, [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]),
    ],
)
def test_replicas_keep_to_a_host_where_they_can(
    world_size: int,
    replica_size: int,
    ranks_per_host: int | None,
    replica_ranks: list[tuple[int, ...]],
) -> None:
    assert list(assign_replicas(world_size, replica_size, ranks_per_host)) == replica_ranks


DIVISORS = "use a divisor: `replicas` 1, 2, 4, 8"
NOT_EQUAL = (
    "replicas of equal size cannot be formed: `replicas` is {}, and the number of ranks is 8"
)
EVENLY = "{} cannot be split evenly over {}"
EXPERTS = "13 high-noise and 27 low-noise steps"
OTHER_SPLITS = "use `split` balanced or `split` alternating"
RANGE = "`decoders` must be 1 to {}, the number of ranks of a replica, got {}"
BOUNDARY = "`expert_boundary` must be 1 or more and less than the number of steps (40), got {}"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"world_size": 0}, "the number of ranks must be 1 to 65536, got 0", ""),
        ({"data_parallel_size": 3}, NOT_EQUAL.format(3), DIVISORS),
        ({"data_parallel_size": 0}, NOT_EQUAL.format(0), DIVISORS),
        ({"num_decoders": 0}, RANGE.format(8, 0), ""),
        ({"num_decoders": 5, "data_parallel_size": 2}, RANGE.format(4, 5), ""),
        (
            {"split": "equal"},
            "`split` must be one of uniform, balanced, alternating, got 'equal'",
            "",
        ),
        (
            {"costs": CostModel(step_seconds=(1.0, 2.0))},
            "step_seconds has values for 2 ranks, but the run has 8",
            "use `world_size` 2, or use costs with one number for all ranks",
        ),
        (
            {"costs": CostModel(step_seconds=(1.0,))},
            "step_seconds has values for 1 rank, but the run has 8",
            "use `world_size` 1, or use costs with one number for all ranks",
        ),
        (
            {"num_steps": 1, "world_size": 2},
            "1 step cannot be split evenly over 2 ranks; the nearest step count that can is 2",
            "use `num_inference_steps` 2, or use `world_size` 1, or use `split` alternating",
        ),
        (
            {"costs": CostModel(ranks_per_host=3)},
            "the number of ranks (8) is not a multiple of the number of ranks on each host (3)",
            "use `hosts` 3x3, or use another `world_size`",
        ),
        (
            {"num_steps": 25, "num_decoders": 2},
            EVENLY.format("25 steps", "7 stages; the nearest step counts that can are 21 and 28"),
            "use `num_inference_steps` 21 or `num_inference_steps` 28, or use `split` alternating",
        ),
        (
            {"num_steps": 25},
            EVENLY.format("25 steps", "8 ranks; the nearest step counts that can are 24 and 32"),
            "use `num_inference_steps` 24 or `num_inference_steps` 32, or use `world_size` 5, "
            "or use `split` alternating",
        ),
        (
            {"num_steps": 4},
            EVENLY.format("4 steps", "8 ranks; the nearest step count that can is 8"),
            "use `num_inference_steps` 8, or use `world_size` 4, or use `split` alternating",
        ),
        ({**WAN, "expert_boundary": 40}, BOUNDARY.format(40), ""),
        ({**WAN, "expert_boundary": 0, "data_parallel_size": 8}, BOUNDARY.format(0), ""),
        (WAN, EVENLY.format(EXPERTS, "8 stages with one expert each"), OTHER_SPLITS),
        (
            {**WAN, "num_decoders": 4, "data_parallel_size": 2, "split": "alternating"},
            "`decoders` must be 1 to 3, got 4: all decoders hold the low-noise expert, so another "
            "rank must hold the high-noise expert",
            "use `layout` data-parallel, or use `share_experts`: a rank can then hold both experts",
        ),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], message: str, hint: str) -> None:
    options = {"num_steps": 24, "world_size": 8, **options}
    with pytest.raises(RequestError) as caught:
        Layout(**options)

    assert (caught.value.message, caught.value.hint) == (message, hint)


# --- cuts between the steps of ranks --------------------------------------------------------------


@st.composite
def replica_stages(draw: st.DrawFn) -> list[Stage]:
    """Hypothesis strategy for the stages of a replica, each of one or several alternating ranks."""
    seconds = st.integers(0, 32).map(lambda quarters: quarters / 4)
    step = st.integers(1, 12).map(lambda quarters: quarters / 4)
    stages = []
    for index in range(length := draw(st.integers(1, 4))):
        turns = draw(st.integers(1, 3)) if index == length - 1 else 1
        stages.append(
            Stage(
                tuple(range(index, index + turns)),
                tuple(draw(step) for _ in range(turns)),
                tuple(draw(seconds) for _ in range(turns)),
            )
        )
    return stages


def steps_between(cuts: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(cuts)]


@given(st.integers(1, 8), replica_stages())
def test_balanced_is_as_good_as_any_split(num_steps: int, stages: list[Stage]) -> None:
    part = StageGroup(num_steps, stages)
    every = itertools.combinations_with_replacement(range(num_steps + 1), len(stages) - 1)
    best = min(part.slowest_seconds((0, *cuts, num_steps)) for cuts in every)
    cuts = balanced_cuts(part)

    assert (cuts[0], cuts[-1]) == (0, num_steps)
    assert list(cuts) == sorted(cuts)
    assert part.slowest_seconds(cuts) == best


@given(st.integers(1, 30), replica_stages(), st.integers(1, 300))
def test_alternating_ranges_are_in_order_and_near_their_means(
    num_steps: int, stages: list[Stage], num_clips: int
) -> None:
    """The alternating cuts of a clip are in order, and less than one step from their means.

    Over many clips, the number of steps of a stage differs from the mean by less than four.
    """
    alternating = alternating_cuts([StageGroup(num_steps, stages)])
    turns = len(alternating.positions)
    for turn, positions in enumerate(alternating.positions):
        means = [position / 2**64 for position in positions]
        own = [alternating.cuts(index) for index in range(turn, num_clips, turns)]
        for cuts in own:
            assert (cuts[0], cuts[-1]) == (0, num_steps)
            assert list(cuts) == sorted(cuts)
            assert all(abs(cut - mean) < 1 + 1e-9 for cut, mean in zip(cuts, means, strict=True))
        counts = zip(*map(steps_between, own), strict=True)
        for mean, each in zip(steps_between(means), counts, strict=False):
            assert abs(sum(each) - mean * len(own)) < 4


@given(layouts())
def test_no_division_of_the_steps_and_ranks_is_faster(layout: Layout) -> None:
    """No other division of steps and ranks is faster.

    For fixed cuts, the slowest stage is as fast as possible. For alternating cuts, it is within
    0.5% of that.
    """
    shares = {share.rank: share.mean_steps for share in layout.all_shares}
    for replica in range(layout.data_parallel_size):
        stages = layout.stages(replica)
        slowest = max(busy_seconds(stage, shares) for stage in stages)
        for parts in expert_divisions(layout, stages):
            if layout.split == "alternating":
                enough = slowest / 1.00501 - 1e-6
                assert any(steps_in(enough, part) < part.num_steps for part in parts)
            elif layout.split == "balanced":
                cuts = [(part, balanced_cuts(part)) for part in parts]
                assert slowest <= max(part.slowest_seconds(each) for part, each in cuts)
            elif not any(part.num_steps % len(part.stages) for part in parts):
                cuts = [(part, uniform_cuts(part)) for part in parts]
                assert slowest <= max(part.slowest_seconds(each) for part, each in cuts)


def busy_seconds(stage: Stage, mean_steps: dict[int, float]) -> float:
    """Return the seconds per clip that a stage's busiest rank works, 0 for ranks without steps."""
    return max(
        (fixed + mean_steps[rank] * step) / len(stage.ranks) if mean_steps[rank] > 1e-9 else 0.0
        for rank, step, fixed in zip(
            stage.ranks, stage.step_seconds, stage.fixed_seconds, strict=True
        )
    )


def expert_divisions(layout: Layout, stages: list[Stage]) -> list[tuple[StageGroup, ...]]:
    """Return all ways to divide a layout's stages between two experts, at least one stage each.

    If the experts are not separate, there is only one group.
    """
    if layout.expert_boundary is None or not layout.separates_experts:
        return [(StageGroup(layout.num_steps, stages),)]
    low_noise = layout.num_steps - layout.expert_boundary
    return [
        (StageGroup(layout.expert_boundary, stages[:count]), StageGroup(low_noise, stages[count:]))
        for count in range(1, len(stages))
    ]


def test_a_rank_that_only_decodes_holds_no_expert() -> None:
    costs = CostModel(decode_seconds=9)
    layout = Layout(num_steps=12, world_size=4, split="alternating", costs=costs, expert_boundary=6)
    assert layout.roles[3] == Roles(encode=False, denoise=False, decode=True)
    assert [set(role.experts) for role in layout.roles] == [{0}, {1}, {1}, set()]


# --- auto -----------------------------------------------------------------------------------------

A100 = PRESETS["svd-xt-a100"]


def choose(**options: Any) -> tuple[Layout, str]:
    choice = choose_layout(
        **{"num_steps": 25, "world_size": 8, "num_clips": 80, "costs": A100, **options}
    )
    return choice.layout, choice.reason


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 20), costs)
@settings(max_examples=50)
def test_nothing_simple_is_better(
    num_steps: int, world_size: int, num_clips: int, costs: CostModel
) -> None:
    counts = {"num_steps": num_steps, "world_size": world_size, "costs": costs}
    chosen, reason = choose(**counts, num_clips=num_clips)

    makespan = forecast_layout(chosen, num_clips).makespan
    for replicas in divisors(world_size):
        for split in ("balanced", "alternating"):
            other = Layout(**counts, data_parallel_size=replicas, split=split)  # type: ignore[arg-type]
            if other.replica_size <= num_steps + 2:
                assert makespan <= forecast_layout(other, num_clips).makespan * 1.002
    assert "\n" not in reason
    assert reason.startswith(f"{chosen}: ")


def test_the_layout_fits_in_the_memory_of_each_rank() -> None:
    """`auto` chooses a layout that fits into the memory of each rank.

    Here rank 0 needs 47 GiB, ranks 1 and 2 need 36 GiB, and rank 3 needs 36.5 GiB.
    """
    counts = {**WAN, "world_size": 4, "num_clips": 16}
    layout, reason = choose(**counts, memory_gib=(47.0, 36.0, 36.0, 36.5))
    assert layout.data_parallel_size == 1
    assert "; both experts are on 0 of 4 ranks; " in reason
    words = r"fits in the memory of the ranks \(36 to 47 GiB each\): the smallest layout needs 47"
    with pytest.raises(RequestError, match=words):
        choose(**counts, memory_gib=(36.0, 36.5, 47.0, 36.0))


STEPS_ONLY = CostModel()
BOTH = "{} s for a clip and {} s for {}, instead of {} s and {} s with {}"


@pytest.mark.parametrize(
    ("options", "layout", "reason"),
    [
        (  # fewer clips than ranks
            {"num_clips": 3, "minimize_latency": True},
            "data parallel of pairs",
            BOTH.format("18.41", "18.41", "3 clips", "32.15", "32.15", "data parallel"),
        ),
        *(  # for a long queue the rate decides; that of pairs is only 0.87 of the best
            (
                {"minimize_latency": minimize_latency},
                "data parallel",
                BOTH.format(
                    "32.15", "321.5", "80 clips", "18.41", "368.2", "data parallel of pairs"
                ),
            )
            for minimize_latency in (False, True)
        ),
        (
            {"minimize_latency": True, "costs": STEPS_ONLY},
            "data parallel of pairs",
            BOTH.format("12.5", "250", "80 clips", "25", "250", "data parallel"),
        ),
        ({"costs": STEPS_ONLY}, "data parallel", "250 s for 80 clips, instead of"),
        ({"world_size": 7}, "data parallel", "the next best"),
        (  # 28 steps divide evenly into four stages of pairs, not into eight
            {"fixed": {"data_parallel_size": 1}, "num_steps": 28},
            "1 replica of 4 pairs, uniform",
            "no other layout was compared",
        ),
        (
            {
                **{"minimize_latency": True, "costs": STEPS_ONLY, "num_steps": 24},
                "fixed": {"data_parallel_size": 2, "split": "balanced"},
            },
            "2 replicas of 2 pairs, balanced",
            "12 s for a clip and 246 s for 80 clips, instead of 24 s and ",
        ),
    ],
)
def test_pairs_are_chosen_for_latency(options: dict[str, Any], layout: str, reason: str) -> None:
    chosen, why = choose(pairs=True, **options)
    assert str(chosen) == layout
    assert reason in why


def test_what_is_fixed_and_impossible_is_said_of_single_ranks() -> None:
    with pytest.raises(RequestError, match="over 8 ranks"):
        choose(pairs=True, fixed={"data_parallel_size": 1})


def test_what_costs_do_not_tell_of_hosts_is_left_out_and_said() -> None:
    """Layouts whose costs are unknown are left out, and the reason says so.

    The presets have no time for transfers between hosts.
    """
    hosts = replace(A100, ranks_per_host=4)
    layout, reason = choose(costs=hosts)
    assert str(layout) == "data parallel"
    # Only replicas of 8 ranks span hosts: balanced and alternating, with one and two decoders.
    assert reason.endswith(
        "not compared: 4 of 9 layouts, because they have transfers between hosts, and the costs "
        "lack inter_host_transfer_seconds"
    )
    assert "hosts" not in choose(costs=replace(hosts, inter_host_transfer_seconds=0.1))[1]
    fitting = replace(hosts, **memory((1.5, 3.0, 0.5), (1.0, 6.0, 8.0)))
    with pytest.raises(RequestError, match=r"between hosts \(rank 3 to rank 4\)") as caught:
        choose(costs=fitting, memory_gib=(11.0,) * 8)
    assert "`inter_host_transfer_seconds` SECONDS" in caught.value.hint


def test_layouts_of_shared_experts_count_among_all_that_could_be_compared() -> None:
    """With one rank on each host, all layouts but data parallel have transfers between hosts."""
    hosts = replace(WAN["costs"], ranks_per_host=1)
    options = {**WAN, "costs": hosts, "world_size": 4, "memory_gib": (80.0,) * 4}
    layout, reason = choose(**options)
    assert str(layout) == "data parallel"
    assert "not compared: 12 of 13 layouts, because" in reason
