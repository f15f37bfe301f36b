"""Main loop of a rank: take the device, load the model, open links, run commands until `Stop`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from svdpp.comm.transport import Transport
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.launch import process_group
from svdpp.launch.worker_group import ControlChannel, LaunchContext
from svdpp.launch.world import is_secondary_rank
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel
from svdpp.models.video_model import VideoModel
from svdpp.plan.actions import Action, Kind, connect_rounds
from svdpp.plan.roles import Roles
from svdpp.worker.background import ClipWriter, LatentCheckpointWriter, Reporter
from svdpp.worker.device import (
    ClipProfiler,
    conditions_of,
    device_name,
    gpu_uuid,
    out_of_memory_named,
    peak_bytes,
    take_device,
)
from svdpp.worker.messages import (
    Cancel,
    ClipBatch,
    Finished,
    Joined,
    PrepareImage,
    Started,
    Stop,
    parse,
)
from svdpp.worker.rank_context import RankContext
from svdpp.worker.routes import Router
from svdpp.worker.stage import PipelineStage
from svdpp.worker.stats import StatsSampler
from svdpp.worker.tensor_files import LatentCheckpoints, TensorStore

_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Configuration and paths that every rank of a pipeline gets when it starts."""

    config: PipelineConfig
    """Resolved configuration of the pipeline."""
    checkpoint: Checkpoint | None
    """Checkpoint of the model; None for the dummy model."""
    tensor_folder: str | None = None
    """Folder for tensors that are kept for verification; None: no tensors are kept."""
    latents_folder: str | None = None
    """Folder for latent checkpoints; None: no latent checkpoints are written."""
    profile_path: str | None = None
    """Path of the torch.profiler trace that rank 0 writes; None: no trace."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each weight file on this host, in hex, by file name. Empty if no latent
    checkpoints are written."""
    fault: Callable[[int], object] | None = None
    """Function that each rank calls first, with its rank number; tests use it to inject faults."""


def rank_main(launch: LaunchContext, setup: RankSetup) -> None:
    """Run a rank of a pipeline, from loading the model until the parent sends `Stop`.

    Raises:
        SvdppError: The rank failed. The error has been reported to the parent.
    """
    if setup.fault is not None:
        setup.fault(launch.world.rank)

    def run_actions(device: torch.device, reporter: Reporter) -> None:
        commands = CommandReceiver(launch.channel)
        router = Router(setup.config, setup.checkpoint)
        stage = _prepared_stage(launch, setup, reporter, device, commands)

        def take(batch: ClipBatch) -> Sequence[Action]:
            requests = [job.request for job in batch.jobs]
            actions = router.schedule(requests, batch.jobs[0].clip)[launch.world.rank]
            stage.enqueue(actions, batch.jobs)
            return actions

        for action in commands.actions(take, stage.idle, stage.prepare_image):
            stage.run(action)
        stage.finish()

    run_rank(launch, setup.config, run_actions)


def run_rank(
    launch: LaunchContext, config: PipelineConfig, work: Callable[[torch.device, Reporter], None]
) -> None:
    """Take a rank's device, run `work` on it, and wait until the parent ends the rank.

    Any error is reported to the parent, and then raised.

    Args:
        launch: Context of the rank.
        config: Configuration of the pipeline.
        work: Function that gets the device and the reporter, and returns after the first `Stop`.

    Raises:
        RequestError: The device cannot be used.
        OutOfMemoryError: The device has no memory for a CUDA context.
    """
    reporter = Reporter(launch.channel, "" if launch.world.on_first_host else launch.host)
    try:
        reporter.start()
        device = take_device(config, launch.world)
        work(device, reporter)
    except BaseException as error:
        reporter.report_failure(error)
        raise
    reporter.stop_sampling()
    allocated, reserved = peak_bytes(str(device))
    reporter.send(Finished(allocated_bytes=allocated, reserved_bytes=reserved))
    reporter.stop()
    wait_for_stop(launch.channel)
    # A process that a launcher such as torchrun has started runs on after this function, so the
    # process group is closed here. All other processes of ranks end, which closes it, too.
    if launch.world.launcher is not None:
        process_group.destroy()


def wait_for_stop(channel: ControlChannel) -> None:
    """Wait for the parent's next `Stop`; ignore commands to cancel clips, as no work is left."""
    message = None
    while message is None or not isinstance(parse(message), Stop):
        message = channel.receive(_POLL_SECONDS)


def _prepared_stage(
    launch: LaunchContext,
    setup: RankSetup,
    reporter: Reporter,
    device: torch.device,
    commands: CommandReceiver,
) -> PipelineStage:
    """Load the model, open the links to other ranks, and return the rank's `PipelineStage`."""
    config, rank, name = setup.config, launch.world.rank, str(device)
    conditions = conditions_of(config, setup.checkpoint, name)
    reporter.send(Started(device=name, uuid=gpu_uuid(name), conditions=conditions))
    reporter.device = name
    reporter.set_phase("loading the model")
    begun = time.monotonic()
    with out_of_memory_named(None, device, rank):
        model = load_rank_model(config, setup.checkpoint, name, config.layout.roles[rank], rank)
        load_seconds = time.monotonic() - begun
        reporter.set_phase("joining the other ranks", waiting=True)
        launch.join()
        transport = _connected_transport(launch, config, reporter, device)
    moved = lambda: (transport.bytes_sent, transport.bytes_received)  # noqa: E731
    reporter.sampler = StatsSampler(reporter.send, device, gpu_uuid(name), moved)
    reporter.sampler.start()
    ahead = launch.clock.monotonic_ahead
    joined = Joined(
        device=name,
        load_seconds=load_seconds,
        device_name=device_name(name),
        clock_ahead=ahead,
    )
    reporter.send(joined)
    reporter.set_position(None)
    tensor_store = checkpoint_writer = profiler = None
    if setup.tensor_folder is not None:
        # Secondary ranks (ranks other than 0 that a launcher has started) can be on another host,
        # so they send their tensors to the parent.
        send = reporter.send_tensor if is_secondary_rank(launch.world) else None
        tensor_store = TensorStore(Path(setup.tensor_folder), send)
    # The two ranks of a pair, which share classifier-free guidance, have the same latents. Only the
    # first rank writes them.
    if setup.latents_folder is not None and not config.layout.is_second(rank):
        folder = LatentCheckpoints(Path(setup.latents_folder), conditions, setup.weights)
        checkpoint_writer = LatentCheckpointWriter(folder, device, reporter)
    if setup.profile_path is not None and rank == 0:
        profiler = ClipProfiler(Path(setup.profile_path), name)
    context = RankContext(
        rank=rank,
        device=device,
        transport=transport,
        reporter=reporter,
        clip_writer=ClipWriter(reporter, conditions, device, tensor_store, host=launch.host),
        checkpoint_writer=checkpoint_writer,
        profiler=profiler,
        is_cancelled=commands.is_cancelled,
        tensor_store=tensor_store,
    )
    return PipelineStage(context, model, config.sampling)


def _connected_transport(
    launch: LaunchContext, config: PipelineConfig, reporter: Reporter, device: torch.device
) -> Transport:
    transport = Transport(
        launch.world.rank,
        device,
        launch.backend,
        reporter.report_transfer,
        checksum=config.checksum,
        monotonic_ahead=launch.clock.monotonic_ahead,
    )
    layout = config.layout
    back = [(high, low) for low, high in layout.pairs]
    transport.connect(
        {
            "clips": connect_rounds(layout.links),
            "predictions": [layout.pairs, back],
            "decode": connect_rounds(layout.decode_links),
        },
        lambda peer: reporter.set_phase(f"opening its link with rank {peer}", peer),
    )
    return transport


def load_rank_model(
    config: PipelineConfig, checkpoint: Checkpoint | None, device: str, roles: Roles, rank: int = 0
) -> VideoModel:
    """Load the parts of a model that a rank needs.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model.
        device: Name of the device for the weights.
        roles: Roles of the rank; only parts for these roles are loaded.
        rank: Number of the rank. The dummy model needs the number to look up how long the rank's
            actions must last.

    Raises:
        ModelError: The checkpoint is incomplete or damaged.
        OutOfMemoryError: The device has too little memory.
    """
    if checkpoint is None:
        latent, num_steps = config.model.dummy_latent, config.sampling.num_inference_steps
        costs = config.costs if config.model.dummy_sleeps else None
        return DummyModel(latent, num_steps, torch.device(device), costs, rank)
    # This import takes seconds, because it imports diffusers. The dummy model does not need it.
    from svdpp.models.engine import factory

    return factory.load_engine_model(checkpoint, config.model, config.sampling, device, roles)


# Number of actions by which a rank decodes a part of a clip for another rank, if it must first
# receive the final latent: RECV, DECODE, SEND_FRAMES.
_HELP_ACTIONS = 3


def _is_decode_help(action: Action) -> bool:
    """Whether an action is the RECV with which a rank begins to decode frames for another rank."""
    return action.kind is Kind.RECV and action.part is not None


class ActionQueue(deque[Action]):
    """Queue of a rank's actions, which reorders actions so that clips overlap.

    Clips that are submitted one at a time then overlap as if they were submitted together. `add`
    gets the action list of a new clip. If the list begins with a RECV, this RECV is put before the
    work on the last clip in the queue, unless that work has begun. In this example,
    `RECV c1 @2 <0` receives clip 1 from rank 0 after two of its steps:

        queue          RECV c0 @2 <0 | DENOISE c0 2:4 | DECODE c0 @4 | FINISH c0 @4
        new list       RECV c1 @2 <0 | DENOISE c1 2:4 | ...
        queue after    RECV c0 @2 <0 | RECV c1 @2 <0 | DENOISE c0 2:4 | ... | DENOISE c1 2:4 | ...

    A rank may help another rank to decode clip c, by the actions RECV, DECODE and SEND_FRAMES for
    some of the frames. These actions cannot begin before later ranks have run the clip's last
    steps. To use this time, the rank runs its own steps of clip c + 1 first: if the three actions
    have not begun, they are moved behind these steps.

    The three actions are never moved further, behind the steps of clip c + 2, because this could
    cause a deadlock when ranks get their lists at different times. Behind the steps of clip c + 1,
    no deadlock is possible: the three actions wait only for these steps, and these steps wait only
    for an earlier rank that decodes a part of clip c.
    """

    def holds(self, clip: int) -> bool:
        """Whether the rank's queue has actions of a clip."""
        return any(action.clip == clip for action in self)

    def add(self, actions: Sequence[Action]) -> None:
        """Append actions of further clips to the rank's queue; reorder it so that clips overlap."""
        help_of_last = self._take_decode_help(actions[0].clip - 1) if actions else []
        first_help = next(
            (i for i, each in enumerate(actions) if _is_decode_help(each)), len(actions)
        )
        visit, rest = actions[:first_help], actions[first_help:]
        if self and visit and visit[0].kind is Kind.RECV:
            self.insert(self._start_of_last_work(), visit[0])
            visit = visit[1:]
        for part in (visit, help_of_last, rest):
            self.extend(part)

    def _take_decode_help(self, clip: int) -> list[Action]:
        """Remove and return the queue's last actions, if they decode `clip` for another rank."""
        start = len(self) - _HELP_ACTIONS
        if start < 0 or self[start].clip != clip or not _is_decode_help(self[start]):
            return []
        return [self.pop() for _ in range(_HELP_ACTIONS)][::-1]

    def _start_of_last_work(self) -> int:
        """Return the queue index of the last clip's first action, not counting the clip's RECV."""
        index, clip = len(self), self[-1].clip
        while index and self[index - 1].clip == clip and self[index - 1].kind is not Kind.RECV:
            index -= 1
        return index


class CommandReceiver:
    """Receiver of the parent's commands. Commands are read between actions and between steps."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._queue = ActionQueue()
        self._take_batch: Callable[[ClipBatch], Sequence[Action]] = lambda _: ()
        self._prepare_image: Callable[[ClipRequest], None] = lambda _: None
        self._current_clip: int | None = None
        self._cancelled: set[int] = set()
        self._is_stopped = False

    def actions(
        self,
        take_batch: Callable[[ClipBatch], Sequence[Action]],
        on_idle: Callable[[], None],
        prepare_image: Callable[[ClipRequest], None] = lambda _: None,
    ) -> Iterator[Action]:
        """Yield this rank's actions until the parent has sent `Stop` and no action is left.

        Args:
            take_batch: Callback that gets each `ClipBatch` on arrival, and returns this rank's
                actions.
            on_idle: Callback that is called when no action is left, and again in every poll for new
                commands.
            prepare_image: Callback that gets the request of each `PrepareImage`.
        """
        self._take_batch, self._prepare_image = take_batch, prepare_image
        while True:
            self._receive_all()
            if self._queue:
                action = self._queue.popleft()
                self._current_clip = action.clip
                yield action
                if action.clip in self._cancelled and not self._queue.holds(action.clip):
                    self._cancelled.remove(action.clip)
                self._current_clip = None
                continue
            on_idle()
            if self._is_stopped:
                return
            self._receive(_POLL_SECONDS)

    def is_cancelled(self, clip: int) -> bool:
        """Whether the parent has cancelled a clip that still has actions on this rank.

        The method first reads all commands that have arrived. It never blocks.
        """
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
            case ClipBatch() as batch:
                self._queue.add(self._take_batch(batch))
            case PrepareImage(request=request):
                self._prepare_image(request)
            case Cancel(clip=clip) if clip == self._current_clip or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # a `Cancel` for a clip that this rank has finished has no effect
        return True
