"""The forecast of diffusers' model offload, and what a choice of a layout says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdpp.errors import RequestError
from svdpp.plan.choose import choose_layout
from svdpp.plan.compare import Row, compare_layouts
from svdpp.plan.costs import Costs
from svdpp.plan.large_forecast import makespan
from svdpp.plan.layout import Layout
from svdpp.plan.offload import forecast_offload
from tests.plan.plans import WAN_COSTS, layouts

#: Both experts, text encoder and VAE are 65.5 GiB.
WAN = replace(WAN_COSTS, offload_gib_per_second=10)
COUNTS: dict[str, Any] = {"num_steps": 40, "world_size": 4, "expert_boundary": 13}


def reason(memory: float, costs: Costs = WAN) -> str:
    return choose_layout(**COUNTS, costs=costs, num_clips=16, memory_gib=(memory,) * 4).reason


def test_each_clip_moves_all_weights_to_the_device_and_back() -> None:
    offload = forecast_offload(Layout(**COUNTS, costs=WAN, split="balanced"))

    assert offload is not None
    assert offload.move_seconds == pytest.approx(2 * 65.5 / 10)
    assert offload.peak_gib == 36  # one expert with its work
    assert str(offload.layout) == "data parallel"
    assert makespan(offload.layout, 16) == pytest.approx(4 * (2 + 40 * 4 + 10 + 13.1))


def test_only_parts_that_a_clip_uses_move() -> None:
    one_expert = Layout(num_steps=40, world_size=4, costs=WAN, decodes=False)
    offload = forecast_offload(one_expert)

    assert offload is not None
    assert offload.move_seconds == pytest.approx(2 * 38 / 10)


@given(layouts(), st.integers(1, 64), st.integers(1, 9))
@settings(max_examples=50)
def test_it_is_never_faster_than_data_parallel_without_it(
    layout: Layout, rate: int, num_clips: int
) -> None:
    memory = {name: value for name, value in vars(WAN).items() if name.endswith("_gib")}
    costs = replace(layout.costs, offload_gib_per_second=rate, **memory)
    offload = forecast_offload(replace(layout, costs=costs))

    assert offload is not None
    resident = replace(offload.layout, costs=costs)
    assert makespan(offload.layout, num_clips) >= makespan(resident, num_clips)


@pytest.mark.parametrize(
    "missing", ["offload_gib_per_second", "denoise_weights_gib", "encode_work_gib"]
)
def test_without_its_costs_there_is_no_forecast(missing: str) -> None:
    costs = replace(WAN, **{missing: None})  # type: ignore[arg-type]
    assert forecast_offload(Layout(**COUNTS, costs=costs, split="balanced")) is None


def test_a_choice_says_that_offload_would_be_faster_or_slower() -> None:
    says = "diffusers' model offload, which svdpp does not run, "
    assert reason(48).endswith(
        says + "would take 740.4 s, 24.6% less, with 13.1 s of each clip to move 65.5 GiB"
    )
    assert "would take 4181 s, 325.8% longer" in reason(
        48, replace(WAN, offload_gib_per_second=0.15)
    )
    assert says + "would take 740.4 s, 7.6% longer" in reason(80)


def test_a_choice_says_why_offload_is_not_compared() -> None:
    unknown = replace(WAN, offload_gib_per_second=None)
    assert reason(48, unknown).endswith(
        "; diffusers' model offload is not compared: svdpp plan --offload-gib-per-second gives its "
        "cost"
    )
    assert "offload" not in reason(80, unknown)  # data parallel fits and is never slower
    weightless = replace(WAN, denoise_weights_gib=None)
    assert "the costs do not give its memory" in reason(48, weightless)


def test_a_rate_that_is_too_low() -> None:
    with pytest.raises(RequestError, match="--offload-gib-per-second 1e-09 is too low"):
        reason(48, replace(WAN, offload_gib_per_second=1e-9))


@pytest.mark.parametrize(
    ("memory", "rate", "hint"),
    [
        (40, 10.0, "does not run, needs 36 GiB: it would take 740.4 s for all clips"),
        (40, None, "does not run, needs 36 GiB: --offload-gib-per-second gives its time"),
        (35, 10.0, None),
    ],
)
def test_where_no_layout_fits_the_hint_names_offload(
    memory: float, rate: float | None, hint: str | None
) -> None:
    with pytest.raises(RequestError, match="no layout of 4 ranks fits") as caught:
        reason(memory, replace(WAN, offload_gib_per_second=rate))

    if hint is None:
        assert "offload" not in caught.value.hint
    else:
        assert caught.value.hint.endswith(hint)


def offload_row(costs: Costs, memory: float, **counts: Any) -> Row | None:
    rows = compare_layouts(
        **{**COUNTS, **counts}, costs=costs, num_clips=16, memory_gib=(memory,) * 4
    )
    return next((row for row in rows if row.name == "model offload"), None)


def test_a_comparison_has_a_row_for_offload() -> None:
    row = offload_row(WAN, 48)
    assert row is not None
    assert row.forecast is not None
    assert row.forecast.makespan == pytest.approx(740.4)
    assert row.peak_gib == (36,)
    assert row.note.endswith("which svdpp does not run; 13.1 s of each clip to move 65.5 GiB")

    small = offload_row(WAN, 30)
    assert small is not None
    assert small.note.endswith("needs 36 GiB on each card")

    unknown = replace(WAN, offload_gib_per_second=None)
    row = offload_row(unknown, 48)
    assert row is not None
    assert row.forecast is None
    assert offload_row(unknown, 48, expert_boundary=None) is None
