"""The memory of ranks by estimate: what they need, what is free, and what fits into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from svdpp.config import DEMO_MODEL, ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.resolve import Weights, resolve
from svdpp.errors import OutOfMemoryError
from svdpp.launch import environment, process_group
from svdpp.launch.gpus import available_bytes, free_bytes, gib_text
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import MemoryEstimate, PartMemory
from svdpp.plan.layout import Roles

#: Private memory of each rank without the model: Python, torch's and diffusers' state (measured:
#: 110 to 200 MiB of dirty pages in a rank that is forked and idle).
_RANK_BYTES = 128 * 2**20
#: What a rank that encodes takes to read and prepare images (measured: its peak rises by 597 MiB
#: with the largest image, 50 megapixels, and by 111 MiB with one of 4, which a server may prepare
#: beside it).
_IMAGE_BYTES = 768 * 2**20
#: Clips of the demo up to this size take half a gigabyte at most.
_DEMO_PIXELS = 2**18
#: As safetensors spells them.
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# A process's GPU memory outside torch's allocator: about 0.5 GB for the context and 0.1 GB for the
# handles of cuBLAS and cuDNN. NCCL's buffers add about 0.1 GB for each pair of ranks.
CUDA_PROCESS_BYTES = 600_000_000
_NCCL_PAIR_BYTES = 100_000_000


def estimate_parts(config: PipelineConfig, checkpoint: Checkpoint | None) -> MemoryEstimate:
    """The memory of each part of the model, for the clips of a resolved `config`."""
    if checkpoint is None:  # the dummy takes megabytes
        return MemoryEstimate(encode=None, denoise=PartMemory(0, 0), decode=None)
    with environment.defaults():
        from svdpp.models.memory import estimate  # diffusers: seconds

    return estimate(
        checkpoint,
        config.model,
        config.sampling,
        device=config.device,
        num_threads=config.num_threads,
    )


def estimate_ranks(config: PipelineConfig, *, weights: Weights = "host") -> list[int]:
    """The peak bytes of each rank on its device, or on the host for a CPU rank, by estimate.

    Each CPU rank counts the weights that it maps, although the ranks of one machine share them if
    the files already have the requested dtype. `weights` must be present.
    """
    config, checkpoint = resolve(config, weights=weights)
    parts = estimate_parts(config, checkpoint)
    return [
        parts.of_rank(roles).peak_bytes + _process_bytes(config, rank)
        for rank, roles in enumerate(config.layout.roles)
    ]


def free_memory(device: str) -> int:
    """The free bytes of a device, for the CPU of the host; creates no CUDA context."""
    return available_bytes() if device == "cpu" else free_bytes(device)


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
    needs = estimate_parts(*resolve(asked, weights="none")).as_costs()
    if device != "cuda":
        each = free_bytes(device) / world_size - CUDA_PROCESS_BYTES
        return needs, (each / 2**30,) * world_size
    taken = CUDA_PROCESS_BYTES + 2 * _NCCL_PAIR_BYTES
    free = (free_bytes(f"cuda:{rank}") for rank in range(world_size))
    return needs, tuple((each - taken) / 2**30 for each in free)


def _process_bytes(config: PipelineConfig, rank: int) -> int:
    """On a GPU: context, library handles and NCCL's buffers."""
    if config.device == "cpu":
        return _RANK_BYTES
    backend = process_group.choose_backend(config.device, config.world_size)
    pairs = sum(rank in link for link in config.layout.links) if backend == "nccl" else 0
    return CUDA_PROCESS_BYTES + pairs * _NCCL_PAIR_BYTES


def check_memory(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> None:
    """Refuses CPU ranks that need more memory than this machine has free.

    The peaks of all ranks are added, because they may occur at the same time. The dummy and small
    clips of the demo are not checked: the estimate imports diffusers.
    """
    sampling = config.sampling
    if config.device != "cpu" or checkpoint is None:
        return
    pixels = sampling.frames * sampling.height * sampling.width
    if checkpoint.name == DEMO_MODEL and pixels <= _DEMO_PIXELS:
        return
    free = available_bytes()
    needed = _needed_together(config, checkpoint, ranks)
    if needed > free:
        noun = "rank needs" if len(ranks) == 1 else "ranks need"
        raise OutOfMemoryError(
            f"out of memory before the run: {len(ranks)} CPU {noun} about "
            f"{gib_text(needed)}, {gib_text(free)} free",
            "a smaller --world, --height and --width, --frames or --decode-chunk-size, or --dtype "
            "bf16, lowers it",
        )


def _needed_together(config: PipelineConfig, checkpoint: Checkpoint, ranks: Sequence[Roles]) -> int:
    """The bytes that all ranks need; weights that they share count once."""
    parts = estimate_parts(config, checkpoint)
    num_bytes = 0
    weights: dict[tuple[Roles, int], int] = {}
    for rank, roles in enumerate(ranks):
        shares = {share: parts.of_rank(share) for share in roles.split()}
        for share, memory in shares.items():
            owner = 0 if _are_shared(config, checkpoint, share) else rank
            weights[share, owner] = memory.weight_bytes
        num_bytes += max((memory.activation_bytes for memory in shares.values()), default=0)
        num_bytes += _RANK_BYTES + _IMAGE_BYTES * roles.encode
    return num_bytes + sum(weights.values())


def _are_shared(config: PipelineConfig, checkpoint: Checkpoint, roles: Roles) -> bool:
    """Whether ranks with these roles map the same pages of the weights' files.

    They do if the files have the dtype in which the components are loaded; otherwise each has a
    copy.
    """

    def is_mapped(part: str) -> bool:
        dtype = "fp32" if part in checkpoint.row.fp32 else config.model.dtype
        headers = checkpoint.weight_files(part).values()
        return {name for header in headers for name, _ in header.values()} == {_DTYPES[dtype]}

    return all(map(is_mapped, checkpoint.components_of(roles, config.sampling)))
