"""Small measurements on real ranks: memory of parts, and repeatability of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from svdpp.comm.streams import SideStream, mark
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.rank_task import run_rank_task
from svdpp.launch import fork_server
from svdpp.launch.group import RankContext
from svdpp.media.examples import example_requests
from svdpp.models.base import LATENTS, Tensors, VideoModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.layout import Roles
from svdpp.worker.device import device_of
from svdpp.worker.memory import out_of_memory_named, peak_in_use, reset_peak_of
from svdpp.worker.messages import ClipDone, Event, Joined
from svdpp.worker.rank import load_model
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import tensor_sha256

#: The model's parts, each of which can be measured alone.
PARTS = {
    "encode": Roles(encode=True, denoise=False, decode=False),
    "denoise": Roles(encode=False, denoise=True, decode=False),
    "decode": Roles(encode=False, denoise=False, decode=True),
}

#: A function that runs in a rank, with the rank's context, the configuration and an argument.
Question = Callable[[RankContext, PipelineConfig, Any], dict[str, Any]]


def ask_ranks(
    question: Question,
    config: PipelineConfig,
    argument: Any = None,
    *,
    preload: Sequence[str] = (fork_server.RANK_MODULE,),
) -> list[dict[str, Any]]:
    """Starts the ranks of `config`, asks each the same question, and ends them.

    Args:
        question: a module-level function, so that another process can import it.
        config: its world size, device, threads and deadlines apply.
        argument: of the question; anything that can be pickled.
        preload: modules that the fork server imports once for all ranks.

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
        preload=preload,
    )
    return [answers[rank] for rank in range(config.world_size)]


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
