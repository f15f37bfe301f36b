"""The view of the ranks follows their events."""

from __future__ import annotations

import time

from svdpp.serve.engine import Rank, RankView
from svdpp.worker.messages import ActionDone, Failed, Heartbeat, Joined, StepDone


def test_it_says_what_each_rank_does_and_did() -> None:
    view = RankView(3, {7: "video_7"}.get)
    for rank in range(3):
        view.add(rank, Joined(device="cpu", load_seconds=1.0))
    view.add(0, Heartbeat(action="DENOISE c7 0:4"))
    view.add(0, StepDone(clip=7, step=0, seconds=0.1))
    view.add(1, Heartbeat(action="DENOISE c7 4:8", waiting=True))
    assert view.now() == [
        Rank(0, "cpu", "video_7", "denoise", 1, "compute"),
        Rank(1, "cpu", "video_7", "denoise", None, "wait"),
        Rank(2, "cpu", None, "", None, "idle"),
    ]
    asked = time.time()
    at_work, *others = view.spans()
    assert (at_work.rank, at_work.video, at_work.kind) == (0, "video_7", "denoise")
    assert others == [], "a rank that waits does nothing"
    assert asked - 0.1 <= at_work.end <= time.time() + 0.1
    now = time.monotonic()
    view.add(0, ActionDone(action="DENOISE c7 0:4", start=now - 5, end=now, waited=0.0))
    view.add(2, ActionDone(action="DECODE c7 @8", start=now - 90, end=now - 80, waited=0.0))
    view.add(0, Heartbeat())
    (done,) = view.spans()
    assert round(done.end - done.start, 3) == 5
    view.add(0, Failed(error={}, traceback="", action="DECODE c5 @8", step=-1))
    assert view.clip_of(0) == 5
    view.reset()
    assert [rank.doing for rank in view.now()] == ["idle"] * 3
    assert view.spans() == [done]


def test_spans_are_bounded() -> None:
    view = RankView(1, lambda _: None)
    for _ in range(5000):
        now = time.monotonic()
        view.add(0, ActionDone(action="ENCODE c1 @0", start=now, end=now, waited=0.0))
    assert len(view.spans()) == 1024
