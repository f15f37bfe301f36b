"""The life of one rank: device, model, links, then work until the parent says stop."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svdpp.comm.transport import Transport
from svdpp.config import PipelineConfig
from svdpp.errors import InputError
from svdpp.launch.group import RankContext
from svdpp.models.base import VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyModel, SleepTimes
from svdpp.plan.layout import Roles
from svdpp.plan.schedule import connect_rounds
from svdpp.worker.clip_writer import ClipWriter
from svdpp.worker.device import conditions_of, gpu_uuid, take_device
from svdpp.worker.fault_injection import InjectedFault
from svdpp.worker.gpu_sampler import GpuSampler
from svdpp.worker.inbox import Inbox
from svdpp.worker.latent_checkpoints import LatentCheckpoints
from svdpp.worker.memory import out_of_memory_named, peak_bytes
from svdpp.worker.messages import Finished, Joined, PhotoWanted, Started, StoredTensor
from svdpp.worker.prefetch import ReadPhoto, from_disk
from svdpp.worker.profiler import PROFILED_RANK, ClipProfiler
from svdpp.worker.reporter import Reporter
from svdpp.worker.stage import PipelineStage
from svdpp.worker.tensor_store import TensorStore


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What every rank gets before it starts.

    `roles` are by rank; `links` are pairs (from, to) of ranks that communicate. None for a
    folder or path: nothing is kept there; for `output_folder`: clips go where their requests
    say.
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
    """Runs a rank to its end. Reports every error to the parent before it raises it."""
    if setup.fault:
        setup.fault.reach(context.world.rank, -1, "start")
    reporter = Reporter(context.channel)
    reporter.start()
    sampler = None
    try:
        device = take_device(setup.config, context.world)
        if (uuid := gpu_uuid(str(device))) is not None:
            sampler = GpuSampler(uuid, reporter.send)
            sampler.start()
        inbox = Inbox(context.channel)
        _serve(context, setup, device, reporter, inbox)
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


def _serve(
    context: RankContext,
    setup: RankSetup,
    device: torch.device,
    reporter: Reporter,
    inbox: Inbox,
) -> None:
    stage = _prepare(context, setup, device, reporter, inbox)
    for action in inbox.actions(stage.expect, stage.rest):
        stage.perform(action)
    stage.finish()


def _prepare(
    context: RankContext,
    setup: RankSetup,
    device: torch.device,
    reporter: Reporter,
    inbox: Inbox,
) -> PipelineStage:
    config, rank = setup.config, context.world.rank
    conditions = conditions_of(config, setup.checkpoint, str(device))
    reporter.send(Started(device=str(device), uuid=gpu_uuid(str(device)), conditions=conditions))
    reporter.measure_memory(str(device))
    reporter.phase("loading the model")
    begun = time.monotonic()
    if setup.fault:
        setup.fault.reach(rank, -1, "load")
    with out_of_memory_named(None):
        model = load_model(config, setup.checkpoint, str(device), setup.roles[rank], rank)
        load_seconds = time.monotonic() - begun
        if setup.fault:
            setup.fault.reach(rank, -1, "join")
        reporter.phase("joining the other ranks")
        context.join()
        transport = _connected(context, setup, device, reporter)
    ahead = context.clock.monotonic_ahead
    reporter.send(Joined(device=str(device), load_seconds=load_seconds, clock_ahead=ahead))
    reporter.at(None)
    return _new_stage(context, setup, model, transport, reporter, inbox, conditions)


def _connected(
    context: RankContext, setup: RankSetup, device: torch.device, reporter: Reporter
) -> Transport:
    transport = Transport(
        context.world.rank,
        device,
        context.backend,
        reporter.transfer,
        checksum=setup.config.checksum,
        tamper=setup.fault.tamper(context.world.rank) if setup.fault else None,
        wall_ahead=context.clock.wall_ahead,
    )
    layout, rounds = setup.config.layout, connect_rounds(setup.links)
    decode = itertools.chain.from_iterable(connect_rounds(layout.decode_links))
    transport.connect(rounds, reporter.connecting, layout.pairs, decode)
    return transport


def _new_stage(
    context: RankContext,
    setup: RankSetup,
    model: VideoModel,
    transport: Transport,
    reporter: Reporter,
    inbox: Inbox,
    conditions: dict[str, Any],
) -> PipelineStage:
    config, folder, rank = setup.config, setup.latents_folder, context.world.rank
    tensor_store = _tensor_store(context, setup, reporter)
    clip_writer = ClipWriter(
        reporter,
        conditions,
        model.device,
        tensor_store,
        fps=config.sampling.fps,
        host=context.host,
        folder=Path(setup.output_folder) if setup.output_folder else None,
    )
    return PipelineStage(
        rank,
        model,
        transport,
        clip_writer,
        reporter,
        config.sampling,
        is_cancelled=inbox.is_cancelled,
        # The second rank of a pair has the latents of the first.
        checkpoints=LatentCheckpoints(Path(folder), conditions)
        if folder and not config.layout.is_second(rank)
        else None,
        tensor_store=tensor_store,
        profiler=_profiler(setup, rank, str(model.device)),
        fault=setup.fault,
        read_photo=_from_rank_0(context.fetch, reporter) if context.fetch else from_disk,
    )


def _from_rank_0(fetch: Callable[[], bytes], reporter: Reporter) -> ReadPhoto:
    def read(clip: int, path: Path) -> bytes:
        reporter.send(PhotoWanted(clip=clip))
        data = fetch()
        if not data:
            raise InputError(f"{path.name!r} can no longer be read on rank 0's host")
        return data

    return read


def _tensor_store(context: RankContext, setup: RankSetup, reporter: Reporter) -> TensorStore | None:
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
        sleeps = _sleep_times(config, rank) if config.model.dummy_sleeps else SleepTimes()
        return DummyModel(latent, num_steps, torch.device(device), sleeps)
    from svdpp.models.engine import model  # imports diffusers: seconds, which the dummy avoids

    return model.load_model(checkpoint, config.model, config.sampling, device, roles)


def _sleep_times(config: PipelineConfig, rank: int) -> SleepTimes:
    costs = config.costs
    return SleepTimes(
        step_seconds=costs.step_on(rank),
        encode_seconds=costs.encode_on(rank),
        decode_seconds=costs.decode_on(rank),
    )
