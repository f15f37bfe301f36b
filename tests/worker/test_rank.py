"""A rank's commands, in order; its end, which waits for others; the weights that it loads."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from svdpp.config import (
    SAMPLING_CLASSES,
    ClipRequest,
    ModelConfig,
    PipelineConfig,
    WanSampling,
    own_params,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.launch.group import Channel, RankContext
from svdpp.launch.world import World
from svdpp.plan.actions import Action, Schedule, build_schedule
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Layout
from svdpp.worker import rank as module
from svdpp.worker.messages import (
    Cancel,
    ClipJob,
    Failed,
    Finished,
    Stop,
    Work,
    parse,
)
from svdpp.worker.rank import ActionQueue, Inbox
from tests.driver.dummies import config, pids
from tests.models.tiny_families import save_tiny_wan
from tests.plan.plans import check_receives, check_schedule, layouts


def _one_by_one(layout: Layout, clips: int) -> list[Schedule]:
    return [build_schedule([layout.route(clip)], layout.world_size) for clip in range(clips)]


def _emptied(queue: ActionQueue) -> list[Action]:
    actions = []
    while queue:
        actions.append(queue.popleft())
    return actions


@given(layouts().map(lambda layout: replace(layout, decode_ranks=1)), st.integers(1, 8))
def test_lists_that_wait_join_to_the_list_of_all_clips(layout: Layout, clips: int) -> None:
    together = layout.schedule(clips)
    alone = _one_by_one(layout, clips)
    for rank in range(layout.world_size):
        queue = ActionQueue()
        for schedule in alone:
            queue.add(schedule[rank])
        assert tuple(_emptied(queue)) == together[rank]


@given(layouts(pairs=True), st.integers(1, 8), st.data())
def test_lists_that_come_at_any_time_can_be_performed(
    layout: Layout, clips: int, data: st.DataObject
) -> None:
    performed = []
    for rank in range(layout.world_size):
        queue, done = ActionQueue(), []
        for schedule in _one_by_one(layout, clips):
            for _ in range(data.draw(st.integers(0, 6))):
                done += [queue.popleft()] if queue else []
            queue.add(schedule[rank])
        performed.append((*done, *_emptied(queue)))
    check_schedule(tuple(performed), layout.num_steps)
    check_receives(tuple(performed))
    spans = replay(tuple(performed), Costs())  # raises if the ranks wait for each other
    assert {span.action.clip for span in spans} == set(range(clips))


def _work(clip: int) -> Work:
    return Work(actions=(f"ENCODE c{clip} @0", f"FINISH c{clip} @0"), jobs=())


def test_cancellations_are_taken_between_steps_and_forgotten_with_their_clips() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent, inbox = Channel(ours), Inbox(Channel(theirs))
    expected: list[Work] = []
    rests: list[int] = []
    actions = inbox.actions(expected.append, lambda: rests.append(len(expected)))
    for command in (_work(0), _work(1)):
        parent.send(command.to_bytes())
    assert str(next(actions)) == "ENCODE c0 @0"
    assert expected == [_work(0), _work(1)]
    for cancelled in (0, 1, 7):
        parent.send(Cancel(clip=cancelled).to_bytes())
    assert inbox.is_cancelled(0)
    assert str(next(actions)) == "FINISH c0 @0"
    assert inbox.is_cancelled(0)
    assert str(next(actions)) == "ENCODE c1 @0"
    assert not inbox.is_cancelled(0)
    assert inbox.is_cancelled(1)
    assert not inbox.is_cancelled(7)
    assert str(next(actions)) == "FINISH c1 @0"
    assert rests == []
    for last in (_work(2), Cancel(clip=1), Stop()):
        parent.send(last.to_bytes())
    assert [str(action) for action in actions] == ["ENCODE c2 @0", "FINISH c2 @0"]
    assert rests == [3]
    for late in (Cancel(clip=2), Stop()):
        parent.send(late.to_bytes())
    module.wait_for_stop(inbox._channel)
    assert not theirs.poll()
    assert not any(map(inbox.is_cancelled, range(8)))


@pytest.mark.parametrize("family", SAMPLING_CLASSES)
def test_a_clips_parameters_reach_the_ranks_whole(family: str) -> None:
    kind = SAMPLING_CLASSES[family]
    own = dict.fromkeys(own_params(kind), 1)
    own |= {"guidance_scale_2": 3.0, "flow_shift": 5.0} if family == "wan" else {}
    sampling = kind(**own, num_inference_steps=7)
    request = ClipRequest(seed=0, sampling=sampling)
    work = Work(actions=(), jobs=(ClipJob(clip=0, request=request),))
    back = parse(work.to_bytes())
    assert isinstance(back, Work)
    each = back.jobs[0].request.sampling
    assert each == sampling
    assert type(each) is type(sampling)


COMMANDS = (Stop(), Cancel(clip=0), Stop())


class Parent:
    """The parent's side of a channel: its commands, of which all but the first come at the end."""

    def __init__(self) -> None:
        self.commands = deque(command.to_bytes() for command in COMMANDS)
        self.said: list[object] = []

    def send(self, message: bytes) -> None:
        self.said.append(parse(message))

    def receive(self, timeout: float) -> bytes | None:  # noqa: ARG002
        is_finished = any(isinstance(event, Finished) for event in self.said)
        if len(self.commands) < len(COMMANDS) and not is_finished:
            return None
        return self.commands.popleft()


def test_a_rank_that_is_finished_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "take_device", lambda *_: torch.device("cpu"))
    parent = Parent()
    left: list[int] = []
    monkeypatch.setattr(module.process_group, "destroy", lambda: left.append(len(parent.commands)))
    world = World(rank=0, local_rank=0, size=1, local_size=1, launcher="torchrun")
    context = RankContext(world, "gloo", parent, join=lambda: None)
    module.rank_main(context, module.RankSetup(config=config(1, steps=1), checkpoint=None))
    assert left == [0]
    assert not any(isinstance(event, Failed) for event in parent.said)


# --- what ranks load ------------------------------------------------------------------------------


def _mapped(pid: int, folder: Path) -> dict[str, Counter[str]]:
    """PSS and RSS of a process in bytes, by the subfolder of `folder` whose files it maps."""
    found: dict[str, Counter[str]] = {"Pss": Counter(), "Rss": Counter()}
    for region in psutil.Process(pid).memory_maps():
        path = Path(region.path)
        if path.is_relative_to(folder):
            found["Pss"][path.parent.name] += region.pss
            found["Rss"][path.parent.name] += region.rss
    return found


@pytest.mark.processes
def test_four_ranks_hold_one_copy_of_each_expert(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875, dtype=torch.bfloat16, width=8)
    config = PipelineConfig(
        world_size=4,
        split="balanced",
        model=ModelConfig(name=str(folder), dtype="bf16"),
        sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
    )
    with Pipeline(config) as pipeline:
        held = [roles.experts for roles in pipeline.config.layout.roles]
        ranks = [_mapped(pid, folder) for pid in pids(pipeline)]
    assert held == [{0}, {0}, {1}, {1}]
    for part, holders in (("transformer", ranks[:2]), ("transformer_2", ranks[2:])):
        assert [part in rank["Rss"] for rank in ranks] == [rank in holders for rank in ranks]
        pss = sum(rank["Pss"][part] for rank in holders)
        most = max(rank["Rss"][part] for rank in holders)
        assert most > 0
        # A rank may not have touched all pages; two copies would be twice the larger one.
        assert pss == pytest.approx(most, rel=0.1)
