"""Owns what a rank's bits depend on besides the request, and the identity of its GPU."""

from __future__ import annotations

from typing import Any

import torch

from svdpp.config import PipelineConfig
from svdpp.launch import gpus
from svdpp.models import determinism
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.families import family_of


def conditions_of(
    config: PipelineConfig, checkpoint: Checkpoint | None, device: str
) -> dict[str, Any]:
    """What a rank's bits depend on: must be equal on all ranks, and is recorded with every hash.

    Args:
        config: of the run.
        checkpoint: None for the dummy model.
        device: of this rank; if it is a GPU, CUDA is initialised.
    """
    found = determinism.conditions(device, channels_last=config.model.channels_last)
    if device.startswith("cuda"):
        found["driver"] = gpus.driver_version()
    if checkpoint is not None:
        found |= family_of(checkpoint).conditions(checkpoint)
    return found


def gpu_uuid(device: str) -> str | None:
    """The UUID of this rank's GPU; None on the CPU."""
    if not device.startswith("cuda"):
        return None
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
