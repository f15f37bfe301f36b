"""Main loop of a rank: order of actions, cancellations, its end, and the weights that it loads."""

from __future__ import annotations

import multiprocessing
from collections import Counter
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
    ParallelConfig,
    PipelineConfig,
    WanSampling,
    extra_params,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.launch.worker_group import ControlChannel, LaunchContext
from svdpp.launch.world import World
from svdpp.plan.actions import Action, Kind, Schedule, build_schedule
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import simulate_schedule
from svdpp.plan.layout import Layout
from svdpp.worker import rank as module
from svdpp.worker.messages import Cancel, ClipBatch, ClipJob, Failed, Finished, Stop, parse
from svdpp.worker.rank import ActionQueue, CommandReceiver
from tests.support.dummies import config, pids
from tests.support.plans import check_receives, check_schedule, layouts
from tests.support.tiny_families import save_tiny_wan


def _one_by_one(layout: Layout, clips: int) -> list[Schedule]:
    return [build_schedule([layout.route(clip)], layout.world_size) for clip in range(clips)]


@given(layouts().map(lambda layout: replace(layout, decode_parallel_size=1)), st.integers(1, 8))
def test_lists_that_wait_join_to_the_list_of_all_clips(layout: Layout, clips: int) -> None:
    together = layout.schedule(clips)
    alone = _one_by_one(layout, clips)
    for rank in range(layout.world_size):
        queue = ActionQueue()
        for schedule in alone:
            queue.add(schedule[rank])
        assert tuple(queue) == together[rank]


def test_clips_that_two_ranks_decode_together_overlap_also_one_at_a_time() -> None:
    """If two ranks share decodes, clips submitted one by one take no longer than all at once.

    The first rank decodes its part after the next clip's steps. A service submits clips one by one.
    """
    layout = Layout(num_steps=4, world_size=2, decode_parallel_size=2, chunks=(1, 1))
    together, alone = layout.schedule(6), _one_by_one(layout, 6)
    joined = []
    for rank in range(2):
        queue = ActionQueue()
        for schedule in alone:
            queue.add(schedule[rank])
        assert Counter(queue) == Counter(together[rank])
        joined.append(tuple(queue))
    costs = CostModel(
        step_seconds=1.0, decode_seconds=2.0, encode_seconds=0.0, transfer_seconds=0.0
    )
    ends = [
        max(span.end for span in simulate_schedule(each, costs))
        for each in (together, tuple(joined))
    ]
    assert ends[0] == ends[1]


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
        performed.append((*done, *queue))
    check_schedule(tuple(performed), layout.num_steps)
    check_receives(tuple(performed))
    spans = simulate_schedule(
        tuple(performed), CostModel()
    )  # raises an error in case of a deadlock
    assert {span.action.clip for span in spans} == set(range(clips))


def test_cancellations_are_taken_between_steps_and_forgotten_with_their_clips() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent, commands = ControlChannel(ours), CommandReceiver(ControlChannel(theirs))
    work = [
        ClipBatch(jobs=(ClipJob(clip=clip, request=ClipRequest(seed=clip)),)) for clip in (0, 1)
    ]
    expected: list[ClipBatch] = []
    idles: list[int] = []

    def take(batch: ClipBatch) -> list[Action]:
        expected.append(batch)
        clip = batch.jobs[0].clip
        return [Action.at(kind, clip, 0) for kind in (Kind.ENCODE, Kind.FINISH)]

    actions = map(str, commands.actions(take, lambda: idles.append(len(expected))))
    for command in work:
        parent.send(command.to_bytes())
    assert next(actions) == "ENCODE c0 @0"
    assert expected == work
    for cancelled in (0, 1, 7):
        parent.send(Cancel(clip=cancelled).to_bytes())
    assert commands.is_cancelled(0)
    assert next(actions) == "FINISH c0 @0"
    assert commands.is_cancelled(0)
    assert next(actions) == "ENCODE c1 @0"
    assert [clip for clip in range(8) if commands.is_cancelled(clip)] == [1]
    for late in (Cancel(clip=0), Stop(), Cancel(clip=1), Stop()):
        parent.send(late.to_bytes())
    assert list(actions) == ["FINISH c1 @0"]
    assert idles == [2]
    assert not any(map(commands.is_cancelled, range(8)))


@pytest.mark.parametrize("family", SAMPLING_CLASSES)
def test_a_clips_parameters_reach_the_ranks_whole(family: str) -> None:
    kind = SAMPLING_CLASSES[family]
    own = {name: max(1, param.lowest) for name, param in extra_params(kind).items()}
    own |= {"guidance_scale_2": 3.0, "flow_shift": 5.0} if family == "wan" else {}
    sampling = kind(**own, num_inference_steps=7)
    job = ClipJob(clip=0, request=ClipRequest(seed=0, sampling=sampling))
    back = parse(ClipBatch(jobs=(job,)).to_bytes()).jobs[0].request.sampling
    assert back == sampling
    assert type(back) is kind


class ParentChannel:
    """Stand-in for a rank's channel to its parent, which sends `Stop` after `Finished`."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.commands = [Stop()]

    def send(self, message: bytes) -> None:
        self.said.append(event := parse(message))
        if isinstance(event, Finished):
            self.commands += [Cancel(clip=0), Stop()]  # a late `Cancel` is ignored

    def receive(self, timeout: float) -> bytes | None:  # noqa: ARG002
        return self.commands.pop(0).to_bytes() if self.commands else None


def test_a_rank_that_is_finished_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "take_device", lambda *_: torch.device("cpu"))
    parent, left = ParentChannel(), list[int]()
    monkeypatch.setattr(module.process_group, "destroy", lambda: left.append(len(parent.commands)))
    world = World(rank=0, local_rank=0, size=1, local_size=1, launcher="torchrun")
    context = LaunchContext(world, "gloo", parent, join=lambda: None)
    module.rank_main(context, module.RankSetup(config=config(1, steps=1), checkpoint=None))
    assert left == [0]
    assert not any(isinstance(event, Failed) for event in parent.said)


# --- what ranks load ------------------------------------------------------------------------------


def _mapped_bytes(pid: int, folder: Path) -> dict[str, Counter[str]]:
    """Return the memory (PSS, RSS) of a process's mapped files in `folder`, by subfolder."""
    found: dict[str, Counter[str]] = {"Pss": Counter(), "Rss": Counter()}
    for region in psutil.Process(pid).memory_maps():
        if (path := Path(region.path)).is_relative_to(folder):
            found["Pss"][path.parent.name] += region.pss
            found["Rss"][path.parent.name] += region.rss
    return found


@pytest.mark.slow
def test_four_ranks_hold_one_copy_of_each_expert(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875, dtype=torch.bfloat16, width=8)
    config = PipelineConfig(
        world_size=4,
        parallel=ParallelConfig(split="balanced"),
        model=ModelConfig(name=str(folder), dtype="bf16"),
        sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
    )
    with Pipeline(config) as pipeline:
        held = [roles.experts for roles in pipeline.config.layout.roles]
        ranks = [_mapped_bytes(pid, folder) for pid in pids(pipeline)]
    assert held == [{0}, {0}, {1}, {1}]
    for part, holders in (("transformer", ranks[:2]), ("transformer_2", ranks[2:])):
        assert [part in rank["Rss"] for rank in ranks] == [rank in holders for rank in ranks]
        pss = sum(rank["Pss"][part] for rank in holders)
        most = max(rank["Rss"][part] for rank in holders)
        assert most > 0
        # The sum of the PSS is that of one copy. Two copies would be twice as large. The tolerance
        # is for pages that a rank has not touched.
        assert pss == pytest.approx(most, rel=0.1)
