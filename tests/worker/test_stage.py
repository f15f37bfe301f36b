"""Stage of a single rank: measured times, kept state, and exchange of predictions in a pair."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest, LatentSpec, OutputConfig, SvdSampling
from svdpp.errors import InputError, MismatchError, ModelError
from svdpp.models.base import Tensors
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker import stage
from svdpp.worker.background import LatentCheckpointWriter
from svdpp.worker.denoising import Denoising
from svdpp.worker.device import MemoryPressure
from svdpp.worker.messages import ActionDone, ClipDropped, ClipJob, Event
from svdpp.worker.rank_context import ClipCancelledError, RankContext
from svdpp.worker.tensor_files import LatentCheckpoints

CPU = torch.device("cpu")


class _FakeClock:
    """Stand-in for the clock of a stage, which advances only while the clip writer waits.

    The object is also the stage's transport, reporter and clip writer.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[Event] = []
        self.send = self.said.append
        self.set_position = Mock()
        self.failed: list[tuple[int, BaseException]] = []
        self.sent: dict[object, list[object]] = defaultdict(list)

    def monotonic(self) -> float:
        return self.now

    def report_clip_failure(self, clip: int, error: BaseException) -> None:
        self.failed.append((clip, error))

    def put(self, *_: object) -> None:
        self.now += 50.0


def _stage(clock: Any, is_cancelled: Callable[[int], bool]) -> stage.PipelineStage:
    model = DummyModel(LatentSpec(shape=(1, 4, 2, 8, 8)), 1, CPU)
    doubles = {"transport": clock, "reporter": clock, "clip_writer": clock}
    context = RankContext(rank=0, device=CPU, is_cancelled=is_cancelled, **doubles)
    return stage.PipelineStage(context, model, SvdSampling())


def _work(clip: int, *, seed: int = 0) -> tuple[list[Action], list[ClipJob]]:
    texts = f"ENCODE c{clip} @0", f"DENOISE c{clip} 0:1", f"DECODE c{clip} @1", f"FINISH c{clip} @1"
    return [*map(Action.parse, texts)], [ClipJob(clip=clip, request=ClipRequest(seed=seed))]


def test_waits_after_the_last_work_are_not_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait after the last action of a run does not count in the next run.

    A bench warms up in one call, and measures in the next one.
    """
    clock = _FakeClock()
    times = SimpleNamespace(monotonic=clock.monotonic, time=time.time)
    monkeypatch.setattr(stage, "time", times)
    alone = _stage(clock, lambda _: False)
    for actions, jobs in (_work(0), _work(1)):
        alone.enqueue(actions, jobs)
        for action in actions:
            alone.run(action)
        alone.idle()
    waits = [event.waited for event in clock.said if isinstance(event, ActionDone)]
    assert waits == [0.0] * 6
    assert clock.now == 100.0


def test_a_wait_for_the_latent_checkpoint_is_a_wait_for_the_disk(tmp_path: Path) -> None:
    clock = _FakeClock()
    alone = _stage(clock, lambda _: False)
    alone._transport = Mock()
    checkpoints = LatentCheckpoints(tmp_path, {})
    alone._context.checkpoint_writer = LatentCheckpointWriter(checkpoints, CPU, Mock())
    actions = [Action.parse(text) for text in ("ENCODE c0 @0", "SEND c0 @0 >1", "ENCODE c1 @0")]
    requests = ClipRequest(seed=0, latents_key="0" * 64), ClipRequest(seed=1)
    alone.enqueue(actions, [ClipJob(clip=clip, request=each) for clip, each in enumerate(requests)])
    for action in actions:
        alone.run(action)
    alone._context.checkpoint_writer.finish()
    *_, last = (event for event in clock.said if isinstance(event, ActionDone))
    assert last.waits.keys() == {"image", "send", "writer"}


def test_a_packet_sent_after_another_step_is_named_with_both_steps() -> None:
    clock = _FakeClock()
    alone = _stage(clock, lambda _: False)
    job = ClipJob(clip=3, request=ClipRequest(seed=0))
    alone.enqueue([Action.parse("SEND c3 @1 >1")], [job])
    clock.sent[1, "clips"] = [(3, 2)]
    words = "packets from rank 0 to rank 1: next step of clip 3: sent 2, expected 1"
    with pytest.raises(MismatchError, match=words) as caught:
        alone.idle()
    assert caught.value.details == {
        **{"clip": 3, "step": 1, "from_rank": 0, "to_rank": 1},
        **{"sent_next_step": 2, "expected_next_step": 1},
    }


def test_a_clip_cancelled_after_its_decode_leaves_nothing_behind() -> None:
    clock, cancelled = _FakeClock(), set[int]()
    alone = _stage(clock, cancelled.__contains__)
    actions, jobs = _work(0)
    alone.enqueue(actions, jobs)
    for action in actions:
        if action.kind is Kind.FINISH:
            assert alone._frames.keys() == {0}
            cancelled.add(0)
        alone.run(action)
    assert isinstance(clock.said[-1], ClipDropped)
    assert not any((alone._frames, alone._audio, alone._packets, alone._jobs))


@pytest.mark.parametrize(
    ("raised", "is_of_clip"),
    [
        (KeyError("a token"), True),
        (ValueError("the image is too narrow"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ModelError("the checkpoint is wrong"), False),
    ],
)
def test_an_exception_of_one_encode_is_that_clips_failure(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, is_of_clip: bool
) -> None:
    def encode(model: DummyModel, prepared: object, request: ClipRequest) -> Tensors:  # noqa: ARG001
        if request.seed == 0:
            raise raised
        return {"latents": torch.zeros(1, 4, 2, 8, 8)}

    monkeypatch.setattr(DummyModel, "encode", encode)
    clock = _FakeClock()
    alone, batches = _stage(clock, lambda _: False), (_work(0), _work(1, seed=1))
    with nullcontext() if is_of_clip else pytest.raises(Exception, match=r"CUDA|memory|checkpoint"):
        for actions, jobs in batches:
            alone.enqueue(actions, jobs)
            for action in actions:
                alone.run(action)
    assert [(clip, type(error)) for clip, error in clock.failed] == [(0, InputError)] * is_of_clip
    assert clock.now == (50.0 if is_of_clip else 0.0), "the other clip is written"


@pytest.mark.parametrize("short_during", ["ENCODE", "DECODE", None])
def test_memory_pressure_during_an_action_stays_with_the_clip(
    monkeypatch: pytest.MonkeyPatch, short_during: str | None
) -> None:
    """Memory pressure during an action is recorded for the clip, even if the pressure ends."""
    alone = _stage(_FakeClock(), lambda _: False)
    actions, jobs = _work(0)
    alone.enqueue(actions, jobs)
    marks = []
    for action in actions[:3]:
        is_short = action.kind.name == short_during
        monkeypatch.setattr(MemoryPressure, "has_occurred", lambda _, now=is_short: now)
        alone.run(action)
        marks.append(alone._packets[0].memory_pressure)
    assert (
        marks
        == {
            "ENCODE": [True, True, True],
            "DECODE": [False, False, True],
            None: [False, False, False],
        }[short_during]
    )


def test_a_checkpoint_of_other_tensors_names_its_clip_and_its_file(tmp_path: Path) -> None:
    key, output = "0" * 64, OutputConfig(path="present_0.mp4")
    checkpoints, clock = LatentCheckpoints(tmp_path, {}), _FakeClock()
    checkpoints.save(key, Packet(0, 1, 0.0, {"latents": torch.zeros(1, 4, 2, 8, 9)}))
    alone = _stage(clock, lambda _: False)
    alone._context.checkpoint_writer = Mock(folder=checkpoints)
    request = ClipRequest(seed=0, output=output, latents_key=key, done_steps=1)
    action = Action.parse("LOAD_CHECKPOINT c0 @1")
    alone.enqueue([action], [ClipJob(clip=0, request=request)])
    alone.run(action)
    ((_, error),) = clock.failed
    assert isinstance(error, InputError)
    start = "'present_0.mp4' cannot go on after step 1: the latent checkpoint has other tensors"
    assert error.message.startswith(start)
    assert error.message.count("found") == 1
    assert error.hint.startswith(f"rm {tmp_path}/{key[:12]}*")


THEIRS = {"prediction": torch.ones(1)}


class _PartnerTransport:
    """Stand-in for a rank's transport, with a partner that sends a prediction for each step.

    At step `dropped`, the partner sends a tombstone, because it drops the clip.
    """

    def __init__(self, dropped: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.pressures: list[bool] = []
        self.memory_pressure = False
        self._dropped = dropped

    def post_receive(self, clip: int, step: int, *_: object) -> Mock:
        self.calls.append(("receive", step))
        is_lost = step == self._dropped
        packet = Packet(clip, step, 0.0, {} if is_lost else THEIRS, is_lost)
        packet.memory_pressure = self.memory_pressure
        return Mock(wait=lambda _: packet)

    def send(self, packet: Packet, *_: object) -> None:
        self.pressures.append(packet.memory_pressure)
        self.calls.append(("tombstone" if packet.tombstone else "send", packet.next_step))


def _pair(links: Any, clip: Packet) -> Denoising:
    doubles = {"transport": links, "reporter": Mock(), "clip_writer": Mock()}
    context = RankContext(rank=0, device=CPU, **doubles)
    return Denoising(context, Action.parse("DENOISE c0 2:4 =1"), clip)


def _predict() -> Tensors:
    return {"prediction": torch.zeros(1)}


@pytest.mark.parametrize(
    ("dropped", "num_steps", "calls"),
    [
        # After the last step no tombstone is sent, because the other rank expects no more messages.
        (None, 2, "receive 2, send 2, receive 3, send 3"),
        (None, 1, "receive 2, send 2, receive 3, tombstone 3"),
        (2, 1, "receive 2, send 2"),
    ],
)
def test_both_ranks_send_one_message_for_each_step_until_one_drops_the_clip(
    dropped: int | None, num_steps: int, calls: str
) -> None:
    links = _PartnerTransport(dropped)
    pair = _pair(links, Packet(0, 2, 0.0, {}))
    for step in range(2, 2 + num_steps):
        with pytest.raises(ClipCancelledError) if dropped else nullcontext():
            assert pair.exchange(step, _predict) == THEIRS
    pair.drop()
    assert ", ".join(f"{kind} {step}" for kind, step in links.calls) == calls


def test_the_memory_pressure_of_one_rank_is_known_to_both() -> None:
    """If one rank of a pair has memory pressure, both ranks record it.

    The exchange of predictions tells the other rank, because the second rank's packet is dropped
    after the last step.
    """
    links, clip = _PartnerTransport(), Packet(0, 2, 0.0, {})
    pair = _pair(links, clip)
    links.memory_pressure = True
    pair.exchange(2, _predict)
    assert clip.memory_pressure
    pair.exchange(3, _predict)
    assert links.pressures == [False, True]
