"""Check of a trace file against Google's specification "Trace Event Format", 2016 (JSON array
form).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_TraceEvent = Mapping[str, Any]
_Slice = tuple[float, float]

#: Required fields of an event by its phase, in addition to `ph`, `pid`, `tid` and `name`.
_REQUIRED = {
    "X": {"ts", "dur"},
    "i": {"ts", "s"},
    "C": {"ts", "args"},
    "M": {"args"},
    **{phase: {"cat", "ts", "id"} for phase in "sf"},
}


def read_trace(text: str) -> list[dict[str, Any]]:
    """Return the events of a trace file, whose closing bracket may be missing."""
    events = json.loads(text if text.rstrip().endswith("]") else text + "]")
    assert isinstance(events, list)
    return events


def check_trace(events: Iterable[_TraceEvent], *, is_whole: bool = True) -> None:
    """Check the phases, fields, nesting, flows and track names of a Chrome trace.

    Args:
        is_whole: Whether the writer has closed the file. If False, the last flow arrows may lack an
            end.
    """
    slices: dict[tuple[int, int], list[_Slice]] = defaultdict(list)
    flows: dict[tuple[Any, ...], list[_TraceEvent]] = defaultdict(list)
    named = set()
    for event in events:
        _check_fields(event)
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
        elif event["name"] == "thread_name":
            named.add(track)
    assert set(slices) <= named, "a track has no name"
    for of_track in slices.values():
        _check_nesting(of_track)
    for flow in flows.values():
        _check_flow(flow, slices, is_whole=is_whole)


def _check_fields(event: _TraceEvent) -> None:
    phase = event["ph"]
    missing = {"pid", "tid", "name", *_REQUIRED[phase]} - event.keys()
    assert not missing, f"{phase} without {missing}"
    assert isinstance(event.get("args", {}), dict)
    for name in {"ts", "dur"} & event.keys():
        assert event[name] >= 0, f"{name} is negative"


def _check_nesting(slices: list[_Slice]) -> None:
    """Check that a track's slices in a trace nest: one ends before another starts, or contains it.

    Of two slices that start at the same time, the longer one must come first in the file.
    """
    above: list[float] = []
    # The sort is stable, so slices with equal starts keep the order of the file.
    for start, end in sorted(slices, key=lambda each: each[0]):
        while above and above[-1] <= start:
            above.pop()
        assert not above or end <= above[-1], "slices that cross"
        above.append(end)


def _check_flow(
    flow: list[_TraceEvent], slices: Mapping[Any, list[_Slice]], *, is_whole: bool
) -> None:
    """Check that a trace's flow has one start and one later finish, each within a slice."""
    times = {event["ph"]: event["ts"] for event in flow}
    assert len(times) == len(flow), "two starts, or two ends, of one flow"
    assert len(times) == 2 or not is_whole, "a flow with one end"
    assert times.get("s", 0) <= times.get("f", float("inf")), "a flow back in time"
    for event in flow:
        track = slices[event["pid"], event["tid"]]
        assert any(start <= event["ts"] <= end for start, end in track), "an arrow without a slice"
