"""Owns the step from options to one configuration, and the default number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.config import PipelineConfig
from svdpp.errors import RequestError
from svdpp.launch.world import World, find_world
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Use


def pipeline_config(
    ranks: RankOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    *,
    device: str,
    plan: Mapping[str, Any],
    from_image: bool,
    family: str | None = None,
    **of_model: bool,
) -> PipelineConfig:
    """One checked configuration of all options.

    Args:
        ranks: options of the ranks.
        model: options of the model.
        sampling: options of the sampler.
        device: name, as decided by `RankOptions.device_for`.
        plan: `world_size` and the other fields of `PlanChoice.settings`.
        from_image: whether the clips start from photographs.
        family: of the model; None: its files say so.
        of_model: further fields of the `ModelConfig`.

    Raises:
        RequestError: they contradict each other.
    """
    family = family or model.family
    try:
        return PipelineConfig(
            model=model.to_config(device, **of_model),
            sampling=sampling.to_config(model, from_image=from_image, family=family),
            device=device,
            num_threads=ranks.threads_on(device, plan["world_size"]),
            timeout_seconds=ranks.timeout,
            start_timeout_seconds=ranks.start_timeout,
            checksum=ranks.checksum,
            deterministic=model.deterministic,
            allow_mixed_devices=ranks.allow_mixed_devices,
            **plan,
        )
    except RequestError as error:
        if is_joined():
            error.hint = without_world(error.hint)
        raise


def image_use(model: ModelOptions) -> Use:
    """What clips of the model do with a photograph; reads its configs only if it takes prompts."""
    if model.family == "svd":
        return "needed"
    from svdpp.models.checkpoint import find_checkpoint

    return find_checkpoint(model.to_config("cpu"), weights=False).image_use


def needs_image(model: ModelOptions) -> bool:
    """Whether clips of the model need a photograph."""
    return image_use(model) == "needed"


def without_world(hint: str) -> str:
    """`hint` without its advice on `--world`, for when something else sets the number of ranks."""
    return re.sub(r",? or --world \d+(?: or fewer)?", "", hint)


def default_world(device: str, num_steps: int, *, on_cpu: int, divide: bool = True) -> int:
    """The default number of ranks: all GPUs on CUDA, else `on_cpu`.

    With `divide` it is the largest number up to that which divides the steps.
    """
    count = on_cpu
    if device == "cuda":
        import torch

        count = max(torch.cuda.device_count(), 1)
    return largest_world(max(num_steps, 1), count) if divide else count


def default_draft_world(device: str, num_steps: int) -> int:
    """Ranks of a draft if the user names none: as many as have default start steps."""
    from svdpp.plan.draft_starts import most_ranks

    count = default_world(device, num_steps, on_cpu=2, divide=False)
    return max(2, min(count, most_ranks(num_steps)))


def joined_world(
    asked: int | None,
    option: str = "--world",
    leave_out: str = "leave --world and --gpus out",
) -> int | None:
    """The number of ranks of torchrun or srun; without a launcher `asked`.

    Args:
        asked: the number that the user gives; None if none.
        option: with which the user gives it.
        leave_out: advice on leaving the option out.

    Raises:
        RequestError: the launcher's number and `asked` differ.
    """
    world = find_world()
    if world is None:
        return asked
    if asked is not None and asked != world.size:
        raise RequestError(
            f"{option} {asked} disagrees with {launcher_name(world)}'s world of {world.size}",
            f"{leave_out} under {launcher_name(world)}",
            details={"asked": asked, "found": world.size},
        )
    return world.size


def launcher_name(world: World) -> str:
    """The name of the launcher."""
    return "Slurm" if world.launcher == "slurm" else "torchrun"


def is_joined() -> bool:
    """Whether this process is a rank of a world that torchrun or srun has started."""
    return find_world() is not None


def is_joined_member() -> bool:
    """Whether this process is a rank other than 0 of torchrun's or srun's world."""
    world = find_world()
    return world is not None and world.is_member


def is_restarted() -> bool:
    """Whether torchrun restarted this command in the same run."""
    world = find_world()
    return world is not None and world.restarts > 0
