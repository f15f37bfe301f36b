"""Owns the trace file: a run's measurements in Chrome's trace event format, for Perfetto.

Each rank is a process, with a track for compute (steps within their actions) and a track for each
link. The format is "Trace Event Format", Google, 2016, linked from https://perfetto.dev/docs/faq
(JSON trace format).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from svdpp.driver.trace import Trace, TransferSpan
from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind

_COMPUTE = 0

_TraceEvent = dict[str, Any]


def write_chrome_trace(trace: Trace, path: Path, about: Mapping[str, Any]) -> None:
    """Writes `trace` as JSON, one event per line.

    Args:
        trace: of a run, finished or not.
        path: of the file; replaced if it exists.
        about: plain values that describe the run; viewers show them as the trace's metadata.

    Raises:
        OutputError: the file cannot be written.
    """
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
    with output_files.atomic_output(str(path), ".json") as temporary, temporary.open("w") as file:
        file.write(head[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, trace_events(trace))))
        file.write("\n]}\n")


def trace_events(trace: Trace) -> list[_TraceEvent]:
    """The names of all tracks, then all events by their start; time 0 is the first start."""
    tracks = _link_tracks(trace.transfers)
    starts = [span.start for span in trace.spans]
    starts += [transfer.start for transfer in trace.transfers]
    starts += [wait.start for wait in trace.waits]
    begin = min(starts, default=0.0)
    events = [*_compute_events(trace, begin), *_transfer_events(trace.transfers, tracks, begin)]
    # Of two events with the same start the longer one contains the other, and must come first.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return [*_names(trace, tracks), *events]


def _names(trace: Trace, tracks: Mapping[tuple[int, str, int], int]) -> Iterator[_TraceEvent]:
    for rank in range(trace.world_size):
        device = trace.devices.get(rank, "")
        yield _metadata(rank, _COMPUTE, "process_name", name=f"rank {rank} ({device})")
        yield _metadata(rank, _COMPUTE, "process_sort_index", sort_index=rank)
        yield _metadata(rank, _COMPUTE, "thread_name", name="compute")
    for (rank, direction, peer), track in tracks.items():
        name = f"{'from' if direction == 'recv' else 'to'} rank {peer}"
        yield _metadata(rank, track, "thread_name", name=name)
        yield _metadata(rank, track, "thread_sort_index", sort_index=track)


def _metadata(rank: int, track: int, what: str, **values: Any) -> _TraceEvent:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": values}


def _link_tracks(transfers: Iterable[TransferSpan]) -> dict[tuple[int, str, int], int]:
    """The track of each (rank, direction, peer); transfers of one link never overlap."""
    tracks: dict[tuple[int, str, int], int] = {}
    for rank, direction, peer in sorted(
        {(transfer.rank, transfer.direction, transfer.peer) for transfer in transfers}
    ):
        tracks[rank, direction, peer] = 1 + sum(1 for other, _, _ in tracks if other == rank)
    return tracks


def _compute_events(trace: Trace, begin: float) -> Iterator[_TraceEvent]:
    for rank, action, start, end in trace.spans:
        name, args = _action(action)
        yield _complete(rank, _COMPUTE, name, "compute", start - begin, end - begin, args)
    for rank, clip, step, start, end in trace.steps:
        args = {"clip": clip, "step": step}
        yield _complete(rank, _COMPUTE, f"step {step}", "step", start - begin, end - begin, args)
    for rank, start, end in trace.waits:
        yield _complete(rank, _COMPUTE, "wait", "wait", start - begin, end - begin, {})


def _action(action: Action) -> tuple[str, dict[str, Any]]:
    args: dict[str, Any] = {"clip": action.clip, "step": action.start}
    if action.kind is Kind.DENOISE:
        args["end_step"] = action.end
    return f"{action.kind.lower()} clip {action.clip}", args


def _transfer_events(
    transfers: Iterable[TransferSpan], tracks: Mapping[tuple[int, str, int], int], begin: float
) -> Iterator[_TraceEvent]:
    """Each transfer at both of its ends, and an arrow between them."""
    arrows: dict[tuple[int, ...], int] = {}
    # In a draft two packets of one step may use one link; both ends see them in the same order.
    seen: Counter[tuple[int, ...]] = Counter()
    for transfer in transfers:
        track = tracks[transfer.rank, transfer.direction, transfer.peer]
        args = {"clip": transfer.clip, "step": transfer.next_step, "bytes": transfer.num_bytes}
        start, end = transfer.start - begin, transfer.end - begin
        is_send = transfer.direction == "send"
        ends = (transfer.rank, transfer.peer) if is_send else (transfer.peer, transfer.rank)
        name = f"{transfer.direction} clip {transfer.clip}"
        yield _complete(transfer.rank, track, name, "transfer", start, end, args)
        if transfer.waited > 0:
            ready = start - transfer.waited
            yield _complete(transfer.rank, track, "wait for receiver", "wait", ready, start, {})
        which = transfer.clip, transfer.next_step, *ends
        yield {
            "ph": "s" if is_send else "f",
            **({} if is_send else {"bp": "e"}),
            "id": arrows.setdefault((*which, seen[is_send, *which]), len(arrows)),
            "pid": transfer.rank,
            "tid": track,
            "name": "transfer",
            "cat": "transfer",
            "ts": _microseconds(start - transfer.waited),  # when the sender was ready
        }
        seen[is_send, *which] += 1


def _complete(
    rank: int,
    track: int,
    name: str,
    category: str,
    start: float,
    end: float,
    args: Mapping[str, Any],
) -> _TraceEvent:
    """A complete event; its ends are rounded before the subtraction, so that slices nest."""
    ts = _microseconds(start)
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": ts,
        "dur": _microseconds(end) - ts,
        "args": dict(args),
    }


def _microseconds(seconds: float) -> int:
    """Whole microseconds: viewers add start and duration, and fractions would round to overlaps."""
    return round(seconds * 1e6)
