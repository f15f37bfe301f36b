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
    columns = (f"clips/{every}", "first clip", "mean clip", "jitter", "peak GiB", "idle")
    console.table(("layout", *columns), (_compared(row, request.unit) for row in rows))
    console.result()
    clips = f"{request.num_clips} clips on {counts['world_size']} ranks"
    console.result(f"{clips}, times in {request.unit}s")
    for row in rows:
        if row.note:
            console.result(f"{row.name}: {row.note}")
    talk(console, request)


def _compared(row: Row, unit: str) -> tuple[str, ...]:
    forecast, layout = row.forecast, row.layout
    if forecast is None or layout is None:
        return (row.name, *"------")
    span = 60 if unit == "second" else 100
    return (
        row.name,
        f"{span / forecast.cadence:.2f}" if forecast.cadence else "-",
        f"{forecast.first_clip:.2f}",
        f"{forecast.latency.mean:.2f}",
        f"{forecast.jitter:.2f}",
        gib(layout.peak_gib),
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
    if row.forecast is None or row.layout is None:
        return {"name": row.name, "note": row.note, "layout": None, "forecast": None}
    forecast = row.forecast
    return {
        "name": row.name,
        "note": row.note or None,
        "layout": facts(row.layout) | {"peak_gib": row.layout.peak_gib},
        "forecast": {
            **times(forecast),
            "bubble": forecast.bubble,
            "jitter_seconds": forecast.jitter,
            "latency_seconds": forecast.latency._asdict(),
        },
    }
