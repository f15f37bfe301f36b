"""The cut test: a tiny copy of a model, cut at every step, against diffusers' whole call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from svdpp.comm.packet import Description, Packet, describe, flatten
from svdpp.comm.streams import SideStream, mark
from svdpp.config import ModelConfig, PipelineConfig
from svdpp.diagnostics.tiny_copy import NUM_STEPS, tiny_sampling, write_tiny_copy
from svdpp.driver.ranks import run_rank_task
from svdpp.driver.resolve import resolve
from svdpp.launch.group import RankContext
from svdpp.media.inputs import example_requests, read_source
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, Tensors, VideoModel
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.plan.layout import Roles
from svdpp.verification.result import Place, compare_latents
from svdpp.verification.whole_call import Reference
from svdpp.worker.messages import ClipDone, Event, Joined
from svdpp.worker.rank import load_model
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import tensor_sha256


class Found(NamedTuple):
    """What a tiny copy has shown."""

    differences: list[str]
    """Between ranks that share a clip, at any cut, and diffusers' whole call."""
    divided: str
    """The final latent by batches of two that are divided, as pairs of ranks do, against that of
    whole batches; empty if the model's guidance has no batch of two."""


def differences(config: PipelineConfig, checkpoint: Checkpoint) -> Found:
    """Compares a tiny copy's clip in parts with the whole one, in a process of its own.

    Args:
        config: of one rank; its device, dtype and threads apply.
    """
    found: list[Found] = []

    def collect(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            found.append(Found(**event.metadata))

    with tempfile.TemporaryDirectory(prefix="svdpp-doctor-") as folder:
        run_rank_task(
            _report, config, (checkpoint, folder), until=lambda: bool(found), observers=(collect,)
        )
    return found[0]


def _report(
    context: RankContext,  # noqa: ARG001
    device: str,
    reporter: Reporter,
    config: PipelineConfig,
    asked: tuple[Checkpoint, str],
) -> None:
    reporter.send(Joined(device=device, load_seconds=0.0))
    found = compare(asked[0], Path(asked[1]), config, device)
    reporter.send(ClipDone(clip=0, metadata=found._asdict()))


def compare(original: Checkpoint, folder: Path, config: PipelineConfig, device: str) -> Found:
    """See `differences`; writes the tiny copy to the empty `folder`."""
    write_tiny_copy(original, folder)
    model = ModelConfig(name=str(folder), family=original.family, dtype=config.model.dtype)
    sampling = tiny_sampling(find_checkpoint(model, weights=False), config.sampling)
    config, checkpoint = resolve(
        replace(config, model=model, sampling=sampling, expert_boundary=None)  # of fewer steps
    )
    assert checkpoint is not None
    test = _CutTest(config, checkpoint, torch.device(device))
    with torch.no_grad():
        test.run()
        divides = checkpoint.row.branches == "batch" and config.sampling.guided
        return Found(test.differences, test.divided() if divides else "")


class _CutTest:
    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint, device: torch.device
    ) -> None:
        self.differences: list[str] = []
        self._config, self._checkpoint, self._device = config, checkpoint, device
        self._copies = SideStream(device)
        (self._request,) = example_requests(config, 1)
        self._source = read_source(self._request, config.sampling)
        self._models: dict[tuple[int, Roles], VideoModel] = {}
        self._latents: list[str] = []

    def run(self) -> None:
        def after_step(_: int, tensors: Tensors) -> None:
            self._latents.append(self._sha256(tensors[LATENTS]))

        frames = tensor_sha256(torch.from_numpy(self._whole_call(after_step)[1]))
        encoder = self._model(0, encode=True)
        prepared = {} if self._source is None else encoder.prepare(self._source)
        first = self._sent(encoder.encode(prepared, self._request))
        for cut in range(1, NUM_STEPS):
            packet = first
            for start, end in ((0, cut), (cut, NUM_STEPS)):
                packet = self._sent(self._denoise(packet, start, end))
            decoded = self._model(NUM_STEPS, decode=True).decode(packet)
            if self._sha256(decoded) != frames:
                self.differences.append(f"the frames, cut after step {cut}")

    def divided(self) -> str:
        """See `Found`."""
        whole, halves = (
            self._copies.to_host(latent, mark(self._device))
            for latent, _ in (self._whole_call(divided=divided) for divided in (False, True))
        )
        check = compare_latents(halves, whole, Place(clip=0, step=NUM_STEPS, rank=0))
        return "bitwise equal" if check.bitwise else f"{check.psnr_db or 0:.1f} dB apart"

    def _whole_call(
        self, after_step: Callable[[int, Tensors], None] = lambda *_: None, *, divided: bool = False
    ) -> tuple[torch.Tensor, Frames]:
        reference = Reference(self._checkpoint, self._config.model, str(self._device))
        return reference.run(
            self._request,
            self._source,
            self._config.sampling,
            before_steps=lambda: None,
            after_step=after_step,
            divided=divided,
        )

    def _denoise(self, packet: Tensors, start: int, end: int) -> Tensors:
        boundary = self._config.expert_boundary
        steps = range(start, end)
        experts = frozenset(int(boundary is not None and step >= boundary) for step in steps)

        def compare(step: int, latent: torch.Tensor) -> None:
            if self._sha256(latent) != self._latents[step]:
                self.differences.append(f"the latent after step {step}, of steps {start} to {end}")

        model = self._model(start, denoise=True, experts=experts)
        return model.denoise(packet, start, end, compare)

    def _model(self, place: int, **roles: Any) -> VideoModel:
        """The model with one role alone; a second half has another one than the first."""
        wanted = Roles(**roles)
        if (place, wanted) not in self._models:
            loaded = load_model(self._config, self._checkpoint, str(self._device), wanted)
            self._models[place, wanted] = loaded
        return self._models[place, wanted]

    def _sent(self, tensors: Tensors) -> Tensors:
        """The tensors as bytes, and back, as a transfer does it."""
        description = Description(describe(Packet(0, 0, 0.0, tensors), self._device))
        return description.packet(flatten(tensors, self._device)).tensors

    def _sha256(self, tensor: torch.Tensor) -> str:
        return tensor_sha256(self._copies.to_host(tensor.detach(), mark(self._device)))
