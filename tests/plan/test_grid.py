"""The rank x time grid in text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Span, replay
from svdpp.plan.grid import clip_sign, draw_grid
from svdpp.plan.layout import Layout
from tests.plan.plans import costs, uniform_layouts

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


@given(uniform_layouts(), num_clips, costs, st.integers(1, 200))
def test_every_line_has_the_same_width_within_the_limit(
    layout: Layout, num_clips: int, costs: Costs, width: int
) -> None:
    lines = grid(layout, num_clips, costs, width=width)

    assert len(lines) == layout.world_size
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width + len("rank 0 ||")
    assert all(line.startswith(f"rank {rank} |") for rank, line in enumerate(lines))


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


def test_signs_repeat_after_62_clips_and_never_look_like_something_else() -> None:
    signs = [clip_sign(clip) for clip in range(62)]

    assert len(set(signs)) == 62
    assert not set(signs) & set(".<>|")
    assert clip_sign(62) == clip_sign(0)
