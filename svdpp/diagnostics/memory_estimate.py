"""Owns the memory that each rank of a plan will take, before any of them is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.pipeline import resolve
from svdpp.models.free_memory import free_bytes
from svdpp.models.svd.memory import bare_process_bytes, estimate
from svdpp.plan.actions import Action, Kind
from svdpp.plan.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank's device, or on the host where that is the CPU."""

    rank: int
    weight_bytes: int
    activation_bytes: int
    """Above the weights, in the hungriest of its parts."""
    process_bytes: int
    """On the CPU what Python and the libraries take; a CUDA context is not estimated."""

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
    process = bare_process_bytes() if config.device == "cpu" else 0
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
                process_bytes=process,
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
        return needs, (free_bytes(device) / world_size / 2**30,) * world_size
    return needs, tuple(free_bytes(f"cuda:{rank}") / 2**30 for rank in range(world_size))


def _duties(actions: Iterable[Action]) -> tuple[bool, bool, bool]:
    kinds = {action.kind for action in actions}
    return Kind.ENCODE in kinds, Kind.DENOISE in kinds, Kind.DECODE in kinds
