"""Owns one rank's life: settings, model, links, then work until it is told to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from svdpp.config import LatentSpec, PipelineConfig
from svdpp.distributed import process_group
from svdpp.distributed.launch import Member
from svdpp.distributed.transport import Transport
from svdpp.models import determinism
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy_unet import DummyModel, Pace
from svdpp.models.interface import VideoModel
from svdpp.plan.layout import Roles
from svdpp.runtime.delivery import Delivery
from svdpp.runtime.evidence import Evidence
from svdpp.runtime.faults import PlantedFault
from svdpp.runtime.handover import Handovers
from svdpp.runtime.memory import out_of_memory_named
from svdpp.runtime.messages import Finished, Joined, Stop, Work, parse_command
from svdpp.runtime.reporter import Reporter
from svdpp.runtime.stage import PipelineStage

_COMMAND_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What every rank is told before it starts.

    Args:
        config: resolved, so that the number of frames is known.
        checkpoint: found and checked; None for the dummy model.
        roles: by rank.
        hops: pairs (from, to) of ranks that will talk, in the order in which they connect.
        evidence_folder: where latents and frames are kept for verification.
        handover_folder: where packets are kept from which an interrupted clip goes on.
        fault: planted damage.
    """

    config: PipelineConfig
    checkpoint: Checkpoint | None
    roles: tuple[Roles, ...]
    hops: tuple[tuple[int, int], ...]
    evidence_folder: str | None = None
    handover_folder: str | None = None
    fault: PlantedFault | None = None


def rank_main(member: Member, setup: RankSetup) -> None:
    """Runs a rank to its end. Every error is reported to the parent before it is raised."""
    if setup.fault:
        setup.fault.reach(member.world.rank, -1, "start")
    reporter = Reporter(member.channel)
    reporter.start()
    try:
        _serve(member, setup, reporter)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.send(Finished())
    reporter.stop()
    process_group.leave()


def _serve(member: Member, setup: RankSetup, reporter: Reporter) -> None:
    stage = _prepare(member, setup, reporter)
    while True:
        message = member.channel.receive(_COMMAND_POLL_SECONDS)
        if message is None:
            continue
        command = parse_command(message)
        if isinstance(command, Stop):
            break
        assert isinstance(command, Work)
        jobs = {job.clip: job for job in command.jobs}
        stage.perform(command.parsed(), jobs, command.handover_keys)
    stage.finish()


def _prepare(member: Member, setup: RankSetup, reporter: Reporter) -> PipelineStage:
    """Everything before the first action; reports when all ranks have got as far."""
    config, rank = setup.config, member.world.rank
    device = process_group.device_of_rank(config.device, member.world.local_rank)
    determinism.make_deterministic(num_threads=config.num_threads, device=device)
    begun = time.monotonic()
    if setup.fault:
        setup.fault.reach(rank, -1, "load")
    with out_of_memory_named(None):
        model = load_model(setup.config, setup.checkpoint, device, setup.roles[rank], rank)
    load_seconds = time.monotonic() - begun
    member.join()
    transport = Transport(
        rank,
        torch.device(device),
        member.backend,
        reporter.hop,
        checksum=config.checksum,
        tamper=setup.fault.tamper(rank) if setup.fault else None,
    )
    transport.connect(setup.hops)
    reporter.send(Joined(device=device, load_seconds=load_seconds))
    conditions = determinism.conditions(device)
    evidence = Evidence(Path(setup.evidence_folder)) if setup.evidence_folder else None
    folder = setup.handover_folder
    return PipelineStage(
        rank,
        model,
        transport,
        Delivery(reporter.send, reporter.clip_failed, reporter.failed, conditions, evidence),
        reporter,
        config.sampling,
        handovers=Handovers(Path(folder), conditions) if folder else None,
        evidence=evidence,
        fault=setup.fault,
    )


def load_model(
    config: PipelineConfig,
    checkpoint: Checkpoint | None,
    device: str,
    roles: Roles,
    rank: int = 0,
) -> VideoModel:
    """The model's parts that `roles` ask for, on `device`; the dummy at the pace of `rank`."""
    if checkpoint is None:
        spec = LatentSpec(
            shape=config.model.dummy_latent_shape, dtype=config.model.dtype, dims="BCFHW"
        )
        pace = _pace(config, rank) if config.model.dummy_sleeps else Pace()
        return DummyModel(spec, config.sampling.num_inference_steps, torch.device(device), pace)
    from svdpp.models.svd import load_svd  # diffusers: seconds that the dummy need not pay

    return load_svd(
        checkpoint,
        config.model,
        config.sampling,
        device,
        encode=roles.encode,
        denoise=roles.denoise,
        decode=roles.decode,
    )


def _pace(config: PipelineConfig, rank: int) -> Pace:
    costs = config.costs
    return Pace(
        step_seconds=costs.step_on(rank),
        encode_seconds=costs.encode_on(rank),
        decode_seconds=costs.decode_on(rank),
    )
