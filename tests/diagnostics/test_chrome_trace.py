"""Trace file: valid format, and exactly the measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from svdpp.diagnostics.chrome_trace import TraceFile
from svdpp.driver.trace import Trace
from svdpp.errors import OutputError
from svdpp.worker.device import status_bytes
from svdpp.worker.messages import ActionDone, Event, Heartbeat, Joined, StepDone, TransferDone
from tests.support.trace_format import check_trace, read_trace


def _events() -> list[tuple[int, Event]]:
    """Return the ranks' events for one clip: steps on two ranks, and the transfer between them."""
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8}
    sent = {"direction": "send", "peer": 1, "seconds": 0.25, "waited": 0.25, "end": 105.5}
    received = {"direction": "recv", "peer": 0, "seconds": 0.25, "end": 105.5}
    return [
        *((rank, Joined(device="cpu", load_seconds=0.5)) for rank in range(2)),
        (0, ActionDone(action="ENCODE c0 @0", start=100.0, end=101.0, waited=0.0)),
        (0, StepDone(clip=0, step=0, seconds=1.5)),
        (0, StepDone(clip=0, step=1, seconds=2.0)),
        (0, ActionDone(action="DENOISE c0 0:2", start=101.0, end=105.0, waited=0.0)),
        (1, TransferDone.model_validate({**transfer, **received})),
        (0, TransferDone.model_validate({**transfer, **sent})),
        (1, StepDone(clip=0, step=2, seconds=1.0)),
        (1, ActionDone(action="DENOISE c0 2:3", start=105.5, end=106.5, waited=5.5)),
    ]


def _trace_file(path: Path, *, begin: float = 100.0, **about: Any) -> TraceFile:
    file = TraceFile(path, about)
    file._begin = begin
    return file


def test_every_event_is_where_it_was_measured(tmp_path: Path) -> None:
    file = _trace_file(tmp_path / "new" / "trace.json", note=1)
    for rank, event in _events():
        file(rank, event)
    file.close()
    events = read_trace((tmp_path / "new" / "trace.json").read_text())
    check_trace(events)
    assert events[0]["args"] == {"note": 1}
    slices = [
        (e["pid"], e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in sorted(events, key=lambda e: (e.get("ts", 0), -e.get("dur", 0), e["tid"]))
        if e["ph"] == "X"
    ]
    assert slices == [
        (1, 0, "wait", 0.0, 5.5),
        (0, 0, "encode clip 0", 0.0, 1.0),
        (0, 0, "denoise clip 0", 1.0, 4.0),
        (0, 0, "step 0", 1.5, 1.5),
        (0, 0, "step 1", 3.0, 2.0),
        (0, 1, "wait for receiver", 5.0, 0.25),
        (1, 1, "recv clip 0", 5.25, 0.25),
        (0, 1, "send clip 0", 5.25, 0.25),
        (1, 0, "denoise clip 0", 5.5, 1.0),
        (1, 0, "step 2", 5.5, 1.0),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (0, 0): "compute",
        (1, 0): "compute",
        (0, 1): "to rank 1",
        (1, 1): "from rank 0",
    }
    (denoise, *_) = [e for e in events if e["name"] == "denoise clip 0"]
    assert denoise["args"] == {"clip": 0, "step": 0, "end_step": 2}
    arrows = sorted(e["ph"] + str(e["pid"]) + e["id"] for e in events if e["ph"] in "sf")
    assert arrows == ["f10-1, clip 0, step 2", "s00-1, clip 0, step 2"]


def test_the_file_of_a_killed_run_is_a_trace(tmp_path: Path) -> None:
    """The file is a valid trace after each event, even without `close`."""
    path = tmp_path / "trace.json"
    file = _trace_file(path)
    lengths = []
    for rank, event in _events():
        file(rank, event)
        if path.exists():
            events = read_trace(path.read_text())
            check_trace(events, is_whole=False)
            lengths.append(len(events))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 20
    file.close()


def test_memory_is_a_counter_of_its_changes(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", {})
    for num_bytes in (3 * 2**20, 3 * 2**20 + 1, None, 4 * 2**20):
        file(1, Heartbeat(memory_bytes=num_bytes))
    file(0, ActionDone(action="ENCODE c0 @0", start=1e9, end=1e9, waited=0.0))
    file.close()
    events = read_trace((tmp_path / "trace.json").read_text())
    counters = [(each["pid"], each["args"]) for each in events if each["ph"] == "C"]
    assert counters == [(1, {"MiB": 3.0}), (1, {"MiB": 4.0})]


@pytest.mark.slow
def test_a_hundred_thousand_events_do_not_grow_the_parent(tmp_path: Path) -> None:
    """The parent's memory does not grow during 100,000 events of a rank that makes clips."""
    file, trace = _trace_file(tmp_path / "trace.json", begin=0.0), Trace(1, last_clips=20)

    def make(clip: int) -> None:
        end = 10.0 * (clip + 1)
        moved = {"clip": clip, "next_step": 13, "num_bytes": 8, "seconds": 0.5, "end": end - 9}
        action = f"DENOISE c{clip} 0:20"
        for event in (
            *(StepDone(clip=clip, step=step, seconds=0.25) for step in range(20)),
            ActionDone(action=action, start=end - 8, end=end, waited=0.5),
            TransferDone.model_validate({**moved, "peer": 1, "direction": "recv"}),
        ):
            trace(0, event)
            file(0, event)

    for clip in range(300):
        make(clip)
    before = status_bytes("VmRSS")
    for clip in range(300, 300 + 100_000 // 22):
        make(clip)
    grown = status_bytes("VmRSS") - before
    file.close()
    assert grown < 4 * 2**20, f"{grown / 2**20:.1f} MiB"
    assert (tmp_path / "trace.json").stat().st_size > 10_000_000


def test_a_full_disk_is_reported_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = TraceFile(tmp_path / "file" / "trace.json", {})
    for rank, event in _events():
        file(rank, event)
    with pytest.raises(OutputError, match=r"trace\.json' cannot be written"):
        file.close()
