"""A rank's device: taking it, its identity, and what its bits depend on."""

from __future__ import annotations

from typing import Any

import torch

from svdpp.comm import streams
from svdpp.config import PipelineConfig
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.launch import gpus, process_group
from svdpp.launch.world import World
from svdpp.models import determinism
from svdpp.models.checkpoint import Checkpoint


def device_of(config: PipelineConfig, world: World) -> str:
    """The device of the rank in `world`, such as `cuda:1`."""
    return process_group.device_of_rank(config.device, world.local_rank, world.local_size)


def take_device(config: PipelineConfig, world: World) -> torch.device:
    """Chooses this rank's device, makes it the thread's current one, and applies the settings."""
    name = device_of(config, world)
    device = torch.device(name)
    try:
        streams.use_device(device)
    except (AssertionError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        if "out of memory" in reason:
            raise OutOfMemoryError(
                f"{name} has too little free memory for a CUDA context (about 0.5 GB)",
                "nvidia-smi shows which processes hold its memory",
            ) from error
        raise RequestError(
            f"{name} cannot be used: {reason}", "svdpp doctor shows which devices work"
        ) from error
    determinism.apply_settings(
        num_threads=config.num_threads, device=name, deterministic=config.deterministic
    )
    return device


def conditions_of(
    config: PipelineConfig, checkpoint: Checkpoint | None, device: str
) -> dict[str, Any]:
    """What a rank's bits depend on: must be equal on all ranks, and is recorded with every hash."""
    known = determinism.conditions(device, channels_last=config.model.channels_last)
    if device.startswith("cuda"):
        known["driver"] = gpus.driver_version()
    if checkpoint is not None:
        from svdpp.models.engine.load import conditions  # imports diffusers: seconds

        known |= conditions(checkpoint)
    return known


def gpu_uuid(device: str) -> str | None:
    """The UUID of this rank's GPU; None on the CPU."""
    if not device.startswith("cuda"):
        return None
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
