"""The rank x time grid in text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Span, replay
from svdpp.plan.grid import clip_sign, draw_grid
from tests.plan.plans import Pipeline, costs, pipelines

GOLDEN = Path(__file__).parent.parent / "golden"


def grid(pipeline: Pipeline, costs: Costs | None = None, **options: object) -> list[str]:
    spans = replay(pipeline.schedule, costs or Costs())
    return draw_grid(spans, pipeline.world_size, **options)  # type: ignore[arg-type]


def test_golden_text_of_steps_alone() -> None:
    text = (GOLDEN / "grid_w4_n28_m8.txt").read_text(encoding="utf-8")

    assert "\n".join(grid(Pipeline(28, 4, 8), width=80)) + "\n" == text


def test_golden_text_with_encode_decode_hops_and_a_mark() -> None:
    text = (GOLDEN / "grid_w4_n28_m3_all_costs.txt").read_text(encoding="utf-8")
    costs = Costs(step_seconds=1, encode_seconds=2, decode_seconds=4, transfer_seconds=1)
    lines = grid(Pipeline(28, 4, 3), costs, width=80, marks={3: "rank 3 died here"})

    assert "\n".join(lines) + "\n" == text


@given(pipelines(), costs, st.integers(1, 200))
def test_every_line_has_the_same_width_within_the_limit(
    pipeline: Pipeline, costs: Costs, width: int
) -> None:
    lines = grid(pipeline, costs, width=width)

    assert len(lines) == pipeline.world_size
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width + len("rank 0 ||")
    assert all(line.startswith(f"rank {rank} |") for rank, line in enumerate(lines))


@given(pipelines())
def test_every_step_has_a_column_where_there_is_room(pipeline: Pipeline) -> None:
    """With steps of equal length, each column shows exactly what the replay gives."""
    lines = grid(pipeline, width=10_000)
    for rank, line in enumerate(lines):
        row = line.partition("|")[2].removesuffix("|")
        busy = "".join(clip_sign(clip) * pipeline.per_rank for clip in range(pipeline.num_clips))
        before = "." * (rank * pipeline.per_rank)
        after = "." * ((pipeline.world_size - 1 - rank) * pipeline.per_rank)
        assert row == before + busy + after


def test_28_ranks_and_60_clips() -> None:
    lines = grid(Pipeline(28, 28, 60), width=87)

    assert len(lines) == 28
    assert {len(line) for line in lines} == {len("rank 27 ||") + 87}
    assert lines[0].startswith("rank  0 |0123456789ab")
    assert lines[27].endswith("UVWX|")


def test_a_mark_needs_no_work_done() -> None:
    assert draw_grid([], 2, width=6, marks={1: "died here"}) == [
        "rank 0 |......|",
        "rank 1 |......|  <-- died here",
    ]


def test_what_fills_most_of_a_column_is_shown() -> None:
    spans = [
        Span(0, Action.at(Kind.ENCODE, 0, 0), 0, 2.5),
        Span(0, Action(Kind.DENOISE, 0, 0, 2), 2.5, 6.5),
        Span(0, Action.at(Kind.DECODE, 0, 2), 8, 10),
    ]

    assert draw_grid(spans, 1, width=80) == ["rank 0 |<00.>|"]


def test_measured_spans_may_begin_anywhere() -> None:
    spans = replay(Pipeline(8, 2, 3).schedule, Costs())
    moved = [span._replace(start=span.start + 1000, end=span.end + 1000) for span in spans]

    assert draw_grid(moved, 2) == draw_grid(spans, 2)


def test_signs_repeat_after_62_clips_and_never_look_like_something_else() -> None:
    signs = [clip_sign(clip) for clip in range(62)]

    assert len(set(signs)) == 62
    assert not set(signs) & set(".<>|")
    assert clip_sign(62) == clip_sign(0)


@pytest.mark.parametrize("tiny", [1e-300, 1e-310])
def test_steps_too_short_to_count(tiny: float) -> None:
    """If a step is negligible compared with a decode, the grid still has its width."""
    lines = grid(Pipeline(4, 2, 2), Costs(step_seconds=tiny, decode_seconds=1), width=30)

    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 30 + len("rank 0 ||")
