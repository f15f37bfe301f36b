"""Owns the estimate of each rank's memory, before any rank is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.pipeline import resolve
from svdpp.launch import process_group
from svdpp.launch.gpus import free_bytes
from svdpp.models.svd.memory import bare_process_bytes, estimate
from svdpp.plan.actions import Action, Kind
from svdpp.plan.schedule import Schedule

# What a process takes on a GPU beside torch's allocator: about 0.5 GB for the context and 0.1 GB
# for the handles of cuBLAS and cuDNN; NCCL's buffers take about 0.1 GB for each pair of ranks.
CUDA_PROCESS_BYTES = 600_000_000
_NCCL_PAIR_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank's device; on the host for a CPU rank."""

    rank: int
    weight_bytes: int
    activation_bytes: int
    """Above the weights, in the part that needs most."""
    process_bytes: int
    """On the CPU Python and the libraries; on a GPU context, library handles and NCCL's buffers."""

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.weight_bytes + self.activation_bytes + self.process_bytes


def estimate_ranks(
    config: PipelineConfig, schedule: Schedule, *, weights: bool = True
) -> list[RankMemory]:
    """What each rank will take for its actions, from the model's configs alone.

    CPU ranks each count the weights that they map; where the files have the asked dtype already,
    the ranks of one machine share them.

    Args:
        config: of the run.
        schedule: for some clips more than there are ranks, so that every rank shows what it does.
        weights: whether they have to be there, too; else the model's configs are enough.

    Raises:
        ModelError: the model cannot be found, or is not whole.
    """
    config, checkpoint = resolve(config, weights=weights)
    estimate_of_parts = estimate(
        checkpoint,
        config.model,
        config.sampling,
        device=config.device,
        num_threads=config.num_threads,
    )
    result = []
    for rank, actions in enumerate(schedule):
        encode, denoise, decode = _duties(actions)
        memory = estimate_of_parts.of_rank(encode=encode, denoise=denoise, decode=decode)
        result.append(
            RankMemory(
                rank=rank,
                weight_bytes=memory.weight_bytes,
                activation_bytes=memory.activation_bytes,
                process_bytes=_process_bytes(config, rank),
            )
        )
    return result


def memory_of_devices(
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    world_size: int,
    free_bytes: Callable[[str], int] = free_bytes,
) -> tuple[dict[str, float], tuple[float, ...]]:
    """What a layout is chosen by: what the model's parts need, and what each rank's device has.

    Nothing of both for CPU ranks: they share the host's memory, and weights in it.

    Args:
        model: its parts are judged by their configuration alone.
        sampling: not yet resolved.
        device: as the user named it; a shared one is shared out.
        world_size: number of ranks.
        free_bytes: of a device.

    Returns:
        Fields of `plan.costs.Costs`, GiB, and GiB by rank.

    Raises:
        ModelError: the model cannot be found, or is not whole.
    """
    if device == "cpu":
        return {}, ()
    asked = PipelineConfig(world_size=1, model=model, sampling=sampling, device=device)
    config, checkpoint = resolve(asked)
    needs = estimate(checkpoint, config.model, config.sampling, device=device).as_costs()
    if device != "cuda":
        each = free_bytes(device) / world_size - CUDA_PROCESS_BYTES
        return needs, (each / 2**30,) * world_size
    taken = CUDA_PROCESS_BYTES + 2 * _NCCL_PAIR_BYTES
    free = (free_bytes(f"cuda:{rank}") for rank in range(world_size))
    return needs, tuple((each - taken) / 2**30 for each in free)


def _process_bytes(config: PipelineConfig, rank: int) -> int:
    """What the process of `rank` takes beside the model."""
    if config.device == "cpu":
        return bare_process_bytes()
    backend = process_group.choose_backend(config.device, config.world_size)
    pairs = sum(rank in link for link in config.plan.links) if backend == "nccl" else 0
    return CUDA_PROCESS_BYTES + pairs * _NCCL_PAIR_BYTES


def _duties(actions: Iterable[Action]) -> tuple[bool, bool, bool]:
    kinds = {action.kind for action in actions}
    return Kind.ENCODE in kinds, Kind.DENOISE in kinds, Kind.DECODE in kinds
