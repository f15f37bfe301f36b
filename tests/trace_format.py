"""Holds a trace against the rules of "Trace Event Format", Google, 2016 (JSON array form)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_TraceEvent = Mapping[str, Any]
_Slice = tuple[float, float]

#: The documented metadata, with the argument that each needs and its type.
_METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
#: The fields that each phase needs besides `ph`, `pid` and `tid`.
_REQUIRED = {
    "X": {"name", "ts", "dur"},
    "i": {"name", "ts", "s"},
    "C": {"name", "ts", "args"},
    "M": {"name", "args"},
    **{phase: {"name", "cat", "ts", "id"} for phase in "stf"},
}


def read_trace(text: str) -> list[dict[str, Any]]:
    """The events of a file; the format lets a writer leave the closing bracket out."""
    events = json.loads(text if text.rstrip().endswith("]") else text + "]")
    assert isinstance(events, list)
    return events


def check_trace(events: Iterable[_TraceEvent], *, is_whole: bool = True) -> None:
    """Checks phases, fields, nesting, flows, counters and metadata.

    Args:
        is_whole: whether the writer has closed the file; else the last arrows may have one end.
    """
    events = list(events)
    for event in events:
        _check_fields(event)
    slices = _slices(events)
    for of_track in slices.values():
        _check_nesting(of_track)
    _check_flows([event for event in events if event["ph"] in "stf"], slices, is_whole=is_whole)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named, "a track has no name"


def _check_fields(event: _TraceEvent) -> None:
    phase = event["ph"]
    assert phase in _REQUIRED, f"unknown phase {phase!r}"
    missing = _REQUIRED[phase] - event.keys()
    assert not missing, f"{phase} without {missing}"
    for name in ("pid", "tid"):
        assert type(event[name]) is int, f"{name} is no integer"
    assert isinstance(event.get("args", {}), dict)
    for name in {"ts", "dur"} & event.keys():
        assert _is_number(event[name]), f"{name} is no number"
        assert event[name] >= 0, f"{name} is negative"
    if phase == "M":
        assert event["name"] in _METADATA, f"no metadata {event['name']!r}"
        argument, kind = _METADATA[event["name"]]
        assert type(event["args"][argument]) is kind
    elif phase == "C":
        assert event["args"], "a counter without a value"
        assert all(map(_is_number, event["args"].values())), "a counter that is no number"
    elif phase == "i":
        assert event["s"] in "gpt"
    elif phase in "stf":
        assert isinstance(event["id"], str | int)
        assert event.get("bp", "e") == "e"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _slices(events: Iterable[_TraceEvent]) -> dict[tuple[int, int], list[_Slice]]:
    """Start and end of all slices of each track, in the order of the file."""
    slices: dict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return slices


def _check_nesting(slices: list[_Slice]) -> None:
    """A slice ends before the next begins, or contains it; of two that start together, the file has
    the longer one first."""
    above: list[float] = []
    for start, end in sorted(slices, key=lambda each: each[0]):  # stable
        while above and above[-1] <= start:
            above.pop()
        assert not above or end <= above[-1], "slices that cross"
        above.append(end)


def _check_flows(
    flows: Iterable[_TraceEvent], slices: Mapping[Any, list[_Slice]], *, is_whole: bool
) -> None:
    """Each flow has one start and one finish, in that order in time, each within a slice."""
    by_id: dict[tuple[Any, ...], list[_TraceEvent]] = defaultdict(list)
    for event in flows:
        by_id[event["cat"], event["name"], event["id"]].append(event)
        track = slices[event["pid"], event["tid"]]
        assert any(start <= event["ts"] <= end for start, end in track), "an arrow without a slice"
    for of_flow in by_id.values():
        phases = [event["ph"] for event in of_flow]
        assert phases.count("s") <= 1, "two starts of one flow"
        assert phases.count("f") <= 1, "two ends of one flow"
        if is_whole:
            assert {"s", "f"} <= set(phases), "a flow with one end"
        times = {event["ph"]: event["ts"] for event in of_flow if event["ph"] != "t"}
        first, last = times.get("s", 0), times.get("f", float("inf"))
        assert all(first <= event["ts"] <= last for event in of_flow), "a flow back in time"
