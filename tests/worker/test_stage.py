"""One rank's stage alone: times, what it keeps of a clip, checked steps, predictions of a pair."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest, LatentSpec, SvdSampling
from svdpp.errors import NotFiniteError
from svdpp.models.base import Tensors
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action
from svdpp.worker import stage
from svdpp.worker.messages import ActionDone, ClipDropped, ClipJob, Event, Work
from svdpp.worker.stage import Denoising, NotWantedError, RankTools, StepChecks


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
        clip_writer=doubles,
        is_cancelled=is_cancelled,
    )
    return stage.PipelineStage(tools, model, SvdSampling())


def test_waits_after_the_last_work_are_not_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench warms up in one call and measures in the next."""
    clock = _Clock()
    times = SimpleNamespace(monotonic=clock.monotonic, time=time.time)
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


# --- the steps of a clip --------------------------------------------------------------------------

THEIRS = {"prediction": torch.ones(1)}


class _Links:
    """The other rank sends its prediction of each step, and a tombstone at step `dropped`."""

    def __init__(self, dropped: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.pressures: list[bool] = []
        self.memory_pressure = False
        self._dropped = dropped

    def post_receive(self, clip: int, step: int, *_: Any) -> _Links:
        self.calls.append(("receive", step))
        is_lost = step == self._dropped
        self._packet = Packet(clip, step, 0.0, {} if is_lost else THEIRS, is_lost)
        self._packet.memory_pressure = self.memory_pressure
        return self

    def wait(self) -> Packet:
        return self._packet

    def send(self, packet: Packet, *_: Any) -> None:
        self.pressures.append(packet.memory_pressure)
        self.calls.append(("tombstone" if packet.tombstone else "send", packet.next_step))


def _pair(links: Any, clip: Packet | None = None) -> Denoising:
    doubles = {"transport": links, "reporter": Mock(), "clip_writer": Mock()}
    tools = RankTools(rank=0, device=torch.device("cpu"), **doubles)
    return Denoising(tools, Action.parse("DENOISE c0 2:4 =1"), clip or Packet(0, 2, 0.0, {}))


def _predict() -> Tensors:
    return {"prediction": torch.zeros(1)}


def _fail() -> Tensors:
    raise NotFiniteError("no prediction")


@pytest.mark.parametrize(
    ("dropped", "evaluations", "error", "calls"),
    [
        # A drop after the last step is too late: the other rank expects no more.
        (None, [_predict, _predict], None, "receive 2, send 2, receive 3, send 3"),
        (None, [_predict], None, "receive 2, send 2, receive 3, tombstone 3"),
        (2, [_predict], NotWantedError, "receive 2, send 2"),
        # An evaluation that fails takes one message of the other rank.
        (None, [_fail], NotFiniteError, "receive 2, tombstone 2"),
    ],
)
def test_both_ranks_send_one_message_for_each_step_until_one_drops_the_clip(
    dropped: int | None,
    evaluations: list[Callable[[], Tensors]],
    error: type[Exception] | None,
    calls: str,
) -> None:
    links = _Links(dropped)
    pair = _pair(links)
    for step, evaluate in enumerate(evaluations, 2):
        with pytest.raises(error) if error else nullcontext():
            assert pair.exchange(step, evaluate) == THEIRS
    pair.drop()
    assert ", ".join(f"{kind} {step}" for kind, step in links.calls) == calls


def test_the_memory_pressure_of_one_rank_is_known_to_both() -> None:
    """The second rank's packet is dropped after the last step, and with it what it says."""
    links, clip = _Links(), Packet(0, 2, 0.0, {})
    pair = _pair(links, clip)
    links.memory_pressure = True
    pair.exchange(2, _predict)
    assert clip.memory_pressure
    pair.exchange(3, _predict)
    assert links.pressures == [False, True]


CPU = torch.device("cpu")
FINE = torch.zeros(3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_bad_step_is_named(bad: float) -> None:
    done: list[tuple[int, float]] = []
    checks = StepChecks(CPU, 2, lambda step, seconds: done.append((step, seconds)))
    checks.add(4, FINE)
    checks.add(5, FINE)
    with pytest.raises(NotFiniteError, match="not finite after step 6, done by rank 2"):
        checks.add(6, torch.tensor([0.0, bad, 0.0]))
    assert [step for step, _ in done] == [4, 5]
    assert all(seconds >= 0 for _, seconds in done)


def test_all_steps_are_reported_when_it_finishes() -> None:
    done: list[int] = []
    checks = StepChecks(CPU, 0, lambda step, _: done.append(step))
    for step in range(3):
        checks.add(step, FINE)
    checks.finish()
    assert done == [0, 1, 2]
