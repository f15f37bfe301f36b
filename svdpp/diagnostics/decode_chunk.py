"""`--decode-chunk-size auto`: how many frames can be decoded at a time.

Bits depend on the chunk, so it is chosen once, before the first clip, and recorded as a number. A
separate process loads what the decoding rank will hold and decodes one and two frames. From there
memory grows linearly: the decoder's attention stays within a frame, and the rest is convolutions.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from svdpp.config import PipelineConfig, SvdSampling
from svdpp.diagnostics.memory_estimate import CUDA_PROCESS_BYTES
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError, RankError, error_from_dict, error_to_dict
from svdpp.launch import fork_server, process_group
from svdpp.launch.group import RankContext
from svdpp.launch.started import StartedGroup
from svdpp.launch.world import World
from svdpp.models.base import LATENTS
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.free_memory import free_bytes
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Roles
from svdpp.worker.device import take_device
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
    process_group.check_devices(config.device, config.world_size)
    setup = _Setup(*resolve(config, weights="all"))
    group = StartedGroup(
        _measure_main,
        setup,
        world_size=1,
        backend="gloo",
        device=config.device,
        preload=fork_server.modules_for("svd"),  # as for the ranks that follow
    )
    try:
        answer = _wait(group, config.start_timeout_seconds + config.timeout_seconds)
    finally:
        group.kill()
    if "error" in answer:
        raise error_from_dict(answer["error"])
    return DecodeMemory(**answer)


@dataclass(frozen=True)
class _Setup:
    config: PipelineConfig
    checkpoint: Checkpoint | None


def _wait(group: StartedGroup, seconds: float) -> dict[str, Any]:
    what, deadline = "the process that measures the decoding", time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = group.exited()
        for _, message in group.poll(0.2):
            answer: dict[str, Any] = json.loads(message)
            return answer
        if ended:
            if ended[0] == -9:
                raise OutOfMemoryError(f"{what} was killed, probably for lack of memory", _HINT)
            raise RankError(f"{what} ended with {ended[0]}", trace=group.output_tail(0) or "")
    raise RankError(f"{what} did not end within {seconds:.0f} s", "raise --timeout")


def _measure_main(context: RankContext, setup: _Setup) -> None:
    try:
        answer = asdict(_measure(setup))
    except BaseException as error:
        context.channel.send(json.dumps({"error": error_to_dict(error)}).encode())
        raise
    context.channel.send(json.dumps(answer).encode())


def _measure(setup: _Setup) -> DecodeMemory:
    config, checkpoint = setup.config, setup.checkpoint
    assert checkpoint is not None, "the dummy model decodes nothing"
    device = take_device(config, _as_last_rank(config))
    decoding = [roles for roles in config.layout.roles if roles.decode]
    roles = Roles(
        encode=any(each.encode for each in decoding),
        denoise=any(each.denoise for each in decoding),
        decode=True,
    )
    model = load_model(config, checkpoint, str(device), roles)

    # Decoding does not depend on guidance, which a clip of one frame cannot have.
    assert isinstance(config.sampling, SvdSampling), "other families decode all frames at once"
    sampling = replace(config.sampling, min_guidance_scale=1.0, max_guidance_scale=1.0)

    def peak(frames: int, chunk: int) -> int:
        part = model.with_sampling(replace(sampling, num_frames=frames, decode_chunk_size=chunk))
        latent = torch.zeros_like(part.probe_packet()[LATENTS])
        with out_of_memory_named(Action.at(Kind.DECODE, 0, 0), chunk):
            return _peak(model.device, lambda: part.decode({LATENTS: latent}))

    peak(1, 1)  # warm-up: reads the mapped weights, selects kernels, allocates workspaces
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    free = _free_for_each(config, checkpoint, model.device, roles)
    one, kept, both = peak(1, 1), peak(2, 1), peak(2, 2)
    return DecodeMemory(
        num_frames=config.sampling.frames,
        one_frame=one,
        # At least half of two frames' peak, because resident memory is not exact.
        each_in_chunk=max(both // 2, both - kept),
        each_kept=max(0, kept - one),
        free=free,
    )


def _as_last_rank(config: PipelineConfig) -> World:
    """The world of the run's last rank, which decodes, so that its device is measured."""
    size = config.world_size
    return World(rank=size - 1, local_rank=size - 1, size=size, local_size=size)


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
