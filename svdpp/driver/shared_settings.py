"""Owns what ranks on several hosts must have in common, and how long they wait for each other."""

from __future__ import annotations

import time
from dataclasses import fields

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.liveness import Liveness
from svdpp.models.checkpoint import Checkpoint
from svdpp.worker.clip_metadata import versions

#: Fields of the configuration that ranks must agree on; what only one host can know is not there.
_SHARED_FIELDS = frozenset(
    {field.name for kind in (PipelineConfig, ModelConfig, SamplingConfig) for field in fields(kind)}
    - {"sampling", "local_files_only", "start_timeout_seconds"}
)


def silence_limit(config: PipelineConfig) -> float:
    """Seconds without a heartbeat after which a rank counts as lost: fewer than for a slow one."""
    return min(config.heartbeat_timeout_seconds, 0.8 * config.timeout_seconds)


def new_liveness(config: PipelineConfig) -> Liveness:
    """The liveness of all ranks, with the deadlines of `config`, from now on."""
    return Liveness(
        config.world_size,
        time.monotonic(),
        start_timeout=config.start_timeout_seconds,
        heartbeat_timeout=silence_limit(config),
        timeout=config.timeout_seconds,
    )


def shared_settings(config: PipelineConfig, checkpoint: Checkpoint | None) -> dict[str, str]:
    """What must be the same on every rank, by name: options, versions, the model's weights.

    Threads and all that bits depend on among them; each host reads its own command line.
    """
    parts = {**vars(config), **vars(config.sampling), **vars(config.model)}
    parts["model"] = parts.pop("name")
    options = {
        name.removesuffix("_seconds").replace("_", " "): str(value)
        for name, value in parts.items()
        if name in _SHARED_FIELDS
    }
    # A hub's model by its commit, a folder's by what lies in it.
    weights = (checkpoint.revision, checkpoint.fingerprint) if checkpoint else (None, None)
    options["revision"], options["weights fingerprint"] = map(str, weights)
    return {**options, **{name: str(version) for name, version in versions().items()}}
