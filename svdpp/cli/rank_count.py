"""The number of ranks: the launcher's, the user's or the default."""

from __future__ import annotations

import re

from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.split import largest_world


def joined_world(
    launched: World | None,
    asked: int | None,
    option: str = "--world",
    leave_out: str = "leave --world and --gpus out",
) -> int | None:
    """The number of ranks of torchrun or srun; without a launcher `asked`."""
    if launched is None:
        return asked
    if asked is not None and asked != launched.size:
        raise RequestError(
            f"{option} {asked} disagrees with {launcher_name(launched)}'s world of {launched.size}",
            f"{leave_out} under {launcher_name(launched)}",
            details={"asked": asked, "found": launched.size},
        )
    return launched.size


def launcher_name(world: World) -> str:
    """The name of the launcher."""
    return "Slurm" if world.launcher == "slurm" else "torchrun"


def without_world(hint: str) -> str:
    """`hint` without its advice on `--world`, for when something else sets the number of ranks."""
    return re.sub(r",? or --world \d+(?: or fewer)?", "", hint)


def default_world(
    device: str, num_steps: int, *, on_cpu: int = 2, divide: bool = True, multiple: int = 1
) -> int:
    """The default number of ranks: all GPUs on CUDA, else `on_cpu`; a multiple of `multiple`.

    With `divide` it is the largest up to that whose number of stages divides the steps.
    """
    count = on_cpu
    if device == "cuda":
        import torch

        count = max(torch.cuda.device_count(), 1)
    stages = max(1, count // max(1, multiple))
    return multiple * (largest_world(max(num_steps, 1), stages) if divide else stages)
