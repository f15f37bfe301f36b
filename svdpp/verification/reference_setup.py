"""Setup that the parent writes for the process of the reference; imports no diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.models.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ReferenceSetup:
    """Instructions for the process of the reference; see `run_reference`."""

    config: PipelineConfig
    checkpoint: Checkpoint | None
    requests: tuple[ClipRequest, ...]
    steps: frozenset[int]
    folder: Path | None
    predictions: bool
    """Whether it keeps those of each branch of the guidance."""
