"""Layouts of two experts: no rank holds both, ranks follow the work, refusals name what works."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.choose import choose_layout
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Layout, Roles
from svdpp.plan.schedule import Route, build_schedule
from svdpp.plan.split import Part, Stage, balanced_cuts, uniform_cuts
from tests.plan.plans import WAN, layouts, steps_in
from tests.plan.schedule_check import check_schedule

two_experts = layouts(experts=2)
HIGH, LOW = frozenset({0}), frozenset({1})


def experts_of_steps(layout: Layout, routes: list[Route]) -> list[set[int]]:
    """The experts whose steps each rank does on these routes."""
    assert layout.expert_boundary is not None
    experts: list[set[int]] = [set() for _ in range(layout.world_size)]
    for route in routes:
        for part in route.ranges:
            experts[part.rank] |= {
                int(step >= layout.expert_boundary) for step in range(part.start, part.end)
            }
    return experts


@pytest.mark.long
@given(two_experts, st.integers(1, 20), st.data())
@settings(max_examples=200)
def test_no_rank_does_steps_of_both_experts(
    layout: Layout, clips: int, data: st.DataObject
) -> None:
    """On no route, complete, resumed or over all stages; roles hold what each rank needs."""
    routes = [
        layout.route(clip, all_stages=data.draw(st.booleans())).resumed(
            data.draw(st.integers(0, layout.num_steps))
        )
        for clip in range(clips)
    ]
    experts = experts_of_steps(layout, [*map(layout.route, range(clips)), *routes])

    for role, needed in zip(layout.roles, experts, strict=True):
        assert needed <= role.experts
        assert role.denoise == bool(role.experts)
        if layout.replica_size > 1 and not layout.share_experts:
            assert len(role.experts) < 2
        elif layout.replica_size == 1:
            assert role.experts == HIGH | LOW
    schedule = build_schedule(routes, layout.world_size)
    check_schedule(schedule, layout.num_steps)
    replay(schedule, layout.costs)


@pytest.mark.long
@given(two_experts.filter(lambda layout: layout.separates_experts))
def test_each_expert_has_ranks_in_order(layout: Layout) -> None:
    for ranks in layout.replica_ranks:
        held = [min(layout.roles[rank].experts, default=None) for rank in ranks]
        some = [expert for expert in held if expert is not None]
        assert some == sorted(some)
        assert set(some) == {0, 1}
        assert 0 not in held[-layout.decoders :]


@given(two_experts.filter(lambda layout: layout.separates_experts))
def test_no_division_of_the_ranks_is_faster(layout: Layout) -> None:
    """Of fixed cuts the slowest stage is as fast as possible, of alternating ones up to 0.5%."""
    for replica in range(layout.replicas):
        stages = layout.stages(replica)
        shares = {share.rank: share.mean_steps for share in layout.shares(replica)}
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
    layout = Layout(**WAN, **options)

    assert layout.cuts(0) == cuts


def test_a_rank_that_only_decodes_holds_no_expert() -> None:
    costs = Costs(decode_seconds=9)
    layout = Layout(num_steps=12, world_size=4, split="alternating", costs=costs, expert_boundary=6)
    assert layout.roles[3] == Roles(encode=False, denoise=False, decode=True)
    assert [role.experts for role in layout.roles] == [HIGH, LOW, LOW, frozenset()]


def test_auto_takes_data_parallel_only_if_both_experts_fit() -> None:
    counts = {**WAN, "world_size": 4, "num_clips": 16}
    roomy = choose_layout(**counts, memory_gib=(80.0,) * 4)
    assert str(roomy.layout) == "data parallel"
    assert roomy.reason.endswith("; 4 of 4 ranks hold both experts")

    small = choose_layout(**counts, memory_gib=(48.0,) * 4)
    assert small.layout.separates_experts
    assert small.reason.endswith(
        "; 0 of 4 ranks hold both experts; 1 of 7 layouts need more memory"
    )
    with pytest.raises(RequestError, match="no layout of 4 ranks fits in 40 GiB a rank"):
        choose_layout(**counts, memory_gib=(40.0,) * 4)


def test_auto_compares_each_rank_with_its_own_card() -> None:
    """Rank 0 needs 47 GiB, ranks 1 and 2 need 36, rank 3 needs 36.5."""
    counts = {**WAN, "world_size": 4, "num_clips": 16}
    assert choose_layout(**counts, memory_gib=(47.0, 36.0, 36.0, 36.5)).layout.replicas == 1
    with pytest.raises(RequestError) as caught:
        choose_layout(**counts, memory_gib=(36.0, 36.5, 47.0, 36.0))
    assert caught.value.message == (
        "no layout of 4 ranks fits in 36 to 47 GiB a rank: the smallest one needs 47"
    )


def test_a_rank_holds_both_experts_where_its_card_has_room() -> None:
    counts = {**WAN, "world_size": 4, "num_clips": 64}
    choice = choose_layout(**counts, memory_gib=(48.0, 64.0, 48.0, 48.0))
    assert str(choice.layout) == "1 replica of 4 ranks, alternating, shared experts"
    assert [len(role.experts) for role in choice.layout.roles] == [1, 2, 1, 1]
    assert "; 1 of 4 ranks hold both experts; " in choice.reason
    assert not choose_layout(**counts, memory_gib=(48.0,) * 4).layout.share_experts
