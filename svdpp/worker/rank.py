"""The life of one rank: device, model, links, then the parent's commands until it says stop."""

from __future__ import annotations

import base64
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from svdpp.comm.transport import Transport
from svdpp.config import PipelineConfig
from svdpp.launch.group import Channel, RankContext
from svdpp.models.base import VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Roles
from svdpp.plan.schedule import connect_rounds
from svdpp.worker.device import (
    conditions_of,
    gpu_uuid,
    out_of_memory_named,
    peak_bytes,
    take_device,
)
from svdpp.worker.latent_checkpoints import LatentCheckpoints
from svdpp.worker.messages import (
    Cancel,
    Finished,
    Joined,
    Started,
    Stop,
    StoredTensor,
    Work,
    parse_command,
)
from svdpp.worker.reporter import PROFILED_RANK, ClipProfiler, GpuSampler, Reporter
from svdpp.worker.side_threads import ClipWriter
from svdpp.worker.stage import PipelineStage
from svdpp.worker.steps import RankTools
from svdpp.worker.tensor_store import TensorStore


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
    """Runs a rank to its end. Reports every error to the parent before it raises it."""
    if setup.fault is not None:
        setup.fault(context.world.rank)
    reporter = Reporter(context.channel, "" if context.world.on_first_host else context.host)
    reporter.start()
    sampler = None
    try:
        device = take_device(setup.config, context.world)
        if (uuid := gpu_uuid(str(device))) is not None:
            sampler = GpuSampler(uuid, reporter.send)
            sampler.start()
        inbox = Inbox(context.channel)
        stage = _Preparation(context, setup, reporter, device).stage(inbox)
        for action in inbox.actions(stage.expect, stage.rest):
            stage.perform(action)
        stage.finish()
    except BaseException as error:
        reporter.failed(error)
        raise
    if sampler is not None:
        sampler.stop()
    allocated, reserved = peak_bytes(str(device))
    reporter.send(Finished(allocated_bytes=allocated, reserved_bytes=reserved))
    reporter.stop()
    inbox.wait_for_stop()
    context.leave()


@dataclass(frozen=True)
class _Preparation:
    context: RankContext
    setup: RankSetup
    reporter: Reporter
    device: torch.device

    def stage(self, inbox: Inbox) -> PipelineStage:
        """The rank's stage, for which `Joined` is reported: the model is loaded, links are open."""
        setup, reporter, name = self.setup, self.reporter, str(self.device)
        config, rank = setup.config, self.context.world.rank
        conditions = conditions_of(config, setup.checkpoint, name)
        reporter.send(Started(device=name, uuid=gpu_uuid(name), conditions=conditions))
        reporter.measure_memory(name)
        reporter.phase("loading the model")
        begun = time.monotonic()
        with out_of_memory_named(None):
            model = load_model(config, setup.checkpoint, name, config.layout.roles[rank], rank)
            load_seconds = time.monotonic() - begun
            reporter.phase("joining the other ranks")
            self.context.join()
            transport = self._connected()
        ahead = self.context.clock.monotonic_ahead
        reporter.send(Joined(device=name, load_seconds=load_seconds, clock_ahead=ahead))
        reporter.at(None)
        tools = RankTools(
            rank=rank,
            device=self.device,
            transport=transport,
            reporter=reporter,
            is_cancelled=inbox.is_cancelled,
            tensor_store=self._tensor_store(),
        )
        writer = ClipWriter(
            *(reporter, conditions, self.device, tools.tensor_store),
            fps=config.sampling.fps,
            host=self.context.host,
        )
        checkpoints = None
        # The second rank of a pair has the latents of the first.
        if setup.latents_folder and not config.layout.is_second(rank):
            checkpoints = LatentCheckpoints(Path(setup.latents_folder), conditions)
        return PipelineStage(
            *(tools, model, writer, config.sampling),
            checkpoints=checkpoints,
            profiler=self._profiler(),
        )

    def _connected(self) -> Transport:
        config, rank = self.setup.config, self.context.world.rank
        transport = Transport(
            rank,
            self.device,
            self.context.backend,
            self.reporter.transfer,
            checksum=config.checksum,
            wall_ahead=self.context.clock.wall_ahead,
        )
        layout = config.layout
        rounds, decode = map(connect_rounds, (layout.links, layout.decode_links))
        on_connecting = self.reporter.connecting
        transport.connect(rounds, on_connecting, layout.pairs, itertools.chain(*decode))
        return transport

    def _tensor_store(self) -> TensorStore | None:
        """Keeps results for verification; a rank that may be on another host sends them."""
        if self.setup.tensor_folder is None:
            return None
        is_member = self.context.world.is_member
        return TensorStore(Path(self.setup.tensor_folder), self._send_file if is_member else None)

    def _send_file(self, name: str, data: bytes) -> None:
        self.reporter.send(StoredTensor(name=name, data=base64.b64encode(data)))

    def _profiler(self) -> ClipProfiler | None:
        path = self.setup.profile_path
        if path is None or self.context.world.rank != PROFILED_RANK:
            return None
        return ClipProfiler(Path(path), str(self.device))


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
        self._left: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether actions are left."""
        return bool(self._actions)

    def holds(self, clip: int) -> bool:
        """Whether actions of `clip` are left."""
        return clip in self._left

    def add(self, actions: Sequence[Action]) -> None:
        """Adds a list of further clips, in order."""
        self._left.update(action.clip for action in actions)
        if self._actions and actions and actions[0].kind is Kind.RECV:
            self._actions.insert(self._start_of_last_work(), actions[0])
            actions = actions[1:]
        self._actions.extend(actions)

    def pop(self) -> Action:
        """Removes and returns the next action."""
        action = self._actions.popleft()
        self._left[action.clip] -= 1
        if not self._left[action.clip]:
            del self._left[action.clip]
        return action

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
        self._new: list[Work] = []
        self._now: int | None = None
        self._cancelled: set[int] = set()
        self._is_stopped = False

    def actions(self, expect: Callable[[Work], None], rest: Callable[[], None]) -> Iterator[Action]:
        """Yields this rank's actions until the parent says stop and none is left.

        `expect` is called with each work before any of its actions is yielded, `rest`
        whenever no action is left.
        """
        while True:
            self._receive_all(expect)
            if not self._queue:
                rest()
                while not (self._queue or self._is_stopped):
                    self._receive(_POLL_SECONDS)
                    self._receive_all(expect)
                if not self._queue:
                    return
            action = self._queue.pop()
            self._now = action.clip
            yield action
            if not self._queue.holds(action.clip):
                self._cancelled.discard(action.clip)
            self._now = None

    def wait_for_stop(self) -> None:
        """Waits until the parent says stop another time; cancellations before it are late."""
        self._is_stopped = False
        while not self._is_stopped:
            self._receive(_POLL_SECONDS)

    def is_cancelled(self, clip: int) -> bool:
        """Whether the parent has cancelled `clip`, which has actions left; does not wait."""
        while self._receive(0):
            pass
        return clip in self._cancelled

    def _receive_all(self, expect: Callable[[Work], None]) -> None:
        while self._receive(0):
            pass
        for work in self._new:
            expect(work)
        self._new.clear()

    def _receive(self, timeout: float) -> bool:
        message = self._channel.receive(timeout)
        if message is None:
            return False
        match parse_command(message):
            case Work() as work:
                self._new.append(work)
                self._queue.add(work.actions)
            case Cancel(clip=clip) if clip == self._now or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # this rank has done its part of the cancelled clip
        return True
