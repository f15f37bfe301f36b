"""The output of `svdpp plan`: one layout with picture and forecast, or several compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console, counted
from svdpp.plan.experts import EXPERTS
from svdpp.plan.forecast import Forecast, replay
from svdpp.plan.large_forecast import forecast_layout, steady_seconds_per_clip
from svdpp.plan.layout import Layout, StepShare

if TYPE_CHECKING:
    from svdpp.plan.choose import Row

#: Of the JSON of `svdpp plan`.
SCHEMA_VERSION = 2

# Most rows and picture lines that are still readable on a terminal.
_MAX_ROWS = 100
# Visits of clips at ranks: about a second of drawing.
_MAX_DRAWN = 50_000
_CLIPS_WHOSE_CUTS_ARE_SHOWN = 4
_MAX_CUTS = 16
_COMPARED = ("layout", "total", "per min", "first", "mean", "jitter", "GiB", "idle")


class _Timed:
    def __init__(self, layout: Layout, num_clips: int) -> None:
        self.layout = layout
        self.forecast = forecast_layout(layout, num_clips)
        #: Of each clip of a long queue.
        self.steady_seconds = steady_seconds_per_clip(layout)

    def show(self, console: Console, what: str) -> None:
        console.result(
            f"{what} on {self.layout.world_size} ranks: {self.forecast.makespan:.4g} s, first "
            f"after {self.forecast.first_clip:.4g} s, bubble {self.forecast.bubble:.0%}"
        )
        console.result(f"  of a long queue, one clip every {self.steady_seconds:.4g} s")


def show_layout(console: Console, layout: Layout, num_clips: int, reason: str = "") -> None:
    """Prints the ranks, picture and forecast of a layout, with the forecast of data parallel.

    `reason` says why `auto` chose the layout.
    """
    alone: dict[str, Any] = {"split": "uniform", "decoders": 1, "cfg_parallel": 1}
    alone |= {"replicas": layout.world_size, "decode_ranks": 1}
    ours = _Timed(layout, num_clips)
    theirs = _Timed(replace(layout, **alone), num_clips)
    if console.as_json:
        console.json(_layout_json(ours, theirs, reason))
        return
    _print_ranks(console, layout)
    _print_cuts(console, layout, num_clips)
    console.result()
    _print_picture(console, layout, num_clips)
    console.result()
    if reason:
        console.prose(f"auto picks {reason}")
    ours.show(console, counted(num_clips, "clip"))
    if layout.split != "uniform" or reason:
        latency = ours.forecast.latency
        console.result(
            f"a clip takes {latency.mean:.4g} s from its encode: "
            f"p50 {latency.p50:.4g}, p90 {latency.p90:.4g}, p99 {latency.p99:.4g}"
        )
    if layout.replica_size * layout.cfg_parallel > 1:
        theirs.show(console, "data parallel")
    _warn_of_idle_ranks(console, layout)


def _print_ranks(console: Console, layout: Layout) -> None:
    """Prints a row for each rank; if all replicas are alike, only those of the first."""
    alike = layout.replicas_are_alike
    replicas = range(1 if alike else layout.replicas)
    shares = [share for replica in replicas for share in layout.shares(replica)]
    console.table([_rank_row(layout, share) for share in shares[:_MAX_ROWS]])
    if len(shares) > _MAX_ROWS:
        console.result(f"... and {len(shares) - _MAX_ROWS} more ranks")
    if alike and layout.replicas > 1:
        console.result(f"and so on, in {layout.replicas} replicas of {layout.replica_size}")


def _rank_row(layout: Layout, share: StepShare) -> dict[str, str]:
    rank, row = share.rank, {"rank": str(share.rank)}
    if layout.costs.ranks_per_host is not None:
        row["host"] = str(layout.costs.host_of(rank))
    row |= {"start": str(share.start), "end": str(share.end), "steps": f"{share.mean_steps:.4g}"}
    if layout.expert_boundary is not None:
        names = _expert_names(layout, rank)
        row["expert"] = "both" if len(names) > 1 else "".join(names)
    if any(peak is not None for peak in layout.peak_gib):
        row["GiB"] = gib([layout.peak_gib[rank]])
    return row


def _expert_names(layout: Layout, rank: int) -> list[str]:
    return [EXPERTS[expert] for expert in sorted(layout.roles[rank].experts)]


def _print_cuts(console: Console, layout: Layout, num_clips: int) -> None:
    if layout.split != "alternating" or not 1 < layout.num_stages <= _MAX_CUTS:
        return
    console.result()
    for clip in range(min(num_clips, _CLIPS_WHOSE_CUTS_ARE_SHOWN)):
        inner = " ".join(map(str, layout.cuts(clip * layout.replicas)[1:-1]))
        console.result(f"clip {clip * layout.replicas} is cut at {inner}")


def _print_picture(console: Console, layout: Layout, num_clips: int) -> None:
    """Prints the rank x time grid, of the first clips if there are many."""
    if layout.world_size > _MAX_ROWS:
        console.result(f"(no picture: {layout.world_size} ranks are too many)")
        return
    if num_clips > max(1, _MAX_DRAWN // layout.num_stages):
        num_clips = min(num_clips, 4 * layout.world_size)
        console.result(f"the first {num_clips} clips:")
    console.grid(replay(layout.schedule(num_clips), layout.costs), layout.world_size)
    console.result("time ->   one sign per clip, < encode, > decode, . idle")


def _warn_of_idle_ranks(console: Console, layout: Layout, name: str = "") -> None:
    idle = sum(not (role.encode or role.denoise or role.decode) for role in layout.roles)
    if idle:
        console.info(f"warning: {name}{idle} of {layout.world_size} ranks have nothing to do")


def _layout_json(ours: _Timed, data_parallel: _Timed, reason: str) -> dict[str, Any]:
    layout = ours.layout
    of_experts = layout.expert_boundary is not None
    return {
        "schema_version": SCHEMA_VERSION,
        "num_steps": layout.num_steps,
        "world_size": layout.world_size,
        "split": layout.split,
        "layout": _facts(layout) | {"reason": reason or None},
        "ranks": [
            share._asdict()
            | layout.roles[share.rank].parts
            | ({"experts": _expert_names(layout, share.rank)} if of_experts else {})
            | {"peak_gib": layout.peak_gib[share.rank]}
            for share in layout.all_shares
        ],
        "costs": layout.costs.to_json(),
        "forecast": {
            "clips": ours.forecast.clips,
            **_details(ours.forecast, ours.steady_seconds),
            "data_parallel": times_of(data_parallel.forecast, data_parallel.steady_seconds),
        },
    }


def _facts(layout: Layout) -> dict[str, Any]:
    """The properties of a layout, for JSON; those of experts only if the model has two."""
    names = ["split", "replicas", "decoders", "cfg_parallel", "decode_ranks"]
    if layout.expert_boundary is not None:
        names += ["expert_boundary", "share_experts"]
    return {"description": str(layout), **{name: getattr(layout, name) for name in names}}


def times_of(forecast: Forecast, seconds_per_clip: float | None = None) -> dict[str, float]:
    """Times of a forecast, for JSON; `seconds_per_clip` is that of a long queue, if known."""
    own = forecast.seconds_per_clip
    return {
        "makespan_seconds": forecast.makespan,
        "first_clip_seconds": forecast.first_clip,
        "seconds_per_clip": own if seconds_per_clip is None else seconds_per_clip,
    }


def _details(forecast: Forecast, seconds_per_clip: float) -> dict[str, Any]:
    return {
        **times_of(forecast, seconds_per_clip),
        "bubble": forecast.bubble,
        "jitter_seconds": forecast.jitter,
        "latency_seconds": forecast.latency._asdict(),
    }


def gib(peaks: Iterable[float | None]) -> str:
    """Lowest and highest peak of several ranks; a dash if one is unknown."""
    known = list(peaks)
    values = sorted(peak for peak in known if peak is not None)
    if not values or len(values) < len(known):
        return "-"
    texts = dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1]))
    return "..".join(texts)


def show_comparison(console: Console, counts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Prints layouts side by side, then notes on them."""
    num_clips = counts["num_clips"]
    if console.as_json:
        sizes = {name: counts[name] for name in ("num_steps", "world_size")}
        layouts = [_row_json(row) for row in rows]
        about = {**sizes, "clips": num_clips, "layouts": layouts}
        console.json({"schema_version": SCHEMA_VERSION, **about})
        return
    console.table([dict(zip(_COMPARED, _compared(row), strict=True)) for row in rows])
    console.result()
    console.result(f"total: {counted(num_clips, 'clip')} on {counts['world_size']} ranks")
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


def _compared(row: Row) -> tuple[str, ...]:
    forecast = row.forecast
    if forecast is None or row.layout is None:
        return (row.name, *("-" * len(_COMPARED[1:])))
    return (
        row.name,
        f"{forecast.makespan:.1f}",
        f"{60 / row.seconds_per_clip:.2f}" if row.seconds_per_clip else "-",
        f"{forecast.first_clip:.1f}",
        f"{forecast.latency.mean:.1f}",
        f"{forecast.jitter:.1f}",
        gib(row.layout.peak_gib),
        f"{forecast.bubble:.0%}",
    )


def _row_json(row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {"layout": None, "forecast": None}
    if row.forecast is not None and row.layout is not None:
        facts["layout"] = _facts(row.layout) | {"peak_gib": row.layout.peak_gib}
        facts["forecast"] = _details(row.forecast, row.seconds_per_clip)
    return {"name": row.name, "note": row.note or None, **facts}
