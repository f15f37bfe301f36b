"""`ReferenceSetup`: data that the parent sends to the reference process; imports no diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.models.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ReferenceSetup:
    """Setup of the process that runs the reference: model, clips, and tensors to keep."""

    config: PipelineConfig
    """Configuration with one rank, and with all defaults filled in."""
    checkpoint: Checkpoint | None
    """Checkpoint of the model; None for the dummy model."""
    requests: tuple[ClipRequest, ...]
    """Requests for the clips, in the order in which the reference makes them."""
    steps: frozenset[int]
    """Numbers of finished steps after which the latent is kept, such as 4 for the latent after four
    steps."""
    folder: Path | None
    """Folder for latents, predictions, frames and sound; None: no tensors are kept."""
    predictions: bool
    """Whether the predictions of each branch of the guidance are kept."""
