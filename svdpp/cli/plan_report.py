"""The output of `svdpp plan`: one layout with picture and forecast, or several compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import MAX_ROWS, Console, counted
from svdpp.plan.forecast import Forecast, replay
from svdpp.plan.large_forecast import forecast_layout, steady_seconds_per_clip
from svdpp.plan.layout import Layout
from svdpp.plan.split import EXPERTS

if TYPE_CHECKING:
    from svdpp.plan.choose import Row

#: Of the JSON of `svdpp plan`.
SCHEMA_VERSION = 2

# Visits of clips at ranks: about a second of drawing.
_MAX_DRAWN = 50_000
_CLIPS_WHOSE_CUTS_ARE_SHOWN = 4
_MAX_CUTS = 16
_COMPARED = ("total", "per min", "first", "mean", "jitter", "GiB", "idle")
_TIMES = ("makespan_seconds", "first_clip_seconds", "seconds_per_clip")


def show_layout(console: Console, layout: Layout, num_clips: int, reason: str = "") -> None:
    """Prints the ranks, picture and forecast of a layout, with the forecast of data parallel.

    `reason` says why `auto` chose the layout.
    """
    alone: dict[str, Any] = {"split": "uniform", "decoders": 1, "cfg_parallel": 1}
    data_parallel = replace(layout, **alone, replicas=layout.world_size, decode_ranks=1)
    ours, theirs = (
        _details(forecast_layout(each, num_clips), steady_seconds_per_clip(each))
        for each in (layout, data_parallel)
    )
    ranks = [_rank(layout, rank) for rank in range(layout.world_size)]
    if console.as_json:
        others = {name: theirs[name] for name in _TIMES}
        console.json(
            {
                "schema_version": SCHEMA_VERSION,
                **{name: getattr(layout, name) for name in ("num_steps", "world_size", "split")},
                "layout": _facts(layout) | {"reason": reason or None},
                "ranks": ranks,
                "costs": layout.costs.to_json(),
                "forecast": {"clips": num_clips, **ours, "data_parallel": others},
            }
        )
        return
    _print_ranks(console, layout, ranks)
    _print_cuts(console, layout, num_clips)
    console.result()
    _print_picture(console, layout, num_clips)
    console.result()
    if reason:
        console.prose(f"auto picks {reason}")
    _print_times(console, f"{counted(num_clips, 'clip')} on {layout.world_size} ranks", ours)
    if layout.split != "uniform" or reason:
        latency = {name: f"{value:.4g}" for name, value in ours["latency_seconds"].items()}
        parts = ", ".join(f"{name} {latency[name]}" for name in ("p50", "p90", "p99"))
        console.result(f"a clip takes {latency['mean']} s from its encode: {parts}")
    if layout.replica_size * layout.cfg_parallel > 1:
        _print_times(console, f"data parallel on {layout.world_size} ranks", theirs)
    _warn_of_idle_ranks(console, layout)


def _rank(layout: Layout, rank: int) -> dict[str, Any]:
    role, found = layout.roles[rank], layout.all_shares[rank]._asdict() | layout.roles[rank].parts
    if layout.expert_boundary is not None:
        found["experts"] = [EXPERTS[expert] for expert in sorted(role.experts)]
    return found | {"peak_gib": layout.peak_gib[rank]}


def _print_ranks(console: Console, layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Prints a row for each rank; if all replicas are alike, only those of the first."""
    alike = layout.replicas_are_alike
    replicas = range(1 if alike else layout.replicas)
    shown = [ranks[share.rank] for replica in replicas for share in layout.shares(replica)]
    console.table([_rank_row(layout, rank) for rank in shown])
    if alike and layout.replicas > 1:
        console.result(f"and so on, in {layout.replicas} replicas of {layout.replica_size}")


def _rank_row(layout: Layout, rank: Mapping[str, Any]) -> dict[str, str]:
    row = {"rank": str(rank["rank"])}
    if layout.costs.ranks_per_host is not None:
        row["host"] = str(layout.costs.host_of(rank["rank"]))
    row |= {name: str(rank[name]) for name in ("start", "end")}
    row["steps"] = f"{rank['mean_steps']:.4g}"
    if names := rank.get("experts"):
        row["expert"] = "both" if len(names) > 1 else names[0]
    if any(peak is not None for peak in layout.peak_gib):
        row["GiB"] = _gib([rank["peak_gib"]])
    return row


def _print_cuts(console: Console, layout: Layout, num_clips: int) -> None:
    if layout.split != "alternating" or not 1 < layout.num_stages <= _MAX_CUTS:
        return
    console.result()
    for clip in range(min(num_clips, _CLIPS_WHOSE_CUTS_ARE_SHOWN)):
        inner = " ".join(map(str, layout.cuts(clip * layout.replicas)[1:-1]))
        console.result(f"clip {clip * layout.replicas} is cut at {inner}")


def _print_picture(console: Console, layout: Layout, num_clips: int) -> None:
    """Prints the rank x time grid, of the first clips if there are many."""
    if layout.world_size > MAX_ROWS:
        console.result(f"(no picture: {layout.world_size} ranks are too many)")
        return
    if num_clips > max(1, _MAX_DRAWN // layout.num_stages):
        num_clips = min(num_clips, 4 * layout.world_size)
        console.result(f"the first {num_clips} clips:")
    console.grid(replay(layout.schedule(num_clips), layout.costs), layout.world_size)
    console.result("time ->   one sign per clip, < encode, > decode, . idle")


def _print_times(console: Console, what: str, times: Mapping[str, Any]) -> None:
    makespan, first, steady = (times[name] for name in _TIMES)
    bubble = f"bubble {times['bubble']:.0%}"
    console.result(f"{what}: {makespan:.4g} s, first after {first:.4g} s, {bubble}")
    console.result(f"  of a long queue, one clip every {steady:.4g} s")


def _warn_of_idle_ranks(console: Console, layout: Layout, name: str = "") -> None:
    idle = sum(not (role.encode or role.denoise or role.decode) for role in layout.roles)
    if idle:
        console.info(f"warning: {name}{idle} of {layout.world_size} ranks have nothing to do")


def _facts(layout: Layout) -> dict[str, Any]:
    """The properties of a layout, for JSON; those of experts only if the model has two."""
    names = ["split", "replicas", "decoders", "cfg_parallel", "decode_ranks"]
    if layout.expert_boundary is not None:
        names += ["expert_boundary", "share_experts"]
    return {"description": str(layout), **{name: getattr(layout, name) for name in names}}


def times_of(forecast: Forecast) -> dict[str, float]:
    """The times of a forecast, for JSON."""
    times = forecast.makespan, forecast.first_clip, forecast.seconds_per_clip
    return dict(zip(_TIMES, times, strict=True))


def _details(forecast: Forecast, steady_seconds: float) -> dict[str, Any]:
    return {
        **times_of(forecast),
        "seconds_per_clip": steady_seconds,
        "bubble": forecast.bubble,
        "jitter_seconds": forecast.jitter,
        "latency_seconds": forecast.latency._asdict(),
    }


def _gib(peaks: Iterable[float | None]) -> str:
    """Lowest and highest peak of several ranks; a dash if one is unknown."""
    values = list(peaks)
    known = sorted(peak for peak in values if peak is not None)
    if not known or len(known) < len(values):
        return "-"
    return "..".join(dict.fromkeys(f"{peak:.1f}" for peak in (known[0], known[-1])))


def show_comparison(console: Console, counts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Prints layouts side by side, then notes on them."""
    if console.as_json:
        about = {name: counts[name] for name in ("num_steps", "world_size")}
        about |= {"clips": counts["num_clips"], "layouts": [*map(_row_json, rows)]}
        console.json({"schema_version": SCHEMA_VERSION, **about})
        return
    console.table([_compared(row) for row in rows])
    console.result()
    console.result(f"total: {counted(counts['num_clips'], 'clip')} on {counts['world_size']} ranks")
    console.result("per min: clips of a long queue; all others in seconds, of these clips")
    console.result(
        "first: as of a clip alone; mean: of a clip from its start; jitter: between clips"
    )
    if any(row.name == "pairs" for row in rows):
        console.result("pairs: data parallel with --cfg-parallel 2, for clips with guidance")
    for row in rows:
        if row.note:
            console.prose(f"{row.name}: {row.note}")
        if row.layout is not None:
            _warn_of_idle_ranks(console, row.layout, f"{row.name}: ")


def _compared(row: Row) -> dict[str, str]:
    forecast, cells = row.forecast, ["-"] * len(_COMPARED)
    if forecast is not None and row.layout is not None:
        rate = f"{60 / row.seconds_per_clip:.2f}" if row.seconds_per_clip else "-"
        times = forecast.first_clip, forecast.latency.mean, forecast.jitter
        cells = [f"{forecast.makespan:.1f}", rate, *(f"{time:.1f}" for time in times)]
        cells += [_gib(row.layout.peak_gib), f"{forecast.bubble:.0%}"]
    return {"layout": row.name, **dict(zip(_COMPARED, cells, strict=True))}


def _row_json(row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {"layout": None, "forecast": None}
    if row.forecast is not None and row.layout is not None:
        facts["layout"] = _facts(row.layout) | {"peak_gib": row.layout.peak_gib}
        facts["forecast"] = _details(row.forecast, row.seconds_per_clip)
    return {"name": row.name, "note": row.note or None, **facts}
