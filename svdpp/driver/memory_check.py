"""The check of a run's memory against the free memory, before its processes start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from svdpp.config import DEMO_MODEL, PipelineConfig
from svdpp.errors import OutOfMemoryError
from svdpp.launch import environment
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.free_memory import available_bytes, gib_text, shares_weights
from svdpp.plan.layout import Roles

#: Private memory of each rank without the model: Python, torch's and diffusers' state (measured:
#: 110 to 200 MiB of dirty pages in a rank that is forked and idle).
_RANK_BYTES = 128 * 2**20
#: What a rank that encodes takes to read and prepare images (measured: its peak rises by 597 MiB
#: with the largest image, 50 megapixels, and by 111 MiB with one of 4, which a server may prepare
#: beside it).
_IMAGE_BYTES = 768 * 2**20
#: Of a built-in model: what does not depend on the clip's size, and elements of activations for
#: each element of the dummy's latent, and each pixel of a frame that the demo decodes or denoises.
_BUILT_IN_BYTES = 2**29
_DUMMY_ELEMENTS, _DECODED_ELEMENTS, _DENOISED_ELEMENTS = 640, 512, 90
_KNOBS = {
    "encode": "a smaller --height and --width lower it",
    "denoise": "fewer --frames, a smaller --height and --width, or --memory-opt lower it",
    "decode": "a smaller --decode-chunk-size, or auto, lowers it",
    "weights": "a smaller --world, or --dtype bf16, lowers it",
}


@dataclass(frozen=True, kw_only=True)
class _Need:
    """The bytes that all ranks need together, and the option that lowers the largest share."""

    num_bytes: int
    knob: str


def check_memory(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> None:
    """Refuses CPU ranks that need more memory than this machine has free.

    The peaks of all ranks are added, because they may occur at the same time.
    """
    if config.device != "cpu":
        return
    free = available_bytes()
    if _upper_bound(config, checkpoint, ranks) <= free:
        return
    need = _estimate(config, checkpoint, ranks)
    if need.num_bytes > free:
        noun = "rank needs" if len(ranks) == 1 else "ranks need"
        raise OutOfMemoryError(
            f"out of memory before the run: {len(ranks)} CPU {noun} about "
            f"{gib_text(need.num_bytes)}, {gib_text(free)} free",
            need.knob,
        )


def _upper_bound(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> float:
    """Above the need of a built-in model, but known without diffusers; infinite for others."""
    sampling, frames = config.sampling, config.sampling.frames
    if checkpoint is None:
        elements = _DUMMY_ELEMENTS * math.prod(config.model.dummy_latent.shape)
    elif checkpoint.name == DEMO_MODEL:
        decoded = min(sampling.decode_chunk_size or frames, frames)
        pixels = sampling.height * sampling.width
        elements = pixels * (_DECODED_ELEMENTS * decoded + _DENOISED_ELEMENTS * frames)
    else:
        return math.inf
    return len(ranks) * (_BUILT_IN_BYTES + 4 * elements) + _image_bytes(checkpoint, ranks)


def _estimate(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> _Need:
    with environment.defaults():
        from svdpp.models.memory import estimate

    parts = estimate(
        checkpoint,
        config.model,
        config.sampling,
        device=config.device,
        num_threads=config.num_threads,
    )
    activations = dict.fromkeys(_KNOBS, 0)
    weights: dict[tuple[Roles, int], int] = {}
    for rank, roles in enumerate(ranks):
        memories = ((share, parts.of_rank(share)) for share in roles.split())
        held = {share: memory for share, memory in memories if memory.peak_bytes}
        for share, memory in held.items():
            owner = 0 if _are_shared(config, checkpoint, share) else rank
            weights[share, owner] = memory.weight_bytes
        if held:
            largest = max(held, key=lambda share: held[share].activation_bytes)
            (name,) = (name for name, has_role in largest.parts.items() if has_role)
            activations[name] += held[largest].activation_bytes
    activations["weights"] = sum(weights.values()) + len(ranks) * _RANK_BYTES
    knob = max(activations, key=lambda name: activations[name])
    num_bytes = _image_bytes(checkpoint, ranks) + sum(activations.values())
    return _Need(num_bytes=num_bytes, knob=_KNOBS[knob])


def _image_bytes(checkpoint: Checkpoint | None, ranks: Sequence[Roles]) -> int:
    return 0 if checkpoint is None else _IMAGE_BYTES * sum(roles.encode for roles in ranks)


def _are_shared(config: PipelineConfig, checkpoint: Checkpoint | None, roles: Roles) -> bool:
    """Whether ranks with these roles map the same pages of the weights' files."""
    return checkpoint is not None and all(
        shares_weights(checkpoint, config.model, part)
        for part in checkpoint.components_of(roles, config.sampling)
    )
