"""The trace file is valid Chrome trace JSON, and holds exactly the measurements."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.chrome_trace import trace_events, write_chrome_trace
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.worker.messages import ActionDone, Joined, StepDone, TransferDone

_REQUIRED = {"X": {"name", "cat", "ts", "dur", "args"}, "s": {"id", "ts"}, "f": {"id", "ts", "bp"}}


def check_schema(events: list[dict[str, Any]]) -> None:
    """What viewers require: known phases, all fields, ascending times, nested slices."""
    timed = [event for event in events if event["ph"] != "M"]
    assert events == [event for event in events if event["ph"] == "M"] + timed
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    for event in timed:
        assert _REQUIRED[event["ph"]] <= event.keys()
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert isinstance(event["ts"] + event.get("dur", 0), int)  # sums of floats are not exact
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    tracks = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        _check_nesting(slices)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named


def _check_nesting(slices: list[tuple[float, float]]) -> None:
    """On one track a slice ends before the next begins, or contains it."""
    above: list[float] = []
    for start, end in slices:
        while above and above[-1] <= start:
            above.pop()
        assert not above or end <= above[-1]
        above.append(end)


def _trace() -> Trace:
    """Two steps on each of two ranks, and the transfer between them."""
    trace = Trace(2)
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8}
    for rank in range(2):
        trace.add(rank, Joined(device="cpu", load_seconds=0.5))
    trace.add(0, ActionDone(action="ENCODE c0 @0", start=100.0, end=101.0, waited=0.0))
    trace.add(0, StepDone(clip=0, step=0, seconds=1.5))
    trace.add(0, StepDone(clip=0, step=1, seconds=2.0))
    trace.add(0, ActionDone(action="DENOISE c0 0:2", start=101.0, end=105.0, waited=0.0))
    trace.add(1, TransferDone(direction="recv", peer=0, seconds=0.25, end=105.5, **transfer))
    trace.add(
        0, TransferDone(direction="send", peer=1, seconds=0.25, waited=0.25, end=105.5, **transfer)
    )
    trace.add(1, StepDone(clip=0, step=2, seconds=1.0))
    trace.add(1, ActionDone(action="DENOISE c0 2:3", start=105.5, end=106.5, waited=5.5))
    return trace


def test_every_event_is_where_it_was_measured() -> None:
    events = trace_events(_trace())
    check_schema(events)
    slices = [
        (e["pid"], e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
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


def test_a_hand_over_is_an_arrow_from_its_sender_to_its_receiver() -> None:
    start, finish = (e for e in trace_events(_trace()) if e["ph"] in "sf")
    assert (start["ph"], start["pid"], finish["ph"], finish["pid"]) == ("s", 0, "f", 1)
    assert start["id"] == finish["id"]


def test_two_words_on_one_step_of_a_clip_are_two_arrows() -> None:
    """A SEND_START to step 14 and the state of step 14, between the same two ranks."""
    trace = Trace(2)
    for end, num_bytes in ((1.0, 8), (9.0, 16)):
        transfer = {"clip": 0, "next_step": 14, "num_bytes": num_bytes, "end": end, "seconds": 0.5}
        trace.add(0, TransferDone(direction="send", peer=1, **transfer))
        trace.add(1, TransferDone(direction="recv", peer=0, **transfer))
    arrows: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in trace_events(trace):
        if event["ph"] in "sf":
            arrows[event["id"]].append((event["ph"], event["ts"]))
    assert sorted(arrows.values()) == [
        [("s", 0), ("f", 0)],
        [("s", 8_000_000), ("f", 8_000_000)],
    ]


def test_a_rank_that_did_nothing_has_its_name() -> None:
    events = trace_events(Trace(3))
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        f"rank {rank} ()" for rank in range(3)
    ]


@pytest.mark.processes
def test_the_trace_of_real_ranks_holds_every_step_and_hop(tmp_path: Path) -> None:
    config = PipelineConfig(
        world_size=2,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=4),
    )
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    path = tmp_path / "trace.json"
    write_chrome_trace(pipeline.trace, path, {"note": 'a "quoted" word'})
    whole = json.loads(path.read_text())

    assert whole["otherData"] == {"note": 'a "quoted" word'}
    events = whole["traceEvents"]
    check_schema(events)
    steps = sorted(
        (e["pid"], e["args"]["clip"], e["args"]["step"]) for e in events if e.get("cat") == "step"
    )
    assert steps == sorted((step // 2, clip, step) for clip in range(3) for step in range(4))
    for name, rank in (("send", 0), ("recv", 1)):
        transfers = [e for e in events if e["name"].startswith(name)]
        assert [(e["pid"], e["args"]["clip"]) for e in transfers] == [(rank, c) for c in range(3)]
    arrows = [e["id"] for e in events if e["ph"] in "sf"]
    assert sorted(arrows) == [0, 0, 1, 1, 2, 2]
