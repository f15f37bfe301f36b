"""The life of one rank: device, model, links, then the parent's commands until it says stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from svdpp.comm.transport import Transport
from svdpp.config import PipelineConfig
from svdpp.launch import process_group
from svdpp.launch.group import Channel, RankContext
from svdpp.launch.world import is_member
from svdpp.models.base import VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind, connect_rounds
from svdpp.plan.layout import Roles
from svdpp.worker.device import (
    conditions_of,
    gpu_uuid,
    out_of_memory_named,
    peak_bytes,
    take_device,
)
from svdpp.worker.messages import (
    Cancel,
    Finished,
    Joined,
    Started,
    Stop,
    Work,
    parse,
)
from svdpp.worker.reporter import PROFILED_RANK, ClipProfiler, Reporter
from svdpp.worker.side_threads import ClipWriter, LatentCheckpointWriter
from svdpp.worker.stage import PipelineStage
from svdpp.worker.steps import RankTools
from svdpp.worker.tensor_files import LatentCheckpoints, TensorStore


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What every rank gets before it starts. None for a folder or path: nothing is kept there."""

    config: PipelineConfig
    checkpoint: Checkpoint | None
    tensor_folder: str | None = None
    latents_folder: str | None = None
    profile_path: str | None = None
    fault: Callable[[int], object] | None = None
    """What a test does first in each rank, to damage it."""


def rank_main(context: RankContext, setup: RankSetup) -> None:
    """Runs a rank of a pipeline to its end."""
    if setup.fault is not None:
        setup.fault(context.world.rank)

    def perform_all(device: torch.device, reporter: Reporter) -> None:
        inbox = Inbox(context.channel)
        stage = _prepared_stage(context, setup, reporter, device, inbox)
        for action in inbox.actions(stage.expect, stage.rest):
            stage.perform(action)
        stage.finish()

    run_rank(context, setup.config, perform_all)


def run_rank(
    context: RankContext, config: PipelineConfig, work: Callable[[torch.device, Reporter], None]
) -> None:
    """Does `work`, which ends after the parent's first `Stop`, on this rank's device.

    Reports every error to the parent before it raises it.
    """
    reporter = Reporter(context.channel, "" if context.world.on_first_host else context.host)
    reporter.start()
    try:
        device = take_device(config, context.world)
        if (uuid := gpu_uuid(str(device))) is not None:
            reporter.sample_gpu(uuid)
        work(device, reporter)
    except BaseException as error:
        reporter.failed(error)
        raise
    allocated, reserved = peak_bytes(str(device))
    reporter.send(Finished(allocated_bytes=allocated, reserved_bytes=reserved))
    reporter.stop()
    wait_for_stop(context.channel)
    if context.world.launcher is not None:  # a process that goes on; others exit at once
        process_group.destroy()


def wait_for_stop(channel: Channel) -> None:
    """Waits until the parent says stop; cancellations before it are late."""
    message = None
    while message is None or not isinstance(parse(message), Stop):
        message = channel.receive(_POLL_SECONDS)


def _prepared_stage(
    context: RankContext,
    setup: RankSetup,
    reporter: Reporter,
    device: torch.device,
    inbox: Inbox,
) -> PipelineStage:
    """The rank's stage, for which `Joined` is reported: the model is loaded, links are open."""
    config, rank, name = setup.config, context.world.rank, str(device)
    conditions = conditions_of(config, setup.checkpoint, name)
    reporter.send(Started(device=name, uuid=gpu_uuid(name), conditions=conditions))
    reporter.measure_memory(name)
    reporter.phase("loading the model")
    begun = time.monotonic()
    with out_of_memory_named(None):
        model = load_model(config, setup.checkpoint, name, config.layout.roles[rank], rank)
        load_seconds = time.monotonic() - begun
        reporter.phase("joining the other ranks")
        context.join()
        transport = _connected_transport(context, config, reporter, device)
    ahead = context.clock.monotonic_ahead
    reporter.send(Joined(device=name, load_seconds=load_seconds, clock_ahead=ahead))
    reporter.at(None)
    tensor_store = None
    if setup.tensor_folder is not None:
        # A rank that may be on another host sends its tensors.
        send = reporter.tensor if is_member(context.world) else None
        tensor_store = TensorStore(Path(setup.tensor_folder), send)
    checkpoint_writer = None
    # The second rank of a pair has the latents of the first.
    if setup.latents_folder is not None and not config.layout.is_second(rank):
        folder = LatentCheckpoints(Path(setup.latents_folder), conditions)
        checkpoint_writer = LatentCheckpointWriter(folder, device, reporter)
    profiler = None
    if setup.profile_path is not None and rank == PROFILED_RANK:
        profiler = ClipProfiler(Path(setup.profile_path), name)
    tools = RankTools(
        rank=rank,
        device=device,
        transport=transport,
        reporter=reporter,
        is_cancelled=inbox.is_cancelled,
        tensor_store=tensor_store,
    )
    writer = ClipWriter(reporter, conditions, device, tensor_store, host=context.host)
    return PipelineStage(
        *(tools, model, writer, config.sampling),
        checkpoint_writer=checkpoint_writer,
        profiler=profiler,
    )


def _connected_transport(
    context: RankContext, config: PipelineConfig, reporter: Reporter, device: torch.device
) -> Transport:
    transport = Transport(
        context.world.rank,
        device,
        context.backend,
        reporter.transfer,
        checksum=config.checksum,
        wall_ahead=context.clock.wall_ahead,
    )
    layout = config.layout
    back = [(high, low) for low, high in layout.pairs]
    transport.connect(
        {
            "clips": connect_rounds(layout.links),
            "predictions": [layout.pairs, back],
            "decode": connect_rounds(layout.decode_links),
        },
        lambda peer: reporter.phase(f"opening its link with rank {peer}", peer),
    )
    return transport


def load_model(
    config: PipelineConfig,
    checkpoint: Checkpoint | None,
    device: str,
    roles: Roles,
    rank: int = 0,
) -> VideoModel:
    """The model's parts that `roles` need, on `device`; the dummy sleeps by the costs of `rank`."""
    if checkpoint is None:
        latent, num_steps = config.model.dummy_latent, config.sampling.num_inference_steps
        costs = config.costs if config.model.dummy_sleeps else None
        return DummyModel(latent, num_steps, torch.device(device), costs, rank)
    from svdpp.models.engine import model  # imports diffusers: seconds, which the dummy avoids

    return model.load_model(checkpoint, config.model, config.sampling, device, roles)


class ActionQueue:
    """One rank's actions, in the order in which it performs them.

    A list that begins with a RECV is added as if it had been built as one list with the
    one before by `build_schedule`: that RECV moves before the work of the last clip, if this work
    has not begun. So clips that are submitted one at a time overlap like those of one list. The
    order of a rank's RECVs does not change.
    """

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()

    def __bool__(self) -> bool:
        """Whether actions are left."""
        return bool(self._actions)

    def holds(self, clip: int) -> bool:
        """Whether actions of `clip` are left."""
        return any(action.clip == clip for action in self._actions)

    def add(self, actions: Sequence[Action]) -> None:
        """Adds a list of further clips, in order."""
        if self._actions and actions and actions[0].kind is Kind.RECV:
            self._actions.insert(self._start_of_last_work(), actions[0])
            actions = actions[1:]
        self._actions.extend(actions)

    def pop(self) -> Action:
        """Removes and returns the next action."""
        return self._actions.popleft()

    def _start_of_last_work(self) -> int:
        """The index of the first action, other than its RECV, of the last clip in the queue."""
        index = len(self._actions)
        clip = self._actions[-1].clip
        while index and self._actions[index - 1].clip == clip:
            if self._actions[index - 1].kind is Kind.RECV:
                break
            index -= 1
        return index


_POLL_SECONDS = 1.0


class Inbox:
    """Takes the parent's commands between actions and, for cancellations, between steps."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue = ActionQueue()
        self._expect: Callable[[Work], None] = lambda _: None
        self._now: int | None = None
        self._cancelled: set[int] = set()
        self._is_stopped = False

    def actions(self, expect: Callable[[Work], None], rest: Callable[[], None]) -> Iterator[Action]:
        """Yields this rank's actions until the parent says stop and none is left.

        `expect` is called with each work as it comes, `rest` while no action is left.
        """
        self._expect = expect
        while True:
            self._receive_all()
            if self._queue:
                action = self._queue.pop()
                self._now = action.clip
                yield action
                if action.clip in self._cancelled and not self._queue.holds(action.clip):
                    self._cancelled.remove(action.clip)
                self._now = None
                continue
            rest()
            if self._is_stopped:
                return
            self._receive(_POLL_SECONDS)

    def is_cancelled(self, clip: int) -> bool:
        """Whether the parent has cancelled `clip`, which has actions left; does not wait."""
        self._receive_all()
        return clip in self._cancelled

    def _receive_all(self) -> None:
        while self._receive(0):
            pass

    def _receive(self, timeout: float) -> bool:
        message = self._channel.receive(timeout)
        if message is None:
            return False
        match parse(message):
            case Work() as work:
                self._queue.add(work.actions)
                self._expect(work)
            case Cancel(clip=clip) if clip == self._now or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # this rank has done its part of the cancelled clip
        return True
