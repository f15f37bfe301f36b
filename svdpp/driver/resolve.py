"""Resolution of configurations (the model's defaults replace None), and memory of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

from svdpp.config import DEMO_MODELS, ModelConfig, PipelineConfig, SamplingConfig
from svdpp.driver.memory_process import estimate_memory
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.launch.gpus import available_bytes, format_gib, free_bytes
from svdpp.launch.world import World
from svdpp.models.checkpoint import Checkpoint, find_checkpoint, with_weights
from svdpp.plan.costs import MemoryEstimate, PartMemory
from svdpp.plan.layout import check_chunks
from svdpp.plan.roles import Roles
from svdpp.worker.routes import resolve_clip_config

#: Environment variable from which diffusers reads its default attention backend, and the backend
#: that diffusers uses if the variable is not set.
_BACKEND_VARIABLE, _DEFAULT_BACKEND = "DIFFUSERS_ATTN_BACKEND", "native"
#: Components whose weights must be present. `none`: no components; `host`: components that ranks on
#: this host load; `all`: all components.
Weights = Literal["none", "host", "all"]


def resolve_config(
    config: PipelineConfig,
    *,
    weights: Weights = "host",
    world: World | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[PipelineConfig, Checkpoint | None]:
    """Replace None in a configuration by the model's defaults, and find the model's checkpoint.

    Args:
        config: Configuration from the user.
        weights: Components whose weights are downloaded if they are missing: `none`, `host` (those
            of the ranks on this host) or `all`. The configuration is checked before the download.
        world: World of the launcher; None: all ranks are on this host.
        checkpoint: Checkpoint of the model; None: its configs are read.

    Returns:
        Configuration, and checkpoint. The checkpoint is None for the dummy model.

    Raises:
        RequestError: The model cannot make clips with this configuration.
        ModelError: The model is missing, incomplete or not supported.
    """
    if config.model.is_dummy:
        return _with_model_defaults(config, None), None
    if checkpoint is None:
        checkpoint = find_checkpoint(config.model, weights=False)
    _check_attention_backend(config.model, checkpoint)
    with_defaults = _with_model_defaults(config, checkpoint)
    if weights == "none":
        return with_defaults, checkpoint
    components = sorted(checkpoint.weighted_components)
    if weights == "host":
        components = components_on_host(with_defaults, checkpoint, world)
    checkpoint = with_weights(checkpoint, config.model, components)
    if checkpoint.clip_loras:
        # This imports diffusers, which takes seconds.
        from svdpp.models.engine.loras import check_loras_fit

        check_loras_fit(checkpoint.clip_loras.values(), checkpoint)
    return _with_model_defaults(config, checkpoint), checkpoint


def _check_attention_backend(model: ModelConfig, checkpoint: Checkpoint) -> None:
    name, of_variable = model.attention_backend, os.environ.get(_BACKEND_VARIABLE)
    if of_variable not in (None, "", _DEFAULT_BACKEND, name):
        raise RequestError(
            f"{_BACKEND_VARIABLE} is {of_variable!r}: it would change the bits of clips, and their "
            "JSON would not say so",
            f"unset {_BACKEND_VARIABLE}; `attention_backend` has the same effect, and is recorded "
            "in the JSON",
            details={"variable": _BACKEND_VARIABLE, "value": of_variable},
        )
    if name is not None:
        # This imports diffusers, which takes seconds.
        from svdpp.models.engine.attention import check_attention_backend

        check_attention_backend(name, checkpoint)


def components_on_host(
    config: PipelineConfig, checkpoint: Checkpoint, world: World | None
) -> list[str]:
    """Return the names of the components that ranks on this host load, in alphabetical order.

    Args:
        config: Resolved configuration.
        checkpoint: Checkpoint of the model.
        world: World of the launcher; None: all ranks are on this host.
    """
    by_rank = (
        checkpoint.weighted_components_of(roles, config.sampling)
        for roles in _roles_on_host(config, world)
    )
    return sorted(frozenset[str]().union(*by_rank))


def _roles_on_host(config: PipelineConfig, world: World | None) -> set[Roles]:
    # If the launcher's world and the configuration have different sizes, a later check raises an
    # error. Until then, any set of roles will do.
    if world is None or world.size != config.world_size:
        return set(config.layout.roles)
    # torchrun, and srun by default, number the ranks host by host, so the ranks of this host are
    # consecutive. In case they are not, at least this process's own rank is included.
    first = world.rank - world.local_rank
    return {*config.layout.roles[first : first + world.local_size], config.layout.roles[world.rank]}


def _with_model_defaults(config: PipelineConfig, checkpoint: Checkpoint | None) -> PipelineConfig:
    config = resolve_clip_config(config.sampling, config, checkpoint)
    count = _decode_ranks(config, checkpoint)
    return replace(config, parallel=replace(config.parallel, decode_parallel_size=count))


def _decode_ranks(config: PipelineConfig, checkpoint: Checkpoint | None) -> int:
    """Return the number of ranks that decode each clip.

    If the user gives no number, and two ranks share each step (`cfg_parallel` 2), these two ranks
    also decode together if possible. Several ranks can decode a clip only if its decode consists of
    independent chunks of frames or of tiles.
    """
    in_chunks = checkpoint is None or checkpoint.spec.decodes_in_chunks or bool(config.tiles)
    chunks, parallel = config.chunks or (config.sampling.frames,), config.parallel
    count = parallel.decode_parallel_size
    if count is None:
        return min(parallel.cfg_parallel_size, len(chunks)) if in_chunks else 1
    if count > 1 and checkpoint is not None and not in_chunks:
        can_tile = checkpoint.spec.decodes_in_tiles
        tiles = ", or use `vae_tiling`, whose tiles are decoded on their own" if can_tile else ""
        raise RequestError(
            f"`decode_ranks` {count} cannot divide the decode of {checkpoint.label}: this model "
            "does not decode in independent chunks of frames",
            f"leave `decode_ranks` out{tiles}",
            details={"decode_ranks": count},
        )
    check_chunks(count, chunks, are_tiles=bool(config.tiles))
    return count


# --- memory of the ranks ------------------------------------------------------------------------

#: Bytes of host memory of a rank without the model: Python, torch, diffusers (measured: 110 to 200
#: MiB).
_RANK_BYTES = 128 * 2**20
#: Bytes of host memory to prepare an image of 50 megapixels (measured: 597 MiB) and, in a server, a
#: second image of 4 megapixels at the same time (111 MiB).
_IMAGE_BYTES = 768 * 2**20
#: Limit for the number of pixels in all frames of a clip together. Up to this limit, memory is not
#: checked for clips of demo models, because they need at most half a gigabyte.
_DEMO_PIXELS = 2**18
#: Names that safetensors files use for the dtypes of `ModelConfig.dtype`.
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
#: Bytes of GPU memory of a process without a model: 0.5 GB for CUDA's context and 0.1 GB for the
#: handles of cuBLAS and cuDNN.
_CUDA_PROCESS_BYTES = 600_000_000
#: Bytes of GPU memory of NCCL's buffers: about 0.1 GB for each rank that this rank exchanges data
#: with, usually two (the previous and the next rank).
_NCCL_BYTES = 200_000_000


def estimate_parts(
    config: PipelineConfig, checkpoint: Checkpoint | None, *, apart: bool = False
) -> MemoryEstimate:
    """Return the estimated memory of each part of the model, in bytes.

    Args:
        config: Resolved configuration.
        checkpoint: Checkpoint of the model; None for the dummy model, which needs almost no memory.
        apart: Whether to estimate in a separate process, so that this process needs less memory.
    """
    if checkpoint is None:  # the dummy model needs only megabytes
        nothing = PartMemory(0, 0)
        return MemoryEstimate(nothing, nothing, nothing)
    return estimate_memory(
        checkpoint, config.model, config.sampling, config.device, config.num_threads, apart=apart
    )


def memory_as_costs(
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:
    """Return the memory of each part of the model as fields of `CostModel`, in GiB.

    Args:
        model: Model of the ranks.
        sampling: Sampling parameters of the clips.
        device: `cpu`, `cuda` or `cuda:N`.
        checkpoint: Checkpoint of the model; None: its configs are read.

    Raises:
        RequestError: The model cannot make clips with these parameters.
        ModelError: The model is missing or not supported.
    """
    config = PipelineConfig(world_size=1, model=model, sampling=sampling, device=device)
    resolved = resolve_config(config, weights="none", checkpoint=checkpoint)
    return estimate_parts(*resolved).as_costs()


def estimate_ranks(
    config: PipelineConfig, checkpoint: Checkpoint | None, *, apart: bool = False
) -> list[int]:
    """Return the estimated peak memory of each rank in bytes.

    For ranks on GPUs, this is GPU memory; for ranks on the CPU, it is host memory.

    Args:
        config: Resolved configuration.
        checkpoint: Checkpoint of the model; None for the dummy model, which needs almost no memory.
        apart: Whether to estimate in a separate process, so that this process needs less memory.
    """
    parts = estimate_parts(config, checkpoint, apart=apart)
    return [
        parts.of_rank(roles).peak_bytes + _process_bytes(config.device)
        for roles in config.layout.roles
    ]


def memory_of_devices(
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    world_size: int,
    free_bytes: Callable[[str], int] = free_bytes,
    checkpoint: Checkpoint | None = None,
) -> tuple[dict[str, float], tuple[float, ...]]:
    """Return the memory that the model needs, and the free memory for it on each rank's GPU.

    A layout is chosen from these values.

    Args:
        model: Model of the ranks.
        sampling: Sampling parameters of the clips.
        device: `cpu`, `cuda` (each rank has its own GPU) or `cuda:N` (all ranks share one GPU).
        world_size: Number of ranks.
        free_bytes: Function that returns the free bytes of a GPU, such as `cuda:0`.
        checkpoint: Checkpoint of the model; None: its configs are read.

    Returns:
        Two values: the memory of the model's parts, as fields of `CostModel`; and for each rank the
        free memory without the part that CUDA and NCCL will take. Both values are in GiB, and both
        are empty on the CPU.
    """
    if device == "cpu":
        return {}, ()
    if device != "cuda":
        free = [free_bytes(device) / world_size] * world_size
    else:
        free = [free_bytes(f"cuda:{rank}") for rank in range(world_size)]
    limits = tuple((each - _process_bytes(device)) / 2**30 for each in free)
    return memory_as_costs(model, sampling, device, checkpoint), limits


def _process_bytes(device: str) -> int:
    """Return the bytes that a rank needs in addition to the model, for Python, CUDA and NCCL."""
    if device == "cpu":
        return _RANK_BYTES
    # Ranks that share a GPU (`cuda:N`) use gloo, and so have no buffers of NCCL.
    return _CUDA_PROCESS_BYTES + (_NCCL_BYTES if device == "cuda" else 0)


def check_memory(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> None:
    """Raise an `OutOfMemoryError` if ranks on the CPU need more memory than this machine has free.

    Ranks on GPUs are not checked.

    Args:
        config: Resolved configuration.
        checkpoint: Checkpoint of the model; None for the dummy model.
        ranks: Roles of each rank on this host.

    Raises:
        OutOfMemoryError: The ranks need more memory than this machine has free.
    """
    sampling = config.sampling
    if config.device != "cpu" or checkpoint is None:
        return
    pixels = sampling.frames * sampling.height * sampling.width
    if checkpoint.name in DEMO_MODELS and pixels <= _DEMO_PIXELS:
        return
    free = available_bytes()
    needed = _total_bytes_needed(config, checkpoint, ranks)
    if needed > free:
        noun = "rank needs" if len(ranks) == 1 else "ranks need"
        raise OutOfMemoryError(
            f"out of memory before the run: {len(ranks)} CPU {noun} about "
            f"{format_gib(needed)}, {format_gib(free)} free",
            "use a smaller `world_size`, or use a smaller `height` and `width`, or use fewer "
            "`num_frames`, or use a smaller `decode_chunk_size`, or use `dtype` bf16",
            details={
                **{"requested_bytes": needed, "free_bytes": free, "device": "cpu"},
                "num_ranks": len(ranks),
            },
        )


def _total_bytes_needed(
    config: PipelineConfig, checkpoint: Checkpoint, ranks: Sequence[Roles]
) -> int:
    """Return the bytes that all ranks on this host need together; shared weights count once."""
    parts = estimate_parts(config, checkpoint)
    num_bytes = 0
    weights: dict[tuple[Roles, int], int] = {}
    for rank, roles in enumerate(ranks):
        shares = {share: parts.of_rank(share) for share in roles.by_part()}
        for share, memory in shares.items():
            owner = 0 if _are_shared(config, checkpoint, share) else rank
            weights[share, owner] = memory.weight_bytes
        num_bytes += max((memory.activation_bytes for memory in shares.values()), default=0)
        num_bytes += _RANK_BYTES + _IMAGE_BYTES * roles.encode
    return num_bytes + sum(weights.values())


def _are_shared(config: PipelineConfig, checkpoint: Checkpoint, roles: Roles) -> bool:
    """Whether all ranks on this host that have these roles share one copy of the weights.

    Ranks on the CPU map weight files into memory, and share the pages of a file that already has
    the dtype to load. Otherwise each rank converts the weights into its own copy.
    """

    def is_mapped(part: str) -> bool:
        if checkpoint.denoiser_file(part) is not None:
            # diffusers copies the tensors of GGUF files, so ranks cannot share the pages.
            return False
        dtype = "fp32" if part in checkpoint.spec.fp32_components else config.model.dtype
        dtypes = {*chain(*checkpoint.weight_files(part).values())}
        if part in checkpoint.int8_denoisers:
            # An int8 file also has float32 tensors: scales, and weights that stay in float32.
            return dtypes <= {"I8", "F32", _DTYPES[dtype]}
        return dtypes == {_DTYPES[dtype]}

    return all(map(is_mapped, checkpoint.weighted_components_of(roles, config.sampling)))
