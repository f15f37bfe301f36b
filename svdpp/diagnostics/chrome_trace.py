"""The trace file: a run's measurements in Chrome's trace event format, for Perfetto.

Each rank is a process, with a track for compute (steps within their actions), a track for each link
and its counters. The format is "Trace Event Format", Google, 2016, linked from
https://perfetto.dev/docs/faq (JSON trace format). Of its two forms this is the array: a viewer also
reads one without the closing bracket, so the file of a killed run is of use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from svdpp.driver.trace import Placed, Placement, StepSpan, TransferSpan, WaitSpan
from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span
from svdpp.worker.messages import ActionDone, Event, GpuSample, Heartbeat, Joined

_COMPUTE = 0

_TraceEvent = dict[str, Any]


class TraceFile:
    """Observes a run and writes its trace while it goes on, in constant memory.

    Its first line is written when the first work is done; `close` writes the last one. Time 0 is
    the creation of this object, by the monotonic clock. One thread calls it.

    Args:
        about: plain values that describe the run; arguments of the first event.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._begin = time.monotonic()
        # The array form has no other place for what describes the run.
        self._head = [_event("i", 0, _COMPUTE, "svdpp", s="g", cat="run", ts=0, args=dict(about))]
        self._placement = Placement()
        self._tracks: dict[tuple[int, str, int], int] = {}
        self._memory: dict[int, float] = {}
        self._file: TextIO | None = None
        self._error: OSError | None = None

    def __call__(self, rank: int, event: Event) -> None:
        """Writes what `event` completes. A full disk does not end the run: `close` reports it."""
        if self._error is not None:
            return
        made = list(self._made(rank, event))
        if self._file is None and not isinstance(event, ActionDone):
            self._head += made  # names, and memory while the ranks load their models
        elif made:
            try:
                self._write(made)
            except OSError as error:
                self._error = error

    def close(self) -> None:
        """Completes the file; there is none if no work was done."""
        if self._file is not None:
            try:
                with self._file:
                    if self._error is None:
                        self._file.write("\n]\n")
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            why = output_files.reason(self._error)
            raise OutputError(f"{str(self._path)!r} cannot be written: {why}") from self._error

    def _write(self, events: Iterable[_TraceEvent]) -> None:
        lines = ",\n".join(map(json.dumps, events))
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            lines = "[\n" + ",\n".join([*map(json.dumps, self._head), lines])
            self._head.clear()
        else:
            lines = ",\n" + lines
        self._file.write(lines)
        self._file.flush()  # what is written stays, even if this process is killed

    def _made(self, rank: int, event: Event) -> Iterator[_TraceEvent]:
        if isinstance(event, Joined):
            yield _metadata(rank, _COMPUTE, "process_name", name=f"rank {rank} ({event.device})")
            yield _metadata(rank, _COMPUTE, "process_sort_index", sort_index=rank)
            yield _metadata(rank, _COMPUTE, "thread_name", name="compute")
        elif isinstance(event, Heartbeat) and event.memory_bytes is not None:
            mib = round(event.memory_bytes / 2**20, 1)
            if self._memory.get(rank) != mib:
                self._memory[rank] = mib
                yield self._counter(rank, "memory", time.monotonic(), MiB=mib)
        elif isinstance(event, GpuSample):
            when = self._placement.on_rank_0(rank, event.when)
            for name, values in event.counters().items():
                yield self._counter(rank, name, when, **values)
        for placed in self._placement.place(rank, event):
            yield from self._placed(placed)

    def _placed(self, placed: Placed) -> Iterator[_TraceEvent]:
        match placed:
            case Span(rank, action, start, end):
                args = {"clip": action.clip, "step": action.start}
                if action.kind is Kind.DENOISE:
                    args["end_step"] = action.end
                name = f"{action.kind.lower()} clip {action.clip}"
                yield self._slice(rank, _COMPUTE, name, "compute", start, end, **args)
            case StepSpan(rank, clip, step, start, end):
                place = (rank, _COMPUTE, f"step {step}", "step", start, end)
                yield self._slice(*place, clip=clip, step=step)
            case WaitSpan(rank, _, start, end):
                yield self._slice(rank, _COMPUTE, "wait", "wait", start, end)
            case TransferSpan():
                yield from self._transfer(placed)

    def _transfer(self, transfer: TransferSpan) -> Iterator[_TraceEvent]:
        """A transfer at one of its ends, and that end of the arrow to the other."""
        rank, direction, peer = link = (transfer.rank, transfer.direction, transfer.peer)
        is_send = direction == "send"
        if link not in self._tracks:  # transfers of one link never overlap
            track = 1 + sum(1 for other, _, _ in self._tracks if other == rank)
            self._tracks[link] = track
            yield _metadata(
                rank, track, "thread_name", name=f"{'to' if is_send else 'from'} rank {peer}"
            )
            yield _metadata(rank, track, "thread_sort_index", sort_index=track)
        track = self._tracks[link]
        name, step = f"{direction} clip {transfer.clip}", transfer.next_step
        args = {"clip": transfer.clip, "step": step, "bytes": transfer.num_bytes}
        yield self._slice(rank, track, name, "transfer", transfer.start, transfer.end, **args)
        ready = transfer.start - transfer.waited
        if transfer.waited > 0:
            yield self._slice(rank, track, "wait for receiver", "wait", ready, transfer.start)
        sender, receiver = (rank, peer) if is_send else (peer, rank)
        arrow = {"cat": "transfer", "id": f"{sender}-{receiver}, clip {transfer.clip}, step {step}"}
        end = {} if is_send else {"bp": "e"}
        phase, ts = "s" if is_send else "f", self._microseconds(ready)
        yield _event(phase, rank, track, "transfer", **arrow, **end, ts=ts)

    def _counter(self, rank: int, name: str, when: float, **values: float) -> _TraceEvent:
        """Values of a rank from `when` on, each on a track of its own, by their units."""
        return _event("C", rank, _COMPUTE, name, ts=self._microseconds(when), args=values)

    def _slice(
        self,
        rank: int,
        track: int,
        name: str,
        category: str,
        start: float,
        end: float,
        **args: int,
    ) -> _TraceEvent:
        """A complete event; its ends are rounded before the subtraction, so that slices nest."""
        ts = self._microseconds(start)
        duration = self._microseconds(end) - ts
        return _event("X", rank, track, name, cat=category, ts=ts, dur=duration, args=args)

    def _microseconds(self, when: float) -> int:
        """Whole numbers: viewers add start and duration, and fractions would round to overlaps."""
        return round((when - self._begin) * 1e6)


def _event(phase: str, rank: int, track: int, name: str, **fields: Any) -> _TraceEvent:
    return {"ph": phase, "pid": rank, "tid": track, "name": name, **fields}


def _metadata(rank: int, track: int, what: str, **args: Any) -> _TraceEvent:
    return _event("M", rank, track, what, args=args)
