"""`--decode-chunk-size auto`: how many frames can be decoded at a time.

Bits depend on the chunk, so it is chosen once, before the first clip, and recorded as a number. A
separate process loads what the decoding rank will hold and decodes one and two frames. From there
memory grows linearly: the decoder's attention stays within a frame, and the rest is convolutions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from svdpp.config import PipelineConfig, SvdSampling
from svdpp.diagnostics.memory_estimate import CUDA_PROCESS_BYTES
from svdpp.diagnostics.rank_probe import ask_ranks
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError, RankError
from svdpp.launch import fork_server, process_group
from svdpp.launch.group import RankContext
from svdpp.models.base import LATENTS
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.free_memory import free_bytes
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Roles
from svdpp.worker.memory import out_of_memory_named, peak_in_use, reset_peak_of
from svdpp.worker.rank import load_model

#: The rest is for what the estimate leaves out: fragmentation, other programs, libraries' caches.
_SHARE_OF_FREE = 0.8
_M_MMAP_THRESHOLD = -3  # <malloc.h>
_HINT = "a smaller --height and --width, or --dtype fp16, lower it"


@dataclass(frozen=True, kw_only=True)
class DecodeMemory:
    """The bytes that decoding needs besides the loaded model, and the free bytes.

    Args:
        num_frames: of a clip.
        one_frame: peak of decoding a single frame.
        each_in_chunk: added by each further frame in a chunk.
        each_kept: added by each frame of the clip that is already decoded.
        free: on the device, for this rank, with the model loaded.
    """

    num_frames: int
    one_frame: int
    each_in_chunk: int
    each_kept: int
    free: int

    def needed(self, chunk: int) -> int:
        """The peak of decoding a clip `chunk` frames at a time, in bytes."""
        kept = self.each_kept * (self.num_frames - 1)
        return self.one_frame + kept + self.each_in_chunk * (chunk - 1)

    def largest_chunk(self) -> int:
        """The most frames at a time that fit into 80% of the free memory; at least 1.

        Raises:
            OutOfMemoryError: even one frame at a time exceeds the free memory.
        """
        if self.needed(1) > self.free:
            raise OutOfMemoryError(
                f"out of memory before the run: decoding one frame at a time needs "
                f"{_gib(self.needed(1))}, {_gib(self.free)} free",
                _HINT,
            )
        limit = int(self.free * _SHARE_OF_FREE)
        fitting = (n for n in range(self.num_frames, 0, -1) if self.needed(n) <= limit)
        return next(fitting, 1)

    def __str__(self) -> str:
        return (
            f"{self.largest_chunk()} of {self.num_frames} frames at a time: one takes "
            f"{_gib(self.needed(1))}, each further one {_gib(self.each_in_chunk)}, "
            f"{_gib(self.free)} free"
        )


def measure_decode(config: PipelineConfig) -> DecodeMemory:
    """Measures in a separate process, on the decoding rank's device, at the run's frame size."""
    resolved, checkpoint = resolve(config, weights="all")
    # A run's last rank decodes, so its device is measured.
    last, size = config.world_size - 1, config.world_size
    device = process_group.device_of_rank(config.device, last, size, config.device_order)
    alone = replace(resolved.alone(), device=device)
    modules = fork_server.modules_for("svd")  # as for the ranks that follow
    try:
        (answer,) = ask_ranks(_measure, alone, (resolved, checkpoint), preload=modules)
    except RankError as error:
        if "SIGKILL" not in error.message:
            raise
        words = "the process that measures the decoding was killed, probably for lack of memory"
        raise OutOfMemoryError(words, _HINT) from error
    return DecodeMemory(**answer)


def _measure(
    context: RankContext,  # noqa: ARG001
    alone: PipelineConfig,
    argument: tuple[PipelineConfig, Checkpoint | None],
) -> dict[str, int]:
    config, checkpoint = argument
    assert checkpoint is not None, "the dummy model decodes nothing"
    decoding = [roles for roles in config.layout.roles if roles.decode]
    roles = Roles(
        encode=any(each.encode for each in decoding),
        denoise=any(each.denoise for each in decoding),
        decode=True,
    )
    model = load_model(config, checkpoint, alone.device, roles)

    # Decoding does not depend on guidance, which a clip of one frame cannot have.
    assert isinstance(config.sampling, SvdSampling), "other families decode all frames at once"
    sampling = replace(config.sampling, min_guidance_scale=1.0, max_guidance_scale=1.0)

    def peak(frames: int, chunk: int) -> int:
        part = model.with_sampling(replace(sampling, num_frames=frames, decode_chunk_size=chunk))
        packet = part.probe_packet(has_stepped=True)
        packet[LATENTS] = torch.zeros_like(packet[LATENTS])
        with out_of_memory_named(Action.at(Kind.DECODE, 0, 0), chunk):
            return _peak(model.device, lambda: part.decode(packet))

    peak(1, 1)  # warm-up: reads the mapped weights, selects kernels, allocates workspaces
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    free = _free_for_each(config, checkpoint, model.device, roles)
    one, kept, both = peak(1, 1), peak(2, 1), peak(2, 2)
    return {
        "num_frames": config.sampling.frames,
        "one_frame": one,
        # At least half of two frames' peak, because resident memory is not exact.
        "each_in_chunk": max(both // 2, both - kept),
        "each_kept": max(0, kept - one),
        "free": free,
    }


def _free_for_each(
    config: PipelineConfig, checkpoint: Checkpoint, device: torch.device, loaded: Roles
) -> int:
    """Bytes that each rank may use on `device` once all are loaded; `loaded` already is."""
    free = free_bytes(device)
    if config.device == "cuda":
        return free
    if device.type == "cuda":
        free -= _weights_of_others(config, checkpoint, loaded)
    return free // config.world_size


def _weights_of_others(config: PipelineConfig, checkpoint: Checkpoint, loaded: Roles) -> int:
    """Bytes that the run's other ranks will need on a shared GPU once they are loaded."""
    from svdpp.models.memory import estimate

    parts = estimate(checkpoint, config.model, config.sampling, device=config.device)
    weights = [parts.of_rank(roles).weight_bytes for roles in config.layout.roles]
    own = parts.of_rank(loaded).weight_bytes
    others = max(0, sum(weights) - own)
    return others + (config.world_size - 1) * CUDA_PROCESS_BYTES


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """The peak of bytes that `work` adds to those in use."""
    if device.type == "cpu":
        # Every tensor gets its own mapping (mallopt(3)): otherwise malloc reuses memory that was
        # freed before, and the peak would not show it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    before = reset_peak_of(device)
    work()
    return peak_in_use(device) - before


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
