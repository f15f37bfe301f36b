"""The rank x time grid in text, with marks for errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span

IDLE = "."
ENCODING = "<"
DECODING = ">"
_CLIP_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def clip_sign(clip: int) -> str:
    """The character of a clip; the characters repeat after 62 clips."""
    return _CLIP_SIGNS[clip % len(_CLIP_SIGNS)]


def draw_grid(
    spans: Sequence[Span],
    world_size: int,
    *,
    width: int = 80,
    marks: Mapping[int, str] | None = None,
) -> list[str]:
    """Draw one line for each rank; each column shows what the rank did for most of its time.

    Fewer than `width` columns are drawn if the run is shorter than that many steps. `marks` are
    remarks behind the lines of ranks, such as `died here`.

    Returns:
        The lines, without line ends. A step shows the clip's sign, encode `<`, decode `>`, idle
        `.`.
    """
    begin = min((span.start for span in spans), default=0.0)
    total = max((span.end for span in spans), default=0.0) - begin
    columns = _num_columns(spans, total, width)
    cells = [
        _cells([s for s in spans if s.rank == rank], begin, total, columns)
        for rank in range(world_size)
    ]
    digits = len(str(world_size - 1))
    lines = []
    for rank, row in enumerate(cells):
        mark = f"  <-- {marks[rank]}" if marks and rank in marks else ""
        lines.append(f"rank {rank:>{digits}} |{row}|{mark}")
    return lines


def _num_columns(spans: Sequence[Span], total: float, width: int) -> int:
    """A column for each step, or for each two, three and so on, so that `width` is enough."""
    step = min(
        (
            (span.end - span.start) / (span.action.end - span.action.start)
            for span in spans
            if span.action.kind is Kind.DENOISE and span.end > span.start
        ),
        default=0.0,
    )
    # A step can be negligible compared with a decode.
    whole = round(total / step) if step * 1e6 > total else width
    steps_a_column = max(1, math.ceil(whole / width))
    return max(1, whole // steps_a_column)


def _cells(spans: Sequence[Span], begin: float, total: float, columns: int) -> str:
    if not total:
        return IDLE * columns
    column = total / columns
    share = [{IDLE: 0.0} for _ in range(columns)]
    for span in spans:
        low, high = (span.start - begin) / column, (span.end - begin) / column
        for index in range(max(0, int(low)), min(columns, int(high) + 1)):
            covered = min(high, index + 1) - max(low, index)
            share[index][_sign(span)] = share[index].get(_sign(span), 0.0) + max(covered, 0.0)
    for cell in share:
        cell[IDLE] = 1.0 - sum(cell.values())
    return "".join(max(cell, key=lambda sign: round(cell[sign], 9)) for cell in share)


def _sign(span: Span) -> str:
    if span.action.kind is Kind.ENCODE:
        return ENCODING
    if span.action.kind is Kind.DECODE:
        return DECODING
    return clip_sign(span.action.clip)
