"""The clips in the pipeline follow the events of the ranks and their handles."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle, ClipProgress, OpenClips
from svdpp.serve.clip_orders import ClipOrder
from svdpp.serve.running_clips import RunningClip, RunningClips
from svdpp.worker.messages import ActionDone, ClipFailed, Event, Heartbeat, StepDone
from tests.serve.engines import STEPS, dummy_job

KEY = "0" * 64
REQUEST = ClipRequest(seed=1, latents_key=KEY, done_steps=3)
DECODED = ActionDone(action=f"DECODE c7 @{STEPS}", start=1.0, end=2.0, waited=0.0)


@pytest.fixture
def clip() -> RunningClip:
    return RunningClip(7, dummy_job(1), ClipOrder(REQUEST, {}, KEY))


@pytest.fixture
def running(clip: RunningClip) -> RunningClips:
    found = RunningClips(threading.Condition())
    found.add(clip)
    return found


@pytest.mark.parametrize(
    ("event", "is_its"),
    [
        (StepDone(clip=7, step=3, seconds=0.1), True),
        (StepDone(clip=8, step=3, seconds=0.1), False),
        (DECODED, True),
        (Heartbeat(action="DENOISE c7 0:4"), True),
        (Heartbeat(), False),
        (ClipFailed(clip=7, error={}), True),
    ],
    ids=str,
)
def test_an_event_is_about_a_clip(
    running: RunningClips, clip: RunningClip, event: Event, is_its: bool
) -> None:
    action = getattr(event, "action", None)
    assert running.report(event, action) is (clip if is_its else None)
    assert not running.has_stepped


def test_progress_is_that_of_the_handle(running: RunningClips, clip: RunningClip) -> None:
    assert clip.progress == ClipProgress(3, STEPS)
    assert running.num_waiting == 1
    clip.handle = ClipHandle(7, clip.order.request, STEPS, cast(OpenClips, None))
    clip.handle.set_progress(ClipProgress(3, STEPS, rank=0))
    clip.handle.add_progress_callback(lambda _: running.moved(clip.job.id))
    assert running.take_stepped() == {clip.job.id}, "it had begun before"
    assert running.num_waiting == 0
    clip.handle.set_progress(ClipProgress(3, STEPS, rank=0))
    assert not running.has_stepped
    clip.handle.set_progress(ClipProgress(4, STEPS, rank=0))
    assert running.take_stepped() == {clip.job.id}
    assert clip.progress.steps_done == 4
