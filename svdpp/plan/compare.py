"""The comparison of layouts, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from svdpp.errors import RequestError
from svdpp.plan.choose import Choice, Pairs, choose_layout, decoders_needed
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast
from svdpp.plan.large_forecast import forecast_layout, steady_seconds_per_clip
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.split import check_counts


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of a comparison.

    A layout that cannot run has no forecast, and its note gives the reason. Otherwise the note
    says why the layout was chosen, or which rank has too little memory for it.
    """

    name: str
    layout: Layout | None = None
    forecast: Forecast | None = None
    seconds_per_clip: float = 0.0
    """Mean time between finished clips in a long queue."""
    peak_gib: tuple[float | None, ...] = ()
    note: str = ""


def compare_layouts(
    *,
    num_steps: int,
    world_size: int,
    num_clips: int,
    costs: Costs,
    memory_gib: Sequence[float] = (),
    expert_boundary: int | None = None,
    share_experts: bool = False,
    pairs: Pairs = "no",
    sooner: bool = False,
) -> list[Row]:
    """The layouts that `plan --compare` shows.

    They are one replica with each split, one with several decoders, the layout of `choose_layout`,
    and data parallel. Arguments as for `choose_layout` and `forecast_layout`.
    """
    check_counts(num_steps, world_size)
    costs.check_world(world_size)
    decoders = min(world_size, max(2, decoders_needed(num_steps, world_size, costs)))
    counts: dict[str, Any] = {
        "num_steps": num_steps,
        "world_size": world_size,
        "costs": costs,
        "expert_boundary": expert_boundary,
        "share_experts": share_experts,
    }

    def choose(options: dict[str, Any] | None) -> Choice:
        if options is not None:
            layout = Layout(**counts, **options)
            return Choice(layout=layout, reason=_needs_more(layout, memory_gib))
        known = pairs if pairs == "exact" else "no"  # else the last row says it
        limits: dict[str, Any] = {"memory_gib": memory_gib, "pairs": known, "sooner": sooner}
        return choose_layout(**counts, **limits, num_clips=num_clips)

    rows: dict[str, dict[str, Any] | None] = {
        **{split: {"split": split} for split in SPLITS},
        f"{decoders} decoders": {"split": "dithered", "decoders": decoders},
        "auto": None,
        "data parallel": {"replicas": world_size},
        "pairs": {"replicas": world_size // 2, "cfg_parallel": 2},
    }
    if world_size % 2:
        del rows["pairs"]
    return [_row(name, partial(choose, options), num_clips) for name, options in rows.items()]


def _row(name: str, choose: Callable[[], Choice], num_clips: int) -> Row:
    try:
        choice = choose()
        forecast = forecast_layout(choice.layout, num_clips)
    except RequestError as error:
        return Row(name=name, note=error.message)
    return Row(
        name=name,
        layout=choice.layout,
        forecast=forecast,
        seconds_per_clip=steady_seconds_per_clip(choice.layout),
        peak_gib=choice.layout.peak_gib,
        note=choice.reason,
    )


def _needs_more(layout: Layout, memory_gib: Sequence[float]) -> str:
    """Names the first rank that is known to need more memory than it has; empty if none does."""
    if not memory_gib:
        return ""
    for rank, (has, needs) in enumerate(zip(memory_gib, layout.peak_gib, strict=False)):
        if needs is not None and needs > has:
            return f"rank {rank} needs {needs:.4g} GiB and has {has:.4g}"
    return ""
