"""Owns the settings that ranks on several hosts must share, and their deadlines."""

from __future__ import annotations

import time
from dataclasses import fields

from svdpp.config import SAMPLING_CLASSES, ModelConfig, PipelineConfig
from svdpp.driver.liveness import Liveness
from svdpp.models.checkpoint import Checkpoint
from svdpp.worker.clip_metadata import versions

#: Fields of the configuration that ranks must agree on: all but those that may differ by host.
_SHARED_FIELDS = frozenset(
    {
        field.name
        for kind in (PipelineConfig, ModelConfig, *SAMPLING_CLASSES.values())
        for field in fields(kind)
    }
    - {"sampling", "local_files_only", "start_timeout_seconds"}
)


def silence_limit(config: PipelineConfig) -> float:
    """Seconds without a heartbeat after which a rank is stalled; shorter than its `timeout`."""
    return min(config.heartbeat_timeout_seconds, 0.8 * config.timeout_seconds)


def new_liveness(config: PipelineConfig) -> Liveness:
    """A new `Liveness` with the deadlines of `config`, from now on."""
    return Liveness(
        config.world_size,
        time.monotonic(),
        start_timeout=config.start_timeout_seconds,
        heartbeat_timeout=silence_limit(config),
        timeout=config.timeout_seconds,
    )


def shared_settings(config: PipelineConfig, checkpoint: Checkpoint | None) -> dict[str, str]:
    """What must be equal on every rank, by name: options, versions, the model's weights.

    Each host has its own command line, so the ranks compare these when they join.
    """
    parts = {**vars(config), **vars(config.sampling), **vars(config.model)}
    parts["model"] = parts.pop("name")
    options = {
        name.removesuffix("_seconds").replace("_", " "): str(value)
        for name, value in parts.items()
        if name in _SHARED_FIELDS
    }
    # A commit identifies the weights of a hub model, a fingerprint those of a folder.
    weights = (checkpoint.revision, checkpoint.fingerprint) if checkpoint else (None, None)
    options["revision"], options["weights fingerprint"] = map(str, weights)
    return {**options, **{name: str(version) for name, version in versions().items()}}
