"""Small measurements on real ranks: speed of links, memory of parts, repeatability of bits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image

from svdpp.comm.packet import Packet
from svdpp.comm.streams import SideStream, mark
from svdpp.comm.transport import Transfer, Transport
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.rank_task import run_rank_task
from svdpp.launch import fork_server
from svdpp.launch.group import RankContext
from svdpp.media.examples import example_requests
from svdpp.models.base import LATENTS, Tensors, VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.layout import Roles
from svdpp.plan.schedule import connect_rounds
from svdpp.worker.device import device_of
from svdpp.worker.memory import out_of_memory_named, peak_in_use, reset_peak_of
from svdpp.worker.messages import ClipDone, Event, Joined
from svdpp.worker.rank import load_model
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import tensor_sha256

_SMALL_BYTES = 1024
_LARGE_BYTES = 2**24
_SMALL_TRIPS, _LARGE_TRIPS = 21, 5
# Weights of a transformer are mostly matrices of this size or larger.
_WEIGHT_BYTES, _NUM_WEIGHTS, _MOVES = 2**26, 16, 3
#: The model's parts, each of which can be measured alone.
PARTS = {
    "encode": Roles(encode=True, denoise=False, decode=False),
    "denoise": Roles(encode=False, denoise=True, decode=False),
    "decode": Roles(encode=False, denoise=False, decode=True),
}

#: A function that runs in a rank, with the rank's context, the configuration and an argument.
Question = Callable[[RankContext, PipelineConfig, Any], dict[str, Any]]


class LinkSpeed(NamedTuple):
    """The measured speed of the link from one rank to the next."""

    source: int
    target: int
    latency_seconds: float
    """One way, for a packet of 1 KiB, with threads, header and check."""
    bytes_per_second: float


def ask_ranks(
    question: Question, config: PipelineConfig, argument: Any = None
) -> list[dict[str, Any]]:
    """Starts the ranks of `config`, asks each the same question, and ends them.

    Args:
        question: a module-level function, so that another process can import it.
        config: its world size, device, threads and deadlines apply.
        argument: of the question; anything that can be pickled.

    Returns:
        The answers, JSON values, by rank.
    """
    answers: dict[int, dict[str, Any]] = {}

    def collect(rank: int, event: Event) -> None:
        if isinstance(event, ClipDone):
            answers[rank] = event.metadata

    run_rank_task(
        _answer,
        config,
        (question, argument),
        until=lambda: len(answers) == config.world_size,
        observers=(collect,),
        preload=(fork_server.RANK_MODULE,),
    )
    return [answers[rank] for rank in range(config.world_size)]


def measure_transfers(config: PipelineConfig) -> list[LinkSpeed]:
    """Latency and bandwidth between neighbours, one pair after the other; empty for one rank."""
    if config.world_size == 1:
        return []
    answers = ask_ranks(_ping_neighbours, config)
    return [LinkSpeed(rank, rank + 1, **answer) for rank, answer in enumerate(answers[:-1])]


def measure_offload(config: PipelineConfig, num_weights: int = _NUM_WEIGHTS) -> float:
    """GiB per second at which weights move between host memory and the slowest device.

    All ranks move weights at the same time, because their devices share the host's memory.

    Args:
        config: of the ranks.
        num_weights: that each rank moves, of 64 MiB each.
    """
    answers = ask_ranks(_move_weights, config, num_weights)
    return min(float(answer["gib_per_second"]) for answer in answers)


def measure_work(config: PipelineConfig, checkpoint: Checkpoint | None, part: str) -> int:
    """The peak of bytes that `part` of the model needs above its weights.

    It is measured in a separate process, after a warm-up. On CUDA it is what torch allocates; on
    the CPU it is the growth of the resident set, including memory that the allocator keeps.

    Args:
        config: resolved.
        checkpoint: None for the dummy model.
        part: one of `PARTS`.
    """
    return int(ask_ranks(_measure_work, config, (checkpoint, part))[0]["bytes"])


def repeats_bits(config: PipelineConfig, checkpoint: Checkpoint | None) -> bool:
    """Whether one denoising step, done twice, gives the same bits."""
    first, second = ask_ranks(_step_twice, config, checkpoint)[0]["sha256"]
    return bool(first == second)


def _answer(
    context: RankContext,
    device: str,
    reporter: Reporter,
    config: PipelineConfig,
    asked: tuple[Question, Any],
) -> None:
    question, argument = asked
    reporter.send(Joined(device=device, load_seconds=0.0))
    with out_of_memory_named(None):
        metadata = question(context, config, argument)
    reporter.send(ClipDone(clip=context.world.rank, metadata=metadata))


def _device(context: RankContext, config: PipelineConfig) -> torch.device:
    return torch.device(device_of(config, context.world))


def _ping_neighbours(context: RankContext, config: PipelineConfig, _: Any) -> dict[str, Any]:
    context.join()
    rank = context.world.rank
    device = _device(context, config)
    transport = Transport(rank, device, context.backend, _ignore)
    pairs = [(first, first + 1) for first in range(config.world_size - 1)]
    transport.connect(connect_rounds([link for a, b in pairs for link in ((a, b), (b, a))]))
    result: dict[str, Any] = {}
    for first, second in pairs:
        if rank == first:
            pinger = _Pinger(transport, second, device)
            small = pinger.round_trip(_SMALL_BYTES, _SMALL_TRIPS) / 2
            large = pinger.round_trip(_LARGE_BYTES, _LARGE_TRIPS) / 2
            bandwidth = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
            result = {"latency_seconds": small, "bytes_per_second": bandwidth}
        elif rank == second:
            pinger = _Pinger(transport, first, device)
            pinger.answer(_SMALL_TRIPS)
            pinger.answer(_LARGE_TRIPS)
    transport.drain()
    transport.close()
    return result


def _ignore(transfer: Transfer) -> None:
    """Ignores a transfer's report: the pinger measures by its own clock."""


@dataclass
class _Pinger:
    """One end of a link on which packets travel back and forth."""

    transport: Transport
    peer: int
    device: torch.device
    sent: int = 0

    def round_trip(self, num_bytes: int, times: int) -> float:
        """The median seconds of a round trip, without the first one."""
        seconds = []
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        for _ in range(times + 1):
            begun = time.monotonic()
            answer = self.transport.post_receive(self.sent, 1, self.peer)
            self.transport.send(Packet(self.sent, 0, 0.0, {"blob": tensor}), self.peer)
            answer.wait()
            seconds.append(time.monotonic() - begun)
            self.sent += 1
        return statistics.median(seconds[1:])

    def answer(self, times: int) -> None:
        """Sends every received packet back."""
        for _ in range(times + 1):
            packet = self.transport.post_receive(self.sent, 0, self.peer).wait()
            self.transport.send(Packet(self.sent, 1, 0.0, packet.tensors), self.peer)
            self.sent += 1


def _move_weights(context: RankContext, config: PipelineConfig, num_weights: int) -> dict[str, Any]:
    copies = SideStream(_device(context, config))
    weights = [torch.ones(_WEIGHT_BYTES, dtype=torch.uint8) for _ in range(num_weights)]
    seconds = [copies.round_trip_seconds(weights) for _ in range(_MOVES + 1)]
    moved_gib = 2 * _WEIGHT_BYTES * num_weights / 2**30
    return {"gib_per_second": moved_gib / statistics.median(seconds[1:])}


def _measure_work(
    context: RankContext, config: PipelineConfig, asked: tuple[Checkpoint | None, str]
) -> dict[str, Any]:
    checkpoint, part = asked
    model = load_model(config, checkpoint, str(_device(context, config)), PARTS[part])
    tensors = model.probe_packet(has_stepped=part == "decode")
    # Two requests, because a rank encodes equal prompts once.
    warm_up, measured = example_requests(config, 2)
    _work(model, part, tensors, config, warm_up)
    before = reset_peak_of(model.device)
    _work(model, part, tensors, config, measured)
    return {"bytes": max(0, peak_in_use(model.device) - before)}


def _work(
    model: VideoModel, part: str, tensors: Tensors, config: PipelineConfig, request: ClipRequest
) -> None:
    if part == "encode":
        size = config.sampling.width, config.sampling.height
        prepared = {} if request.image is None else model.prepare(Image.new("RGB", size))
        model.encode(prepared, request)
    elif part == "denoise":
        with torch.no_grad():
            model.denoise(tensors, 0, 1, _ignore_step)
    else:
        model.decode(tensors)


def _step_twice(
    context: RankContext, config: PipelineConfig, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    model = load_model(config, checkpoint, str(_device(context, config)), PARTS["denoise"])
    tensors = model.probe_packet()
    with torch.no_grad():
        latents = [model.denoise(tensors, 0, 1, _ignore_step)[LATENTS] for _ in range(2)]
    copies = SideStream(model.device)
    on_host = [copies.to_host(latent.detach(), mark(model.device)) for latent in latents]
    return {"sha256": [tensor_sha256(latent) for latent in on_host]}


def _ignore_step(step: int, latent: torch.Tensor) -> None:
    """Is called after a step whose latent the caller gets anyway."""
