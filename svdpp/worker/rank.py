"""The life of one rank: device, model, links, then the parent's commands until it says stop.

A launcher's rank other than 0 is connected to rank 0, and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from svdpp.comm.transport import Transport
from svdpp.config import PipelineConfig
from svdpp.errors import Interrupted, RankError, RequestError, error_to_dict, exit_code_of
from svdpp.launch import process_group, process_lifetime, rendezvous
from svdpp.launch.rendezvous import RendezvousConfig
from svdpp.launch.worker_group import END, ClockOffset, ControlChannel, EntryPoint, LaunchContext
from svdpp.launch.world import World, is_secondary_rank
from svdpp.models.base import VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind, connect_rounds
from svdpp.plan.layout import Roles
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
    ActionBatch,
    Cancel,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Joined,
    Started,
    Stop,
    describe_position,
    parse,
)
from svdpp.worker.stage import PipelineStage, RankContext
from svdpp.worker.stats import StatsSampler
from svdpp.worker.tensor_files import LatentCheckpoints, TensorStore

_POLL_SECONDS = 1.0
# A launcher shows the output of the rank that fails first: rank 0, which prints the error.
_EXIT_DELAY_SECONDS = 2.0
_REPORT_SECONDS = 4.0
_SIGNAL_REPORT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Configuration of every rank. None for a folder or path: nothing is kept there."""

    config: PipelineConfig
    checkpoint: Checkpoint | None
    tensor_folder: str | None = None
    latents_folder: str | None = None
    profile_path: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each weight file of this host, by name; empty without latent checkpoints."""
    fault: Callable[[int], object] | None = None
    """Function that a test calls first in each rank, to damage it."""


def rank_main(launch: LaunchContext, setup: RankSetup) -> None:
    """Run a rank of a pipeline to its end.

    Raises:
        SvdppError: what ended the rank, after it has been reported to the parent.
    """
    if setup.fault is not None:
        setup.fault(launch.world.rank)

    def run_actions(device: torch.device, reporter: Reporter) -> None:
        commands = CommandReceiver(launch.channel)
        stage = _prepared_stage(launch, setup, reporter, device, commands)
        for action in commands.actions(stage.enqueue, stage.idle):
            stage.run(action)
        stage.finish()

    run_rank(launch, setup.config, run_actions)


def run_rank(
    launch: LaunchContext, config: PipelineConfig, work: Callable[[torch.device, Reporter], None]
) -> None:
    """Do a rank's work on its device, and report every error to the parent before raising it.

    Args:
        launch: channel to the parent, and the rank's place in the world.
        config: of the pipeline.
        work: gets the device and the reporter; ends after the parent's first `Stop`.

    Raises:
        RequestError: the device cannot be used.
        OutOfMemoryError: the device has no memory for a context.
    """
    reporter = Reporter(launch.channel, "" if launch.world.on_first_host else launch.host)
    reporter.start()
    try:
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
    if launch.world.launcher is not None:  # a process that goes on; others exit at once
        process_group.destroy()


def wait_for_stop(channel: ControlChannel) -> None:
    """Wait until the parent says stop; cancellations before it are late, and skipped."""
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
    """The rank's stage, once its model is loaded and its links are open."""
    config, rank, name = setup.config, launch.world.rank, str(device)
    conditions = conditions_of(config, setup.checkpoint, name)
    reporter.send(Started(device=name, uuid=gpu_uuid(name), conditions=conditions))
    reporter.device = name
    reporter.set_phase("loading the model")
    begun = time.monotonic()
    with out_of_memory_named(None, device, rank):
        model = load_rank_model(config, setup.checkpoint, name, config.layout.roles[rank], rank)
        load_seconds = time.monotonic() - begun
        reporter.set_phase("joining the other ranks")
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
        # A rank that may be on another host sends its tensors.
        send = reporter.send_tensor if is_secondary_rank(launch.world) else None
        tensor_store = TensorStore(Path(setup.tensor_folder), send)
    # The second rank of a pair has the latents of the first.
    if setup.latents_folder is not None and not config.layout.is_second(rank):
        folder = LatentCheckpoints(Path(setup.latents_folder), conditions, setup.weights)
        checkpoint_writer = LatentCheckpointWriter(folder, device, reporter)
    if setup.profile_path is not None and rank == 0:  # the only one on the parent's machine
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
        config: model, sampling parameters and, for a dummy that sleeps, costs.
        checkpoint: of the model; None for the dummy.
        device: where the weights go.
        roles: what the rank does; parts for other roles are not loaded.
        rank: whose costs a dummy sleeps by.

    Raises:
        ModelError: the checkpoint is incomplete or damaged.
        OutOfMemoryError: the device has too little memory.
    """
    if checkpoint is None:
        latent, num_steps = config.model.dummy_latent, config.sampling.num_inference_steps
        costs = config.costs if config.model.dummy_sleeps else None
        return DummyModel(latent, num_steps, torch.device(device), costs, rank)
    from svdpp.models.engine import model  # imports diffusers: seconds, which the dummy avoids

    return model.load_engine_model(checkpoint, config.model, config.sampling, device, roles)


# RECV, DECODE and SEND_FRAMES of a part of a clip's frames.
_HELP_ACTIONS = 3


def _is_help(action: Action) -> bool:
    """Whether an action begins the decode of a part of a clip's frames for another rank."""
    return action.kind is Kind.RECV and action.frames is not None


class ActionQueue(deque[Action]):
    """One rank's actions, in the order in which it performs them.

    Clips that are submitted one at a time overlap like those of one list. A RECV at the start of a
    list moves before the work of the last clip, if that has not begun. The part of the last clip's
    frames that this rank decodes for another one comes after the steps of the new clip, if it has
    not begun and the new clip is the next one: else the rank would wait until the clip has passed
    the ranks between.

    Only the next one, because the ranks get their lists at different times. So the decode of clip c
    waits at most for steps of clip c + 1, and these at most for the decode of clip c on a rank
    before: the ranks cannot wait for each other in a circle.
    """

    def holds(self, clip: int) -> bool:
        """Whether actions of a clip are left."""
        return any(action.clip == clip for action in self)

    def add(self, actions: Sequence[Action]) -> None:
        """Add a list of further clips, in order."""
        help_of_last = self._take_help(actions[0].clip - 1) if actions else []
        first_help = next((i for i, each in enumerate(actions) if _is_help(each)), len(actions))
        visit, rest = actions[:first_help], actions[first_help:]
        if self and visit and visit[0].kind is Kind.RECV:
            self.insert(self._start_of_last_work(), visit[0])
            visit = visit[1:]
        for part in (visit, help_of_last, rest):
            self.extend(part)

    def _take_help(self, clip: int) -> list[Action]:
        """Removes and returns the decode for another rank with which the queue ends, of `clip`."""
        start = len(self) - _HELP_ACTIONS
        if start < 0 or self[start].clip != clip or not _is_help(self[start]):
            return []
        return [self.pop() for _ in range(_HELP_ACTIONS)][::-1]

    def _start_of_last_work(self) -> int:
        """The index of the first action, other than its RECV, of the last clip in the queue."""
        index, clip = len(self), self[-1].clip
        while index and self[index - 1].clip == clip and self[index - 1].kind is not Kind.RECV:
            index -= 1
        return index


class CommandReceiver:
    """Receiver of the parent's commands, between actions and, for cancellations, between steps."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._queue = ActionQueue()
        self._on_batch: Callable[[ActionBatch], None] = lambda _: None
        self._current_clip: int | None = None
        self._cancelled: set[int] = set()
        self._is_stopped = False

    def actions(
        self, on_batch: Callable[[ActionBatch], None], on_idle: Callable[[], None]
    ) -> Iterator[Action]:
        """Yield this rank's actions until the parent says stop and none is left.

        Args:
            on_batch: called with each batch as it comes.
            on_idle: called each time that no action is left.
        """
        self._on_batch = on_batch
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
        """Whether the parent has cancelled a clip that has actions left; does not wait."""
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
            case ActionBatch() as batch:
                self._queue.add(batch.actions)
                self._on_batch(batch)
            case Cancel(clip=clip) if clip == self._current_clip or self._queue.holds(clip):
                self._cancelled.add(clip)
            case Stop():
                self._is_stopped = True
            case _:
                pass  # this rank has done its part of the cancelled clip
        return True


# --- ranks that a launcher started ----------------------------------------------------------------


def run_secondary_rank(
    entry: EntryPoint,
    argument: Any,
    config: RendezvousConfig,
    *,
    device: str,
    observers: Sequence[Callable[[int, Event], None]],
    say: Callable[[str, bool], None],
    ignores_signals: bool = False,
) -> None:
    """Run a rank other than 0 of a launcher's world; end the process unless all work succeeded.

    Args:
        entry: what the rank does, such as `rank_main`.
        argument: second argument of `entry`.
        config: world, backend and deadlines; must equal those of rank 0.
        device: name of the rank's device, for messages.
        observers: called with this rank and each of its events.
        say: see `Pipeline.serve`.
        ignores_signals: whether it survives INT, TERM and HUP: rank 0, which gets the same ones,
            ends the run in its own time.

    Raises:
        RankError: rank 0 cannot be reached, or does not answer in time.
        RequestError: this rank's command line differs from that of rank 0.
    """
    process_lifetime.end_with_parent()
    if ignores_signals:
        process_lifetime.ignore_signals()
    else:
        process_lifetime.exit_on_signals(_exit_on_signal)
    _, store = process_group.open_store(config.world, config.start_timeout)
    connection, endpoint = rendezvous.connect(store, config.hello(), config)
    clock = _measure_clock_offset(connection, config.start_timeout)
    parent = _ParentChannel(connection, endpoint.host, config, device, observers, say)
    _parents[:] = [parent]
    while parent.receive(_EXIT_DELAY_SECONDS) is None:
        pass  # until rank 0 lets all ranks begin; if the connection is lost, the process exits
    launch = LaunchContext(
        config.world,
        config.backend,
        parent,
        join=lambda: process_group.join_store(config.world, config.backend, store, endpoint.token),
        host=socket.gethostname(),
        clock=clock,
    )
    try:
        entry(launch, argument)
    except BaseException as error:
        # The entry has reported the error, and rank 0 normally ends this process before that.
        time.sleep(_REPORT_SECONDS)
        process_lifetime.exit_process(exit_code_of(error))
    parent.disconnect()


def _measure_clock_offset(connection: Connection, seconds: float) -> ClockOffset:
    try:
        return rendezvous.measure_clock_offset(connection, time.monotonic() + seconds)
    except (OSError, EOFError) as error:
        hint = "check whether it has ended, is stopped, or its host is down"
        raise RankError(
            "rank 0 does not answer", hint, details={"peer": 0, "timeout_seconds": seconds}
        ) from error


def report_start_failure(world: World, error: dict[str, Any], *, timeout: float) -> bool:
    """Report to rank 0 why this rank cannot start.

    Args:
        world: what the launcher says of this process.
        error: as `errors.error_to_dict` returns it.
        timeout: seconds to reach rank 0.

    Returns:
        Whether rank 0 could be reached.
    """
    config = RendezvousConfig(world=world, start_timeout=timeout, peer_timeout=timeout)
    try:
        _, store = process_group.open_store(world, timeout)
        rendezvous.connect(store, config.hello(error), config)
    except (RankError, RequestError):
        return False
    return True


# The link in use, for the thread that handles signals.
_parents: list[_ParentChannel] = []


def _exit_on_signal(number: int) -> NoReturn:
    for parent in _parents:
        parent.report_signal(number)
    process_lifetime.exit_with_signal_code(number)


class _ParentChannel(ControlChannel):
    """A joined rank's channel to rank 0; its thread ends this process if rank 0 says so or goes."""

    def __init__(
        self,
        connection: Connection,
        host_of_rank_0: str,
        config: RendezvousConfig,
        device: str,
        observers: Sequence[Callable[[int, Event], None]],
        say: Callable[[str, bool], None],
    ) -> None:
        super().__init__(connection)
        self._observers, self._say = observers, say
        self._world, self._peer_timeout = config.world, config.peer_timeout
        self._name = f"rank {config.world.rank} ({device} of {socket.gethostname()})"
        self._rank_0 = f"rank 0 ({host_of_rank_0})"
        self._heartbeat = Heartbeat()
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_disconnected = self._has_timed_out = False
        threading.Thread(target=self._listen, name="parent-channel", daemon=True).start()

    def send(self, message: bytes) -> None:
        event = parse(message)
        if isinstance(event, Heartbeat):
            self._heartbeat = event
        for observer in self._observers:
            observer(self._world.rank, event)
        with self._lock:
            try:
                super().send(message)
            except OSError as error:
                # The kernel tells one call of a timeout; after it, reads find the end of the data.
                self._has_timed_out |= not isinstance(error, ConnectionError)
                raise

    def receive(self, timeout: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=timeout)
        return None

    def disconnect(self) -> None:
        self._is_disconnected = True
        with socket.socket(fileno=self.connection.fileno()) as duplicate:
            with contextlib.suppress(OSError):
                duplicate.shutdown(
                    socket.SHUT_WR
                )  # rank 0 first reads the messages still in flight
            duplicate.detach()

    def report_signal(self, number: int) -> None:
        """Report the signal that ends this process to rank 0, if that succeeds at once."""
        if self._is_disconnected:
            return
        action, step = self._heartbeat.action, self._heartbeat.step
        error = error_to_dict(Interrupted(number))
        failed = Failed(error=error, traceback="", action=action, step=step)

        def send() -> None:
            with contextlib.suppress(OSError):
                super(_ParentChannel, self).send(failed.to_bytes())

        thread = threading.Thread(target=send, name="report-signal", daemon=True)
        thread.start()
        thread.join(_SIGNAL_REPORT_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.recv_bytes()
                if message.startswith(END):
                    self._end(**json.loads(message[1:]))
                self._commands.put(message)
        except (EOFError, OSError) as error:
            reason = f"nothing has reached {self._rank_0} for {self._peer_timeout:.0f} s"
            with self._lock:  # a send in another thread may learn it first
                if isinstance(error, (EOFError, ConnectionError)) and not self._has_timed_out:
                    reason = f"{self._rank_0} is gone"
            self._exit_without_rank_0(reason)
        except Exception as error:  # without this thread the process would never end
            self._exit_without_rank_0(f"{self._rank_0} sent an invalid message ({error!r})")

    def _end(self, code: int, error: str | None) -> NoReturn:
        if error is not None:  # rank 0 has told the user
            self._say(f"{self._name} ends with the run: {error}", False)
            time.sleep(_EXIT_DELAY_SECONDS)
        process_lifetime.exit_process(code)

    def _exit_without_rank_0(self, reason: str) -> None:
        if not self._is_disconnected:
            where = describe_position(self._heartbeat.action, self._heartbeat.step)
            self._say(f"{reason}: {self._name} ends{where}", True)
            if self._world.local_rank:  # the launcher ends all ranks of a host after the first one
                time.sleep(_EXIT_DELAY_SECONDS)
            process_lifetime.exit_process(RankError.exit_code)
