"""One rank's stage alone: the times that it reports, and what it keeps of a clip."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from svdpp.config import ClipRequest, LatentSpec, SvdSampling
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action
from svdpp.worker import stage
from svdpp.worker.messages import ActionDone, ClipDropped, ClipJob, Event, Work
from svdpp.worker.steps import RankTools


class _Clock:
    """A clock that advances only while a clip writer waits."""

    now = 0.0
    said: list[Event]

    def __init__(self) -> None:
        self.said = []

    def monotonic(self) -> float:
        return self.now

    def put(self, *_: object) -> None:
        self.now += 50.0

    def send(self, event: Event) -> None:
        self.said.append(event)

    def at(self, *_: object, **__: object) -> None:
        pass


def _stage(doubles: Any, is_cancelled: Callable[[int], bool]) -> stage.PipelineStage:
    spec = LatentSpec(shape=(1, 4, 2, 8, 8))
    model = DummyModel(spec, 1, torch.device("cpu"))
    tools = RankTools(
        rank=0,
        device=model.device,
        transport=doubles,
        reporter=doubles,
        is_cancelled=is_cancelled,
    )
    return stage.PipelineStage(tools, model, doubles, SvdSampling())


def test_waits_after_the_last_work_are_not_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench warms up in one call and measures in the next."""
    clock = _Clock()
    times = SimpleNamespace(
        monotonic=clock.monotonic, time=time.time, process_time=time.process_time
    )
    monkeypatch.setattr(stage, "time", times)
    alone = _stage(clock, lambda _: False)
    for clip in range(2):
        texts = f"ENCODE c{clip} @0", f"DENOISE c{clip} 0:1", f"FINISH c{clip} @1"
        job = ClipJob(clip=clip, request=ClipRequest(seed=0))
        alone.expect(Work(actions=texts, jobs=(job,)))
        for text in texts:
            alone.perform(Action.parse(text))
        alone.rest()
    waits = [event.waited for event in clock.said if isinstance(event, ActionDone)]
    assert waits == [0.0] * 4
    assert clock.now == 100.0


def test_a_clip_cancelled_after_its_decode_leaves_nothing_behind() -> None:
    clock, cancelled = _Clock(), set[int]()
    alone = _stage(clock, cancelled.__contains__)
    texts = "ENCODE c0 @0", "DENOISE c0 0:1", "DECODE c0 @1", "FINISH c0 @1"
    alone.expect(Work(actions=texts, jobs=(ClipJob(clip=0, request=ClipRequest(seed=0)),)))
    for text in texts:
        if text.startswith("FINISH"):
            assert alone._frames.keys() == {0}
            cancelled.add(0)
        alone.perform(Action.parse(text))
    assert isinstance(clock.said[-1], ClipDropped)
    assert not any((alone._frames, alone._audio, alone._packets, alone._jobs))
