"""Owns the output of `svdpp plan --compare`: layouts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svdpp.cli.console import Console
from svdpp.cli.plan_report import SCHEMA_VERSION, Request, facts, gib, num_idle_ranks, times
from svdpp.plan.compare import Row


def show_comparison(
    console: Console, request: Request, counts: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    """Prints layouts side by side, then notes on them."""
    console.infos(request.remarks)
    if console.as_json:
        console.json(_comparison_json(counts, request, rows))
        return
    columns = ("total", "per min", "first", "mean", "preview", "jitter", "GiB", "idle")
    console.table(("layout", *columns), map(_compared, rows))
    console.result()
    console.result(f"total: {request.clips} on {counts['world_size']} ranks")
    console.result("per min: clips of a long queue; all others in seconds, of these clips;")
    console.result("preview: until a clip or its draft can be seen; jitter: between finished clips")
    for row in rows:
        if row.note:
            console.result(f"{row.name}: {row.note}")
        if row.layout is not None and (num_idle := num_idle_ranks(row.layout)):
            console.info(
                f"warning: {row.name}: {num_idle} of {counts['world_size']} ranks "
                "have nothing to do"
            )


def _compared(row: Row) -> tuple[str, ...]:
    forecast = row.forecast
    if forecast is None:
        return (row.name, *"--------")
    return (
        row.name,
        f"{forecast.makespan:.1f}",
        f"{60 / row.seconds_per_clip:.2f}" if row.seconds_per_clip else "-",
        f"{forecast.first_clip:.1f}",
        f"{forecast.latency.mean:.1f}",
        f"{row.preview_seconds:.1f}",
        f"{forecast.jitter:.1f}",
        gib(row.peak_gib),
        f"{forecast.bubble:.0%}",
    )


def _comparison_json(
    counts: Mapping[str, Any], request: Request, rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "num_steps": counts["num_steps"],
        "world_size": counts["world_size"],
        "clips": request.num_clips,
        "layouts": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    forecast = row.forecast
    if forecast is None:
        return {"name": row.name, "note": row.note, "layout": None, "forecast": None}
    if row.layout is not None:
        what = facts(row.layout)
    elif row.offload is not None:
        what = {"description": str(row.offload), "move_seconds": row.offload.move_seconds}
    else:
        assert row.draft_plan is not None
        what = {"description": str(row.draft_plan), "start_steps": row.draft_plan.start_steps}
    return {
        "name": row.name,
        "note": row.note or None,
        "layout": what | {"peak_gib": row.peak_gib},
        "forecast": {
            **times(forecast, row.seconds_per_clip),
            "bubble": forecast.bubble,
            "jitter_seconds": forecast.jitter,
            "latency_seconds": forecast.latency._asdict(),
            "preview_seconds": row.preview_seconds,
        },
    }
