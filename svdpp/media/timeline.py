"""The timeline picture: ranks x time, drawn from spans with matplotlib.

matplotlib belongs to the extra `pictures`; it is imported only to draw.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from svdpp.errors import RequestError
from svdpp.media import output_files
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0
_MARGIN = 1.5  # of title, axis and legend, for all panels together
_BAR = 0.84
_CROWD = 12  # with more ranks, lanes are too low for words
_DPI = 140
# Successive clips differ clearly. No colour is grey, which means waiting.
_COLOURS = (
    *("#3b76af", "#ee8636", "#519e3e", "#c53a32", "#8d69b8"),
    *("#84584e", "#d57ebe", "#2f9aa0", "#b8a21e"),
)
_WAIT = "#e6e6e6"
_HATCHES = {Kind.ENCODE: "......", Kind.DENOISE: "", Kind.DECODE: "//////"}
_NAMES = {Kind.ENCODE: "encode", Kind.DENOISE: "denoise", Kind.DECODE: "decode"}


class Panel(NamedTuple):
    """One part of the picture; all panels share the time axis."""

    title: str
    spans: Sequence[Span]
    """In seconds; the time of a panel starts at its first span."""


def check_can_draw() -> None:
    """Check that matplotlib is installed, without importing it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            "a timeline is drawn with matplotlib, which is not installed",
            "pip install 'svdpp[pictures]'",
        )


def draw_timeline(panels: Sequence[Panel], world_size: int, path: Path) -> None:
    """Draw ranks x time: a colour for each clip, encode dotted, decode hatched, waiting grey.

    Args:
        panels: from top to bottom; at least one, each with at least one span.
        world_size: number of lanes in each panel.
        path: `.svg` or `.png`; an existing file is replaced.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    suffix = path.suffix.lower()
    # Without date and random ids, equal spans give equal files.
    with mpl.rc_context({"hatch.linewidth": 0.7, "svg.hashsalt": "svdpp", "font.size": 9}):
        height = len(panels) * (world_size * _lane_inches(world_size) + 0.4) + _MARGIN - 0.4
        layout = ConstrainedLayoutEngine(h_pad=0.08)
        figure = Figure(figsize=(_WIDTH, height), layout=layout)
        _draw_panels(figure, panels, world_size)
        with output_files.atomic_output(str(path), suffix) as temporary:
            metadata = {"Date": None} if suffix == ".svg" else {"Software": "svdpp"}
            figure.savefig(temporary, format=suffix[1:], dpi=_DPI, metadata=metadata)


def _lane_inches(world_size: int) -> float:
    """Height of a lane; lower for more ranks, so that two panels of 28 fit a page."""
    return max(0.13, min(0.42, 3.0 / world_size))


def _draw_panels(figure: Figure, panels: Sequence[Panel], world_size: int) -> None:
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    seconds = max(_duration(panel.spans) for panel in panels)
    unit, unit_seconds = _time_unit(seconds)
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set_xlim(0, 1.005 * seconds / unit_seconds)
        _prepare_axes(axes, world_size, panel.title)
        _draw_spans(axes, panel.spans, unit_seconds)
    all_axes[-1].set_xlabel(f"{unit}; one colour a clip")
    _add_legend(figure)
    figure.draw_without_rendering()  # labels depend on the widths of bars, which the layout sets
    _label_clips(all_axes, panels, world_size, unit_seconds)


def _duration(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _time_unit(seconds: float) -> tuple[str, float]:
    """The unit of the time axis, and its length in seconds."""
    if seconds < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 6 * 3600 else ("hours", 3600.0)


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
    """Draw one collection of rectangles for each kind, which is fast for thousands of bars."""
    from matplotlib.collections import PolyCollection

    begin, narrow = min(span.start for span in spans), _duration(spans) / 250
    waits = [
        _rectangle(rank, 0.0, (max(s.end for s in spans if s.rank == rank) - begin) / unit)
        for rank in sorted({span.rank for span in spans})
    ]
    axes.add_collection(PolyCollection(waits, facecolors=_WAIT, edgecolors="none"))
    for kind, hatch in _HATCHES.items():
        chosen = [span for span in spans if span.action.kind is kind]
        times = [((span.start - begin) / unit, (span.end - begin) / unit) for span in chosen]
        bars = [_rectangle(s.rank, *ends) for s, ends in zip(chosen, times, strict=True)]
        colours = [_COLOURS[span.action.clip % len(_COLOURS)] for span in chosen]
        # A white edge would cover a bar of a few pixels.
        edges = [0.6 if s.end - s.start > narrow else 0.0 for s in chosen]
        axes.add_collection(
            PolyCollection(
                bars, facecolors=colours, edgecolors="white", linewidths=edges, hatch=hatch
            )
        )


def _rectangle(rank: int, left: float, right: float) -> list[tuple[float, float]]:
    low, high = rank - _BAR / 2, rank + _BAR / 2
    return [(left, low), (right, low), (right, high), (left, high)]


def _label_clips(
    all_axes: Iterable[Axes], panels: Sequence[Panel], world_size: int, unit: float
) -> None:
    """Label each DENOISE bar that is wide enough with the number of its clip.

    The label is "clip 3" if all labels have enough space for that, else "3", so that all labels
    have one form.
    """
    size = 5.5 if world_size > _CROWD else 7.5
    labels = []
    for axes, panel in zip(all_axes, panels, strict=True):
        begin = min(span.start for span in panel.spans)
        points = axes.get_window_extent().width / axes.figure.dpi * 72 / axes.get_xlim()[1]
        for rank, action, start, end in panel.spans:
            letters = ((end - start) / unit * points - 4) / (0.6 * size)
            if action.kind is Kind.DENOISE and letters >= len(str(action.clip)):
                middle = ((start + end) / 2 - begin) / unit
                labels.append((axes, middle, rank, action.clip, letters))
    in_words = all(letters >= len(f"clip {clip}") for *_, clip, letters in labels)
    for axes, middle, rank, clip, _ in labels:
        text = f"clip {clip}" if in_words else f"{clip}"
        drawn = axes.text(middle, rank, text, fontsize=size, color="white")
        drawn.set(ha="center", va="center_baseline")


def _add_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(facecolor="#7a7a7a", edgecolor="white", hatch=_HATCHES[kind], label=name)
        for kind, name in _NAMES.items()
    ]
    entries.append(Patch(facecolor=_WAIT, label="wait"))
    figure.legend(
        handles=entries,
        loc="outside lower right",
        ncols=len(entries),
        frameon=False,
        handleheight=1.2,
    )
