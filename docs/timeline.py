"""Timeline picture, drawn with matplotlib from spans: a lane for each rank, over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from svdpp.media import output_files
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0
_MARGIN = 1.5  # inches for title, axis and legend, for all panels together
_BAR = 0.84
_CROWD = 12  # with more ranks, the lanes are too low for text
_DPI = 140
# Colours of clips. Successive colours differ clearly. No clip is grey, the colour of waiting.
_COLOURS = (
    *("#3b76af", "#ee8636", "#519e3e", "#c53a32", "#8d69b8"),
    *("#84584e", "#d57ebe", "#2f9aa0", "#b8a21e"),
)
_WAIT = "#e6e6e6"
_HATCHES = {Kind.ENCODE: "......", Kind.DENOISE: "", Kind.DECODE: "//////"}
# Units of the time axis: name, its length in seconds, and the longest timeline in seconds for which
# the unit is used.
_UNITS = (("seconds", 1.0, 600.0), ("minutes", 60.0, 21_600.0), ("hours", 3600.0, math.inf))


class Panel(NamedTuple):
    """Part of a timeline picture with its own title. All panels share the time axis."""

    title: str
    spans: Sequence[Span]
    """Spans with times in seconds. The start of the first span is at 0 on the time axis."""


def draw_timeline(panels: Sequence[Panel], world_size: int, path: Path) -> None:
    """Draw a timeline: a lane for each rank, a colour for each clip, encode dotted, decode hatched.

    Args:
        panels: Panels from top to bottom; at least one, each with at least one span.
        world_size: Number of lanes in each panel.
        path: Picture file, `.svg` or `.png`. An existing file is replaced.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    suffix = path.suffix.lower()
    lane = max(0.13, min(0.42, 3.0 / world_size))  # in inches; two panels of 28 ranks fit a page
    # A fixed salt replaces matplotlib's random ids, so equal spans give equal files.
    with mpl.rc_context({"hatch.linewidth": 0.7, "svg.hashsalt": "svdpp", "font.size": 9}):
        height = len(panels) * (world_size * lane + 0.4) + _MARGIN - 0.4
        layout = ConstrainedLayoutEngine(h_pad=0.08)
        figure = Figure(figsize=(_WIDTH, height), layout=layout)
        _draw_panels(figure, panels, world_size)
        with output_files.atomic_output(str(path), suffix) as temporary:
            metadata = {"Date": None} if suffix == ".svg" else {"Software": "svdpp"}
            figure.savefig(temporary, format=suffix[1:], dpi=_DPI, metadata=metadata)


def _draw_panels(figure: Figure, panels: Sequence[Panel], world_size: int) -> None:
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    seconds = max(_end(panel.spans) - _begin(panel.spans) for panel in panels)
    unit, unit_seconds, _ = next(unit for unit in _UNITS if seconds < unit[2])
    all_axes[-1].set_xlim(0, 1.005 * seconds / unit_seconds)
    all_axes[-1].set_xlabel(f"{unit}; one colour a clip")
    for axes, panel in zip(all_axes, panels, strict=True):
        _prepare_axes(axes, world_size, panel.title)
        _draw_spans(axes, panel.spans, unit_seconds)
    _add_legend(figure)


def _begin(spans: Iterable[Span]) -> float:
    return min(span.start for span in spans)


def _end(spans: Iterable[Span]) -> float:
    return max(span.end for span in spans)


def _prepare_axes(axes: Axes, world_size: int, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, pad=5)
    axes.set_ylim(world_size - 0.5, -0.5)
    crowded = world_size > _CROWD
    names = [str(rank) if crowded else f"rank {rank}" for rank in range(world_size)]
    axes.set_yticks(range(world_size), names)
    axes.tick_params(axis="y", length=0, labelsize=6.5 if crowded else 9)
    if crowded:
        axes.set_ylabel("rank")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#d0d0d0", linewidth=0.5)
    axes.set_axisbelow(True)


def _draw_spans(axes: Axes, spans: Sequence[Span], unit: float) -> None:
    begin, narrow = _begin(spans), (_end(spans) - _begin(spans)) / 250
    for rank in sorted({span.rank for span in spans}):
        own, lane = [span for span in spans if span.rank == rank], (rank - _BAR / 2, _BAR)
        axes.broken_barh([(0.0, (_end(own) - begin) / unit)], lane, facecolors=_WAIT)
        for kind, hatch in _HATCHES.items():
            chosen = [span for span in own if span.action.kind is kind]
            axes.broken_barh(
                [((s.start - begin) / unit, (s.end - s.start) / unit) for s in chosen],
                lane,
                facecolors=[_COLOURS[s.action.clip % len(_COLOURS)] for s in chosen],
                edgecolors="white",
                # A bar of a few pixels has no white edge, because the edge would cover the bar.
                linewidths=[0.6 if s.end - s.start > narrow else 0.0 for s in chosen],
                hatch=hatch,
            )


def _add_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(facecolor="#7a7a7a", edgecolor="white", hatch=hatch, label=kind.lower())
        for kind, hatch in _HATCHES.items()
    ]
    entries.append(Patch(facecolor=_WAIT, label="wait"))
    figure.legend(
        handles=entries,
        loc="outside lower right",
        ncols=len(entries),
        frameon=False,
        handleheight=1.2,
    )
