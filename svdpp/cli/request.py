"""Owns turning option values into configurations: defaults by model and device, seeds, worlds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from svdpp.config import (
    DTYPE_BYTES,
    Dtype,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    sampling_defaults,
)
from svdpp.errors import RequestError
from svdpp.launch.world import World, find_world
from svdpp.plan.draft_starts import MOST_RANKS
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.cli.console import Console

#: The value of --decode-chunk-size that is measured.
AUTO = "auto"

_DTYPES: dict[str, Dtype] = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
_MAX_SEEDS = 100_000
# What --memory-opt decodes at a time: diffusers' own low-memory recipe for SVD.
_LOW_MEMORY_CHUNK = 2


def parse_dtype(text: str | None, device: str) -> Dtype:
    """The precision asked for; by default half on CUDA, single on the CPU."""
    if text is None:
        return "fp16" if device.startswith("cuda") else "fp32"
    if text not in _DTYPES:
        raise RequestError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, got {text!r}")
    return _DTYPES[text]


def parse_seeds(seed: int | None, seeds: str | None) -> list[int]:
    """`--seed 7`, or `--seeds 1-8`, `1,3,5-7`; 0 where neither is given.

    Raises:
        RequestError: both are given, or the text is no list of seeds.
    """
    if seeds is None:
        _check_seed(seed or 0)
        return [seed or 0]
    if seed is not None:
        raise RequestError("--seed and --seeds contradict each other")
    result: dict[int, None] = {}  # a set that keeps its order
    for part in seeds.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})(?:-(\d{1,19}))?\s*", part, re.ASCII)
        if match is None:
            raise RequestError(
                f"--seeds takes numbers and ranges such as 1-8 or 1,3,5-7, got {seeds!r}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_SEEDS or len(result) >= _MAX_SEEDS:
            raise RequestError(
                f"--seeds {part.strip()}: smaller to larger, {_MAX_SEEDS} seeds at most"
            )
        _check_seed(last)
        result.update(dict.fromkeys(range(first, last + 1)))
    return list(result)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise RequestError(f"a seed must be 0 to 2^63 - 1, got {seed}")


def parse_decode_chunk(text: str | None) -> int | None:
    """The number of frames; None where it is the default's, or is to be measured.

    Raises:
        RequestError: neither a number nor `auto`; or `auto` under torchrun, where the decoding rank
            may be on another machine.
    """
    if text == AUTO and joined_world(None) is not None:
        raise RequestError(
            "--decode-chunk-size auto measures before ranks are started; torchrun's are there",
            "give a number of frames",
        )
    if text is None or text == AUTO:
        return None
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise RequestError(f"--decode-chunk-size must be a number or auto, got {text!r}")
    return int(text)


def with_fitting_chunk(console: Console, config: PipelineConfig) -> PipelineConfig:
    """`config` with as many frames decoded at a time as fit, measured now.

    Raises:
        OutOfMemoryError: not even one does.
    """
    from svdpp.diagnostics.decode_chunk import measure_decode

    if not config.decodes:
        return config
    memory = measure_decode(config)
    console.info(f"decode: {memory}")
    chunk = memory.largest_chunk()
    return replace(config, sampling=replace(config.sampling, decode_chunk_size=chunk))


def sampling_config(
    model: str, num_steps: int, *, memory_opt: bool = False, **given: Any
) -> SamplingConfig:
    """diffusers' defaults, changed by the model's own, changed by what was given."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if memory_opt:
        chosen.setdefault("decode_chunk_size", _LOW_MEMORY_CHUNK)
    return SamplingConfig(num_inference_steps=num_steps, **{**sampling_defaults(model), **chosen})


def default_world(device: str, num_steps: int, *, on_cpu: int, divide: bool = True) -> int:
    """Ranks where the user names none: on CUDA all GPUs, else `on_cpu`; with `divide` fewer of
    them, so that they divide the steps."""
    if device != "cuda":
        return largest_world(max(num_steps, 1), on_cpu) if divide else on_cpu
    import torch

    count = max(torch.cuda.device_count(), 1)
    return largest_world(max(num_steps, 1), count) if divide else count


def default_draft_world(device: str, num_steps: int) -> int:
    """Ranks of a draft where the user names none: nothing must divide, and more than so many have
    no starts of their own."""
    return min(default_world(device, num_steps, on_cpu=2, divide=False), MOST_RANKS)


def default_threads(device: str, world_size: int) -> int:
    """Intra-op threads of each rank: on the CPU the cores this process may use, shared out.

    1 on CUDA, where the CPU resizes the image and no more: bits then do not depend on the world.
    """
    if device.startswith("cuda"):
        return 1
    launched = find_world()
    sharing = world_size if launched is None else launched.local_size
    return max(1, len(os.sched_getaffinity(0)) // max(sharing, 1))


def pipeline_config(
    *,
    model: ModelConfig,
    sampling: SamplingConfig,
    plan: Mapping[str, Any],
    device: str,
    threads: int | None,
    timeout: float,
    start_timeout: float,
    checksum: bool = False,
) -> PipelineConfig:
    """One checked configuration of all that the options said; `plan` as `PlanChoice` has it."""
    if threads is None:
        threads = default_threads(device, plan["world_size"])
    return PipelineConfig(
        model=model,
        sampling=sampling,
        device=device,
        num_threads=threads,
        timeout_seconds=timeout,
        start_timeout_seconds=start_timeout,
        checksum=checksum,
        **plan,
    )


def default_device() -> str:
    """`cuda` where there is one, else `cpu`: for commands that only ask for a proof."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def joined_world(
    asked: int | None,
    option: str = "--world",
    leave_out: str = "leave --world and --gpus out",
) -> int | None:
    """The number of ranks under torchrun or srun, or what was asked for.

    Args:
        asked: None where nothing was.
        option: by which it is asked for.
        leave_out: how to ask for nothing.

    Raises:
        RequestError: both are there and disagree.
    """
    world = find_world()
    if world is None:
        return asked
    if asked is not None and asked != world.size:
        raise RequestError(
            f"{option} {asked} disagrees with {launcher_name(world)}'s world of {world.size}",
            f"{leave_out} under {launcher_name(world)}",
        )
    return world.size


def launcher_name(world: World) -> str:
    """Who has started the ranks, as its users call it."""
    return "Slurm" if world.launcher == "slurm" else "torchrun"


def is_joined_member() -> bool:
    """Whether this process is a rank other than 0 of torchrun's or srun's world."""
    world = find_world()
    return world is not None and world.is_member


def is_restarted() -> bool:
    """Whether torchrun has started this command before, in the same run."""
    world = find_world()
    return world is not None and world.restarts > 0
