"""The estimate of each rank's memory, before any rank starts, and what fits into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.resolve import Weights, resolve
from svdpp.errors import OutOfMemoryError
from svdpp.launch import process_group
from svdpp.launch.gpus import free_bytes
from svdpp.models.free_memory import available_bytes, bare_process_bytes, gib_text
from svdpp.models.memory import estimate

# A process's GPU memory outside torch's allocator: about 0.5 GB for the context and 0.1 GB for the
# handles of cuBLAS and cuDNN. NCCL's buffers add about 0.1 GB for each pair of ranks.
CUDA_PROCESS_BYTES = 600_000_000
_NCCL_PAIR_BYTES = 100_000_000
#: The rest is for what the estimate leaves out: fragmentation, other programs, libraries' caches.
_SHARE_OF_FREE = 0.8


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank's device; for a CPU rank, on the host."""

    rank: int
    weight_bytes: int
    activation_bytes: int
    """Above the weights, in the part with the largest need."""
    process_bytes: int
    """On the CPU: Python and libraries. On a GPU: context, library handles and NCCL's buffers."""

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.weight_bytes + self.activation_bytes + self.process_bytes


def estimate_ranks(config: PipelineConfig, *, weights: Weights = "host") -> list[RankMemory]:
    """The memory that each rank needs, from the model's configs; `weights` must be present.

    Each CPU rank counts the weights that it maps, although the ranks of one machine share them if
    the files already have the requested dtype.
    """
    config, checkpoint = resolve(config, weights=weights)
    estimate_of_parts = estimate(
        checkpoint,
        config.model,
        config.sampling,
        device=config.device,
        num_threads=config.num_threads,
    )
    memories = map(estimate_of_parts.of_rank, config.layout.roles)
    return [
        RankMemory(
            rank=rank,
            weight_bytes=memory.weight_bytes,
            activation_bytes=memory.activation_bytes,
            process_bytes=_process_bytes(config, rank),
        )
        for rank, memory in enumerate(memories)
    ]


def free_memory(device: str) -> int:
    """The free bytes of a device, for the CPU of the host; creates no CUDA context."""
    return available_bytes() if device == "cpu" else free_bytes(device)


def fit_decode_chunk(config: PipelineConfig) -> tuple[int, str]:
    """The most frames that can be decoded at a time, and why.

    By the estimate they take at most 80% of the free memory, or else it is one frame. A further
    frame takes as much as the others, or less while another part has the peak.
    """
    config = replace(config, decode_ranks=1)  # others decode with the same chunks
    frames = resolve(config, weights="none")[0].sampling.frames
    last = config.layout.replica_ranks[-1][-1]  # it decodes
    device = f"cuda:{last}" if config.device == "cuda" else config.device
    free = free_memory(device)

    def needed(chunk: int) -> int:
        sampling = replace(config.sampling, decode_chunk_size=chunk)
        ranks = estimate_ranks(replace(config, sampling=sampling), weights="none")
        sharing = [ranks[last]] if config.device == "cuda" else ranks
        return sum(rank.total_bytes for rank in sharing)

    if (least := needed(1)) > free:
        raise OutOfMemoryError(
            "out of memory before the run: with one frame decoded at a time it needs "
            f"{gib_text(least)}, {gib_text(free)} free",
            "a smaller --height and --width, or --dtype fp16, lower it",
        )
    each = (needed(frames) - least) / max(1, frames - 1)
    fitting = [n for n in range(2, frames + 1) if least + (n - 1) * each <= _SHARE_OF_FREE * free]
    chunk = max(fitting, default=1)
    size = gib_text(round(least + (chunk - 1) * each))
    text = f"{chunk} of {frames} frames at a time: {size} by estimate, {gib_text(free)} free"
    return chunk, text


def memory_of_devices(
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    world_size: int,
    free_bytes: Callable[[str], int] = free_bytes,
) -> tuple[dict[str, float], tuple[float, ...]]:
    """For the choice of a layout: the parts' needs as fields of `Costs`, and each rank's GiB.

    Both are empty for CPU ranks, which share the host's memory and the weights in it; ranks on one
    `device` get equal shares of it.
    """
    if device == "cpu":
        return {}, ()
    asked = PipelineConfig(world_size=1, model=model, sampling=sampling, device=device)
    config, checkpoint = resolve(asked, weights="none")
    needs = estimate(checkpoint, config.model, config.sampling, device=device).as_costs()
    if device != "cuda":
        each = free_bytes(device) / world_size - CUDA_PROCESS_BYTES
        return needs, (each / 2**30,) * world_size
    taken = CUDA_PROCESS_BYTES + 2 * _NCCL_PAIR_BYTES
    free = (free_bytes(f"cuda:{rank}") for rank in range(world_size))
    return needs, tuple((each - taken) / 2**30 for each in free)


def _process_bytes(config: PipelineConfig, rank: int) -> int:
    """The bytes of the process of `rank` besides the model."""
    if config.device == "cpu":
        return bare_process_bytes()
    backend = process_group.choose_backend(config.device, config.world_size)
    pairs = sum(rank in link for link in config.layout.links) if backend == "nccl" else 0
    return CUDA_PROCESS_BYTES + pairs * _NCCL_PAIR_BYTES
