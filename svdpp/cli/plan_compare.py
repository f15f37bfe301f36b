"""Owns what `svdpp plan --compare` prints: layouts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svdpp.cli.console import Console
from svdpp.cli.plan_report import Request, facts, gib, talk, times
from svdpp.plan.choose import Row


def show_comparison(
    console: Console, request: Request, counts: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    """Prints layouts side by side, then what is to be said of each.

    Args:
        console: where to.
        request: what they are forecast for.
        counts: `num_steps` and `world_size` of them all.
        rows: one for each.
    """
    if console.as_json:
        console.json(_comparison_json(counts, request, rows))
        return
    every = "min" if request.unit == "second" else "100 steps"
    counted = "first clip", "mean clip", "look", "jitter", "GiB", "idle"
    columns = (f"clips/{every}", *counted)
    console.table(("layout", *columns), (_compared(row, request.unit) for row in rows))
    console.result()
    clips = f"{request.num_clips} clips on {counts['world_size']} ranks"
    console.result(f"{clips}, times in {request.unit}s")
    for row in rows:
        if row.note:
            console.result(f"{row.name}: {row.note}")
    talk(console, request)


def _compared(row: Row, unit: str) -> tuple[str, ...]:
    forecast = row.forecast
    if forecast is None:
        return (row.name, *"-------")
    span = 60 if unit == "second" else 100
    return (
        row.name,
        f"{span / forecast.seconds_per_clip:.2f}" if forecast.seconds_per_clip else "-",
        f"{forecast.first_clip:.2f}",
        f"{forecast.latency.mean:.2f}",
        f"{row.preview_seconds:.2f}",
        f"{forecast.jitter:.2f}",
        gib(row.peak_gib),
        f"{forecast.bubble:.0%}",
    )


def _comparison_json(
    counts: Mapping[str, Any], request: Request, rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "num_steps": counts["num_steps"],
        "world_size": counts["world_size"],
        "unit": request.unit,
        "clips": request.num_clips,
        "layouts": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    forecast = row.forecast
    if forecast is None:
        return {"name": row.name, "note": row.note, "layout": None, "forecast": None}
    if row.layout is not None:
        what = facts(row.layout)
    else:
        assert row.draft_plan is not None
        what = {"description": str(row.draft_plan), "start_steps": row.draft_plan.start_steps}
    return {
        "name": row.name,
        "note": row.note or None,
        "layout": what | {"peak_gib": row.peak_gib},
        "forecast": {
            **times(forecast),
            "bubble": forecast.bubble,
            "jitter_seconds": forecast.jitter,
            "latency_seconds": forecast.latency._asdict(),
            "preview_seconds": row.preview_seconds,
        },
    }
