"""Owns one rank's life: settings, model, links, then work until it is told to stop."""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from svdpp.comm.transport import Transport
from svdpp.config import PipelineConfig
from svdpp.errors import InputError
from svdpp.launch import process_group
from svdpp.launch.channel import Channel
from svdpp.launch.started import RankContext
from svdpp.models import determinism
from svdpp.models.base import VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel, SleepTimes
from svdpp.plan.layout import Roles
from svdpp.worker.clip_writer import ClipWriter
from svdpp.worker.draft_stage import DraftStage
from svdpp.worker.fault_injection import InjectedFault
from svdpp.worker.latent_checkpoints import LatentCheckpoints
from svdpp.worker.messages import (
    Cancel,
    Finished,
    Joined,
    PhotoWanted,
    Stop,
    StoredTensor,
    Work,
    parse_command,
)
from svdpp.worker.out_of_memory import out_of_memory_named
from svdpp.worker.peak_memory import peak_bytes
from svdpp.worker.prefetch import ReadPhoto, from_disk
from svdpp.worker.profiler import PROFILED_RANK, ClipProfiler
from svdpp.worker.reporter import Reporter
from svdpp.worker.stage import PipelineStage
from svdpp.worker.tensor_store import TensorStore

_COMMAND_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What every rank is told before it starts.

    Args:
        config: resolved, so that the number of frames is known.
        checkpoint: found and checked; None for the dummy model.
        roles: by rank.
        transfers: pairs (from, to) of ranks that will talk, in the order in which they connect.
        tensor_folder: where latents and frames are kept for verification.
        latents folder: where packets are kept from which an interrupted clip goes on.
        profile_path: where rank 0's view of torch.profiler goes; None asks for none.
        output_folder: where this host puts its clips; None: where the requests say.
        fault: planted damage.
    """

    config: PipelineConfig
    checkpoint: Checkpoint | None
    roles: tuple[Roles, ...]
    links: tuple[tuple[int, int], ...]
    tensor_folder: str | None = None
    latents_folder: str | None = None
    profile_path: str | None = None
    output_folder: str | None = None
    fault: InjectedFault | None = None


def rank_main(context: RankContext, setup: RankSetup) -> None:
    """Runs a rank to its end. Every error is reported to the parent before it is raised."""
    if setup.fault:
        setup.fault.reach(context.world.rank, -1, "start")
    reporter = Reporter(context.channel)
    reporter.start()
    try:
        _serve(context, setup, reporter)
    except BaseException as error:
        reporter.failed(error)
        raise
    allocated, reserved = peak_bytes(_device(context, setup))
    reporter.send(Finished(allocated_bytes=allocated, reserved_bytes=reserved))
    reporter.stop()
    process_group.destroy()


class _Inbox:
    """Commands from the parent, in their order; a cancelled clip is known as soon as it is asked.

    Args:
        channel: that brings them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: deque[Work | Stop] = deque()
        self._cancelled: set[int] = set()

    def next(self) -> Work | Stop:
        """The next piece of work, or the end of all."""
        while not self._waiting:
            self._look(_COMMAND_POLL_SECONDS)
        return self._waiting.popleft()

    def is_cancelled(self, clip: int) -> bool:
        """Whether `clip` has been settled without this rank; does not wait."""
        while self._look(0):
            pass
        return clip in self._cancelled

    def _look(self, timeout: float) -> bool:
        message = self._channel.receive(timeout)
        if message is None:
            return False
        command = parse_command(message)
        if isinstance(command, Cancel):
            self._cancelled.add(command.clip)
        else:
            self._waiting.append(command)
        return True


def _serve(context: RankContext, setup: RankSetup, reporter: Reporter) -> None:
    inbox = _Inbox(context.channel)
    stage = _prepare(context, setup, reporter, inbox)
    while isinstance(command := inbox.next(), Work):
        jobs = {job.clip: job for job in command.jobs}
        stage.perform(command.parsed(), jobs, command.latents_keys)
    stage.finish()


def _prepare(
    context: RankContext, setup: RankSetup, reporter: Reporter, inbox: _Inbox
) -> PipelineStage:
    """Everything before the first action; reports when all ranks have got as far."""
    config, rank = setup.config, context.world.rank
    device = _device(context, setup)
    determinism.make_deterministic(num_threads=config.num_threads, device=device)
    begun = time.monotonic()
    if setup.fault:
        setup.fault.reach(rank, -1, "load")
    with out_of_memory_named(None):
        model = load_model(setup.config, setup.checkpoint, device, setup.roles[rank], rank)
    load_seconds = time.monotonic() - begun
    context.join()
    transport = Transport(
        rank,
        torch.device(device),
        context.backend,
        reporter.transfer,
        checksum=config.checksum,
        tamper=setup.fault.tamper(rank) if setup.fault else None,
        wall_ahead=context.clock.wall_ahead,
    )
    transport.connect(setup.links)
    ahead = context.clock.monotonic_ahead
    reporter.send(Joined(device=device, load_seconds=load_seconds, clock_ahead=ahead))
    return _new_stage(context, setup, model, transport, reporter, inbox)


def _new_stage(
    context: RankContext,
    setup: RankSetup,
    model: VideoModel,
    transport: Transport,
    reporter: Reporter,
    inbox: _Inbox,
) -> PipelineStage:
    config, folder, rank = setup.config, setup.latents_folder, context.world.rank
    conditions = determinism.conditions(str(model.device), channels_last=config.model.channels_last)
    tensor_store = _tensor_store(context, setup, reporter)
    # In a draft every rank has frames of the clip: they are told apart, and kept, where they meet.
    kept = tensor_store if config.draft is None else None
    clip_writer = ClipWriter(
        *(reporter.send, reporter.clip_failed, reporter.draft_lost, reporter.failed),
        *(conditions, kept),
        fps=config.sampling.fps,
        host=context.host,
        folder=Path(setup.output_folder) if setup.output_folder else None,
    )
    parts = rank, model, transport, clip_writer, reporter
    profiler = _profiler(setup, rank, str(model.device))
    if config.draft is not None:
        return DraftStage(
            *(*parts, config),
            is_cancelled=inbox.is_cancelled,
            tensor_store=tensor_store if rank == 0 else None,
            results=tensor_store,
            profiler=profiler,
            fault=setup.fault,
        )
    return PipelineStage(
        *(*parts, config.sampling),
        checkpoints=LatentCheckpoints(Path(folder), conditions) if folder else None,
        tensor_store=tensor_store,
        profiler=profiler,
        fault=setup.fault,
        read_photo=_from_rank_0(context, reporter) if context.fetch else from_disk,
    )


def _from_rank_0(context: RankContext, reporter: Reporter) -> ReadPhoto:
    """Photographs lie on rank 0's host, which need not be this one."""

    def read(clip: int, path: Path) -> bytes:
        reporter.send(PhotoWanted(clip=clip))
        assert context.fetch is not None
        data = context.fetch()
        if not data:
            raise InputError(f"{path.name!r} can no longer be read on rank 0's host")
        return data

    return read


def _tensor_store(context: RankContext, setup: RankSetup, reporter: Reporter) -> TensorStore | None:
    """Where results are kept for comparison; a rank that may be on another host sends them."""
    if setup.tensor_folder is None:
        return None
    if not context.world.is_member:
        return TensorStore(Path(setup.tensor_folder))
    return TensorStore(
        Path(setup.tensor_folder),
        lambda name, data: reporter.send(StoredTensor(name=name, data=base64.b64encode(data))),
    )


def _profiler(setup: RankSetup, rank: int, device: str) -> ClipProfiler | None:
    if setup.profile_path is None or rank != PROFILED_RANK:
        return None
    return ClipProfiler(Path(setup.profile_path), device)


def _device(context: RankContext, setup: RankSetup) -> str:
    return process_group.device_of_rank(setup.config.device, context.world.local_rank)


def load_model(
    config: PipelineConfig,
    checkpoint: Checkpoint | None,
    device: str,
    roles: Roles,
    rank: int = 0,
) -> VideoModel:
    """The model's parts that `roles` ask for, on `device`; the dummy sleeps as `rank` does."""
    if checkpoint is None:
        latent, num_steps = config.model.dummy_latent, config.sampling.num_inference_steps
        sleeps = _sleep_times(config, rank) if config.model.dummy_sleeps else SleepTimes()
        return DummyModel(latent, num_steps, torch.device(device), sleeps)
    from svdpp.models.svd.model import load_svd  # diffusers: seconds that the dummy need not pay

    return load_svd(
        checkpoint,
        config.model,
        config.sampling,
        device,
        encode=roles.encode,
        denoise=roles.denoise,
        decode=roles.decode,
    )


def _sleep_times(config: PipelineConfig, rank: int) -> SleepTimes:
    costs = config.costs
    return SleepTimes(
        step_seconds=costs.step_on(rank),
        encode_seconds=costs.encode_on(rank),
        decode_seconds=costs.decode_on(rank),
    )
