"""The resolution of a request against its model: defaults become numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from svdpp.config import PipelineConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.models.checkpoint import Checkpoint, find_checkpoint, with_weights
from svdpp.plan.layout import Roles, check_chunks

#: The components whose weights must be present: none, those of the ranks on this host, or all.
Weights = Literal["none", "host", "all"]


def resolve(
    config: PipelineConfig, *, weights: Weights = "host", world: World | None = None
) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with the model's own values in place of None, and the model's checkpoint.

    The request is checked against the model's configs before a weight is downloaded.

    `weights` says which components must be present: missing files of a hub model are
    downloaded. `world` is the launcher's; None: all ranks are on this host.
    """
    if config.model.is_dummy:
        return resolved(config, None), None
    checkpoint = find_checkpoint(config.model, weights=False)
    with_defaults = resolved(config, checkpoint)
    if weights == "none":
        return with_defaults, checkpoint
    components = frozenset(checkpoint.weighted)
    if weights == "host":
        on_host = _roles_on_host(with_defaults, world)
        by_rank = (checkpoint.components_of(roles, with_defaults.sampling) for roles in on_host)
        components = frozenset().union(*by_rank)
    checkpoint = with_weights(checkpoint, config.model, sorted(components))
    return resolved(config, checkpoint), checkpoint


def _roles_on_host(config: PipelineConfig, world: World | None) -> set[Roles]:
    if world is None or world.size != config.world_size:  # the latter is refused later
        return set(config.layout.roles)
    # torchrun and, by default, srun number the ranks host by host.
    first = world.rank - world.local_rank
    return {*config.layout.roles[first : first + world.local_size], config.layout.roles[world.rank]}


def resolved(config: PipelineConfig, checkpoint: Checkpoint | None) -> PipelineConfig:
    """`config` with the model's own values in place of None."""
    sampling, boundary = _resolved(config, config.sampling, checkpoint)
    found = replace(config, sampling=sampling, expert_boundary=boundary)
    return replace(found, decode_ranks=_decode_ranks(found, checkpoint))


def resolved_for(
    sampling: SamplingConfig, config: PipelineConfig, checkpoint: Checkpoint | None
) -> PipelineConfig:
    """The configuration of a clip with its own sampling parameters, in a pipeline of `config`."""
    return config.with_sampling(*_resolved(config, sampling, checkpoint))


def _decode_ranks(config: PipelineConfig, checkpoint: Checkpoint | None) -> int:
    """The ranks that decode each clip together; by default both of a pair, where that helps."""
    in_chunks = checkpoint is None or checkpoint.row.decodes_in_chunks
    chunks, count = config.chunks or (config.sampling.frames,), config.decode_ranks
    if count is None:
        return min(config.cfg_parallel, len(chunks)) if in_chunks else 1
    if count > 1 and checkpoint is not None and not in_chunks:
        raise RequestError(
            f"--decode-ranks {count} cannot divide the decode of {checkpoint.label}: it is not in "
            "chunks of frames that are decoded on their own",
            "leave --decode-ranks out",
        )
    check_chunks(count, chunks)
    return count


def _check_branches(sampling: SamplingConfig, checkpoint: Checkpoint) -> None:
    leave_out = "leave --cfg-parallel out"
    if not sampling.guided:
        raise RequestError(
            "--cfg-parallel 2 gives each rank of a pair one branch of the guidance, and with these "
            "parameters the guidance is off: each step has one branch",
            leave_out,
        )
    if checkpoint.row.branches is None:
        raise RequestError(
            f"--cfg-parallel 2 cannot divide the steps of {checkpoint.label}: they have more than "
            "two evaluations, or use the first at once",
            leave_out,
        )


def _resolved(
    config: PipelineConfig, sampling: SamplingConfig, checkpoint: Checkpoint | None
) -> tuple[SamplingConfig, int | None]:
    if checkpoint is None:
        frames = config.model.dummy_latent.shape[2]
        return sampling.resolved(model_frames=frames), config.expert_boundary
    sampling = checkpoint.resolve(sampling)
    if config.cfg_parallel > 1:
        _check_branches(sampling, checkpoint)
    boundary, num_steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps
    if boundary is not None and not 0 < boundary < num_steps:
        raise RequestError(
            f"the model has two experts, and one of them would do all {num_steps} steps",
            "use more --steps, or another --param flow_shift",
        )
    return sampling, boundary
