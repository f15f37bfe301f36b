"""Layouts: all can be performed, links and roles are right, invalid ones refused; two experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.actions import SENDS, Action, Kind, Route, Schedule, build_schedule
from svdpp.plan.choose import choose_layout
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Layout, Roles, assign_replicas
from svdpp.plan.split import Part, Stage, StepRange, balanced_cuts, uniform_cuts
from tests.plan.plans import WAN, check_receives, check_schedule, layouts, memory, steps_in

num_clips = st.integers(1, 20)


@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.long)])
@given(layouts(pairs=True), num_clips, st.data())
@settings(max_examples=200)
def test_any_layout_can_be_performed(
    is_resumed: bool, layout: Layout, clips: int, data: st.DataObject
) -> None:
    """Each step is done once and in order, without deadlock, with at most two packets in flight.

    Ranks need no other roles than theirs, and of a longer replica one expert, if none share both.
    """
    all_stages = is_resumed and data.draw(st.booleans())
    routes = [layout.route(clip, all_stages=all_stages) for clip in range(clips)]
    ats = [data.draw(st.integers(0, layout.num_steps)) if is_resumed else 0 for _ in routes]
    resumed = [route.resumed(at) if at else route for route, at in zip(routes, ats, strict=True)]
    schedule = build_schedule(resumed, layout.world_size)

    check_schedule(schedule, layout.num_steps)
    check_receives(schedule)
    replay(schedule, layout.costs)
    loads = {act[1:3] for actions in schedule for act in actions if act.kind is Kind.LOAD}
    assert loads == {(clip, at) for clip, at in enumerate(ats) if at}
    assert all_stages or talking(schedule) <= set(layout.links)
    assert talking(schedule, decode=True) <= set(layout.decode_links)
    for role, actions in zip(layout.roles, schedule, strict=True):
        assert set(used_roles(layout, actions).split()) <= set(role.split())
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
        if action.kind in SENDS and (action.frames is not None) == decode
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


@pytest.mark.long
@given(layouts(pairs=True))
def test_links_and_roles_are_those_that_come_to_be_used(layout: Layout) -> None:
    """Many clips use no other links or roles; rare alternating cuts may not occur among them."""
    schedule = layout.schedule(60 * layout.replicas * layout.decoders)
    used = [used_roles(layout, actions) for actions in schedule]

    assert list(layout.links) == sorted(set(layout.links))
    if layout.split != "alternating":
        # A clip that is resumed starts at another pair.
        starts = {pair for pair in layout.pairs if layout.roles[pair[0]].denoise}
        assert talking(schedule) | starts == set(layout.links)
        assert list(layout.roles) == used


@given(layouts(pairs=True), num_clips)
def test_a_clip_has_the_ranks_of_its_turn_and_their_shares(layout: Layout, clips: int) -> None:
    shares = {share.rank: share for share in layout.all_shares}
    assert sorted(shares) == list(range(layout.world_size))
    for clip in range(clips):
        route, index = layout.route(clip), clip // layout.replicas
        assert route == replace(layout).route(clip)
        own = layout.replica_ranks[clip % layout.replicas]
        ranks = [part.rank for part in route.ranges]
        assert set(ranks) <= set(own)
        assert ranks[-1] == own[layout.replica_size - layout.decoders + index % layout.decoders]
        if layout.num_stages > 1:
            assert ranks[0] == own[0]
        assert ranks == sorted(ranks)
        for part in route.ranges:
            assert shares[part.rank].start <= part.start <= part.end <= shares[part.rank].end


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 20))
def test_the_default_is_the_charters_rule(per_rank: int, world_size: int, clip: int) -> None:
    layout = Layout(num_steps=per_rank * world_size, world_size=world_size)

    ranges = [StepRange(r, r * per_rank, (r + 1) * per_rank) for r in range(world_size)]
    assert layout.route(clip) == Route(clip, tuple(ranges))
    assert layout.links == tuple(itertools.pairwise(range(world_size)))


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 20))
def test_a_replica_for_each_rank_is_data_parallel(steps: int, world_size: int, clip: int) -> None:
    for options in ({"replicas": world_size}, {"decoders": world_size}):
        layout = Layout(num_steps=steps, world_size=world_size, split="alternating", **options)
        assert layout.route(clip) == Route(clip, (StepRange(clip % world_size, 0, steps),))
        assert layout.links == ()


def test_a_rank_without_steps_is_passed_by() -> None:
    """6 ranks for 3 steps: clips skip ranks without steps, except the first and the last."""
    layout = Layout(num_steps=3, world_size=6, split="alternating")
    for route in map(layout.route, range(50)):
        assert (route.ranges[0].rank, route.ranges[-1].rank) == (0, 5)
        assert all(part.num_steps for part in route.ranges[1:-1])


def test_roles_say_what_need_not_be_loaded() -> None:
    decode_heavy = Costs(step_seconds=1, encode_seconds=0.5, decode_seconds=8)
    layout = Layout(num_steps=16, world_size=4, split="balanced", costs=decode_heavy)

    assert layout.route(0).ranges[-1] == StepRange(3, 16, 16)
    assert layout.roles == (
        Roles(encode=True, denoise=True),
        Roles(denoise=True),
        Roles(denoise=True),
        Roles(decode=True),
    )
    bare = Layout(num_steps=4, world_size=2, decodes=False)
    assert [role.decode for role in bare.roles] == [False, False]


def test_peak_memory_follows_the_roles() -> None:
    costs = Costs(decode_seconds=4, **memory((1, 3, 0.5), (1, 5, 9)))
    options: dict[str, Any] = {"num_steps": 12, "world_size": 4, "costs": costs}
    assert Layout(**options, split="balanced").peak_gib == (9, 8, 8, 9.5)
    assert Layout(**options, replicas=4).peak_gib == (13.5,) * 4
    assert Layout(num_steps=12, world_size=4).peak_gib == (None,) * 4


@pytest.mark.parametrize(
    ("world_size", "replica_size", "ranks_per_host", "replica_ranks"),
    [
        (8, 4, None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 8, 4, [tuple(range(8))]),
        (8, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # In rank order, two of these four replicas would be on two hosts each.
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


DIVISORS = "use a divisor: --replicas 1, 2, 4, 8"
NOT_EQUAL = "8 ranks cannot form {} replicas of equal size"
EVENLY = "{} cannot be split evenly over {}"
EXPERTS = "13 high-noise and 27 low-noise steps"
RANGE = "--decoders must be 1 to {}, the ranks of a replica or decoder, got {}"
BOUNDARY = "--expert-boundary must be 1 or more and less than the number of steps (40), got {}"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"world_size": 0}, "the number of ranks must be 1 to 65536, got 0", ""),
        ({"replicas": 3}, NOT_EQUAL.format(3), DIVISORS),
        ({"replicas": 0}, NOT_EQUAL.format(0), DIVISORS),
        ({"decoders": 0}, RANGE.format(8, 0), ""),
        ({"decoders": 5, "replicas": 2}, RANGE.format(4, 5), ""),
        (
            {"split": "equal"},
            "--split must be one of uniform, balanced, alternating, got 'equal'",
            "",
        ),
        (
            {"costs": Costs(step_seconds=(1.0, 2.0))},
            "step_seconds has values for 2 ranks, but the run has 8",
            "use --world 2, or costs with one number for all ranks",
        ),
        (
            {"costs": Costs(ranks_per_host=3)},
            "8 ranks cannot form hosts of 3 ranks each",
            "use --hosts 3x3, or another --world",
        ),
        (
            {"num_steps": 25, "decoders": 2},
            EVENLY.format("25 steps", "7 stages; the nearest step counts that can are 21 and 28"),
            "use --steps 21 or --steps 28, or --split alternating",
        ),
        (
            {"num_steps": 25},
            EVENLY.format("25 steps", "8 ranks; the nearest step counts that can are 24 and 32"),
            "use --steps 24 or --steps 32, or --world 5, or --split alternating",
        ),
        ({**WAN, "expert_boundary": 40}, BOUNDARY.format(40), ""),
        ({**WAN, "expert_boundary": 0, "replicas": 8}, BOUNDARY.format(0), ""),
        (
            WAN,
            EVENLY.format(EXPERTS, "8 stages with one expert each"),
            "use --split balanced or --split alternating",
        ),
        (
            {**WAN, "replicas": 2, "decoders": 2},
            EVENLY.format(EXPERTS, "3 stages with one expert each"),
            "use --split balanced or --split alternating",
        ),
        (
            {**WAN, "decoders": 4, "replicas": 2, "split": "alternating"},
            "--decoders must be 1 to 3, got 4: all decoders hold the low-noise expert, and a rank "
            "must hold the other",
            "use --layout data-parallel or --share-experts for ranks that hold both",
        ),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], message: str, hint: str) -> None:
    options = {"num_steps": 24, "world_size": 8, **options}
    with pytest.raises(RequestError) as caught:
        Layout(**options)

    assert (caught.value.message, caught.value.hint) == (message, hint)


# --- two experts: ranks follow the work, and `auto` the memory -----------------------------------

two_experts = layouts(experts=2)
HIGH, LOW = frozenset({0}), frozenset({1})


@given(two_experts.filter(lambda layout: layout.separates_experts))
def test_no_division_of_the_ranks_is_faster(layout: Layout) -> None:
    """Of fixed cuts the slowest stage is as fast as possible, of alternating ones up to 0.5%."""
    shares = {share.rank: share.mean_steps for share in layout.all_shares}
    for replica in range(layout.replicas):
        stages = layout.stages(replica)
        slowest = max(busy_seconds(stage, shares) for stage in stages)
        for parts in divisions(layout, stages):
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
    """Mean seconds for each clip of the replica in the stage's slowest rank that does steps."""
    return max(
        (fixed + mean_steps[rank] * step) / len(stage.ranks) if mean_steps[rank] > 1e-9 else 0.0
        for rank, step, fixed in zip(
            stage.ranks, stage.step_seconds, stage.fixed_seconds, strict=True
        )
    )


def divisions(layout: Layout, stages: list[Stage]) -> list[tuple[Part, Part]]:
    """All divisions of the stages between the experts, at least one each."""
    assert layout.expert_boundary is not None
    low_noise = layout.num_steps - layout.expert_boundary
    return [
        (Part(layout.expert_boundary, stages[:count]), Part(low_noise, stages[count:]))
        for count in range(1, len(stages))
    ]


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({"world_size": 4}, (0, 13, 22, 31, 40)),
        ({"world_size": 4, "split": "balanced"}, (0, 13, 23, 33, 40)),
        ({"world_size": 4, "split": "balanced", "share_experts": True}, (0, 10, 21, 32, 40)),
        ({"world_size": 2, "split": "alternating"}, (0, 13, 40)),
        ({"world_size": 8, "split": "balanced"}, (0, 4, 9, 13, 19, 25, 31, 37, 40)),
    ],
    ids=str,
)
def test_wan(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    assert Layout(**WAN, **options).cuts(0) == cuts


def test_a_rank_that_only_decodes_holds_no_expert() -> None:
    costs = Costs(decode_seconds=9)
    layout = Layout(num_steps=12, world_size=4, split="alternating", costs=costs, expert_boundary=6)
    assert layout.roles[3] == Roles(encode=False, denoise=False, decode=True)
    assert [role.experts for role in layout.roles] == [HIGH, LOW, LOW, frozenset()]


FOUR = {**WAN, "world_size": 4, "num_clips": 16}


def test_auto_takes_data_parallel_only_if_both_experts_fit() -> None:
    roomy = choose_layout(**FOUR, memory_gib=(80.0,) * 4)
    assert str(roomy.layout) == "data parallel"
    assert roomy.reason.endswith("; 4 of 4 ranks hold both experts")
    small = choose_layout(**FOUR, memory_gib=(48.0,) * 4)
    assert small.layout.separates_experts
    assert small.reason.endswith(
        "; 0 of 4 ranks hold both experts; 1 of 7 layouts need more memory"
    )
    # Rank 0 needs 47 GiB, ranks 1 and 2 need 36, rank 3 needs 36.5.
    assert choose_layout(**FOUR, memory_gib=(47.0, 36.0, 36.0, 36.5)).layout.replicas == 1
    words = "no layout of 4 ranks fits in 36 to 47 GiB a rank: the smallest one needs 47"
    with pytest.raises(RequestError, match=words):
        choose_layout(**FOUR, memory_gib=(36.0, 36.5, 47.0, 36.0))


def test_a_rank_holds_both_experts_where_its_card_has_room() -> None:
    counts = {**FOUR, "num_clips": 64}
    choice = choose_layout(**counts, memory_gib=(48.0, 64.0, 48.0, 48.0))
    assert str(choice.layout) == "1 replica of 4 ranks, alternating, shared experts"
    assert [len(role.experts) for role in choice.layout.roles] == [1, 2, 1, 1]
    assert "; 1 of 4 ranks hold both experts; " in choice.reason
    assert not choose_layout(**counts, memory_gib=(48.0,) * 4).layout.share_experts
