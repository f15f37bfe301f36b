"""Trace file of a run in Chrome's trace event format, for Perfetto.

In the trace, each rank is a process. It has a track for compute (steps within their actions), a
track for each link, and a counter of its memory. The format is "Trace Event Format", Google, 2016,
linked from https://perfetto.dev/docs/faq (JSON trace format). The file is a JSON array, which
viewers can read even without the closing bracket. So the trace of a killed run can be opened too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from svdpp.driver.trace import SpanBuilder, StepSpan, TimedSpan, TransferSpan, WaitSpan
from svdpp.media import output_files
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span
from svdpp.worker.messages import ActionDone, Event, Heartbeat, Joined

_COMPUTE = 0

_TraceEvent = dict[str, Any]


class TraceFile:
    """Observer that writes a run's trace file during the run, in constant memory. Not thread-safe.

    The file is created when a rank has finished its first action, and completed by `close`. Time 0
    is the creation of this object, by the monotonic clock.

    Args:
        path: Path of the file.
        about: Description of the run as plain values, which become arguments of the first event.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._begin = time.monotonic()
        # The description of the run is an event, because the JSON array has no other place for it.
        about_run = _event("i", 0, _COMPUTE, "svdpp", s="g", cat="run", ts=0, args=dict(about))
        self._unwritten = [about_run]
        self._span_builder = SpanBuilder()
        self._tracks: dict[tuple[int, str, int], int] = {}
        self._memory: dict[int, float] = {}
        self._file: TextIO | None = None
        self._error: OSError | None = None

    def __call__(self, rank: int, event: Event) -> None:
        """Write to the trace file the spans that end with a rank's event.

        Errors of writing are raised later, by `close`.
        """
        if self._error is not None:
            return
        self._unwritten += self._events(rank, event)
        # Events that come before the first action (a rank's name, its memory) are written together
        # with that action.
        if self._unwritten and (self._file is not None or isinstance(event, ActionDone)):
            try:
                self._write()
            except OSError as error:
                self._error = error

    def close(self) -> None:
        """Complete the trace file. If no rank finished an action, no file is created.

        Raises:
            OutputError: The file could not be written, in this or an earlier call.
        """
        with output_files.disk_errors(f"{str(self._path)!r} cannot be written"):
            if self._file is not None:
                with self._file:
                    if self._error is None:
                        self._file.write("\n]\n")
            if self._error is not None:
                raise self._error

    def _write(self) -> None:
        before = ",\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file, before = self._path.open("w"), "[\n"
        self._file.write(before + ",\n".join(map(json.dumps, self._unwritten)))
        self._file.flush()  # so that the file keeps the events if the process is killed
        self._unwritten.clear()

    def _events(self, rank: int, event: Event) -> Iterator[_TraceEvent]:
        match event:
            case Joined():
                name = f"rank {rank} ({event.device})"
                yield _event("M", rank, _COMPUTE, "process_name", args={"name": name})
                yield _event("M", rank, _COMPUTE, "process_sort_index", args={"sort_index": rank})
                yield from _track(rank, _COMPUTE, "compute")
            case Heartbeat(memory_bytes=int(size)):
                mib = round(size / 2**20, 1)
                if self._memory.get(rank) != mib:
                    self._memory[rank] = mib
                    ts = self._microseconds(time.monotonic())
                    yield _event("C", rank, _COMPUTE, "memory", ts=ts, args={"MiB": mib})
        for placed in self._span_builder.add(rank, event):
            yield from self._placed(placed)

    def _placed(self, placed: TimedSpan) -> Iterator[_TraceEvent]:
        match placed:
            case Span(rank, action, start, end):
                args = {"clip": action.clip, "step": action.start}
                if action.kind is Kind.DENOISE:
                    args["end_step"] = action.end
                name = f"{action.kind.lower()} clip {action.clip}"
                yield self._slice(rank, _COMPUTE, name, "compute", start, end, **args)
            case StepSpan(rank, clip, step, start, end):
                args, name = {"clip": clip, "step": step}, f"step {step}"
                yield self._slice(rank, _COMPUTE, name, "step", start, end, **args)
            case WaitSpan(rank, _, start, end):
                yield self._slice(rank, _COMPUTE, "wait", "wait", start, end)
            case TransferSpan():
                yield from self._transfer(placed)

    def _transfer(self, transfer: TransferSpan) -> Iterator[_TraceEvent]:
        """Yield one rank's trace events of a transfer: a slice, and one end of an arrow.

        The arrow goes from the sender's track to the receiver's, so each rank adds one end of it.
        """
        rank, direction, peer = link = (transfer.rank, transfer.direction, transfer.peer)
        is_send = direction == "send"
        # One track for each link, because transfers on one link never overlap.
        if link not in self._tracks:
            self._tracks[link] = 1 + sum(other == rank for other, _, _ in self._tracks)
            end = "to" if is_send else "from"
            yield from _track(rank, self._tracks[link], f"{end} rank {peer}")
        track = self._tracks[link]
        args = {"clip": transfer.clip, "step": transfer.next_step, "bytes": transfer.num_bytes}
        name = f"{direction} clip {transfer.clip}"
        yield self._slice(rank, track, name, "transfer", transfer.start, transfer.end, **args)
        ready = transfer.start - transfer.waited
        if transfer.waited > 0:
            yield self._slice(rank, track, "wait for receiver", "wait", ready, transfer.start)
        ends = f"{rank}-{peer}" if is_send else f"{peer}-{rank}"
        arrow = f"{ends}, clip {transfer.clip}, step {transfer.next_step}"
        about = {"cat": "transfer", "id": arrow, "ts": self._microseconds(ready)}
        phase, more = ("s", {}) if is_send else ("f", {"bp": "e"})
        yield _event(phase, rank, track, "transfer", **about, **more)

    def _slice(
        self, rank: int, track: int, name: str, category: str, start: float, end: float, **args: int
    ) -> _TraceEvent:
        """Return the trace event of a span, with its start and its duration.

        Start and end are rounded before the duration is computed, so that slices nest exactly.
        """
        ts = self._microseconds(start)
        duration = self._microseconds(end) - ts
        return _event("X", rank, track, name, cat=category, ts=ts, dur=duration, args=args)

    def _microseconds(self, when: float) -> int:
        """Return a time for the trace file: whole microseconds since the file's creation.

        With fractions, rounding errors could make slices overlap.
        """
        return round((when - self._begin) * 1e6)


def _event(phase: str, rank: int, track: int, name: str, **fields: Any) -> _TraceEvent:
    return {"ph": phase, "pid": rank, "tid": track, "name": name, **fields}


def _track(rank: int, track: int, name: str) -> Iterator[_TraceEvent]:
    """Yield trace events with a track's name and its position among the tracks of its rank."""
    yield _event("M", rank, track, "thread_name", args={"name": name})
    yield _event("M", rank, track, "thread_sort_index", args={"sort_index": track})
