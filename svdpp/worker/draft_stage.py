"""Owns performing one rank's part in a draft's wave: words between walks, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from svdpp.comm.transport import Arrival, Packet, Transport
from svdpp.config import PipelineConfig, TensorSpec
from svdpp.errors import SvdppError
from svdpp.models.base import LATENTS, Frames, Sampler, VideoModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.clip_writer import Delivery
from svdpp.worker.draft_results import Result, Review
from svdpp.worker.draft_sampler import Evaluation, Walk
from svdpp.worker.fault_injection import PlantedFault
from svdpp.worker.profiler import ClipProfiler
from svdpp.worker.reporter import Reporter
from svdpp.worker.stage import NotWanted, PipelineStage
from svdpp.worker.tensor_store import Evidence

_DERIVATIVE = "derivative"
_FRAMES = "frames"


class DraftStage(PipelineStage):
    """One rank of a wave: it walks every clip from its own start, and tells others what it finds.

    A walk that comes to harm, or hears from one that has, goes on as a void packet, and whoever
    depends on it does; the ranks before it do not. Rank 0 depends on nobody, so the exact clip is
    lost by its own fault alone.

    Args:
        rank, model, transport, delivery, reporter, evidence, profiler, fault: see
            `PipelineStage`.
        config: resolved, with a draft.
        results: keeps every rank's result, for verification; None keeps none.
        is_cancelled: asked, between steps, whether a clip has been settled without this rank.
    """

    def __init__(
        self,
        rank: int,
        model: VideoModel,
        transport: Transport,
        delivery: Delivery,
        reporter: Reporter,
        config: PipelineConfig,
        *,
        is_cancelled: Callable[[int], bool],
        evidence: Evidence | None = None,
        results: Evidence | None = None,
        profiler: ClipProfiler | None = None,
        fault: PlantedFault | None = None,
    ) -> None:
        sampling = config.sampling
        super().__init__(
            *(rank, model, transport, delivery, reporter, sampling),
            evidence=evidence,
            profiler=profiler,
            fault=fault,
        )
        assert config.draft is not None
        self._wave = config.wave
        self._draft = config.draft
        self._is_cancelled = is_cancelled
        self._kept_results = results
        self._walks: dict[int, Walk] = {}
        self._words: dict[tuple[int, int, int], Arrival] = {}
        self._reviews: dict[int, Review] = {}

    def _performers(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            **super()._performers(),
            Kind.LEAP: self._leap,
            Kind.TELL: self._tell,
            Kind.HEAR: self._hear,
            Kind.CORRECT: self._correct,
            Kind.REVIEW: self._review,
        }

    def _denoiser(self, packet: Packet, start: int) -> Sampler:
        if packet.clip not in self._walks:
            denoiser = self._model.denoiser(packet.tensors, start)
            self._walks[packet.clip] = Walk(denoiser, start)
        return self._walks[packet.clip]

    def _step(self, clip: int, denoiser: Sampler, latent: torch.Tensor, step: int) -> torch.Tensor:
        if self._is_cancelled(clip):
            raise NotWanted
        return super()._step(clip, denoiser, latent, step)

    def _packet(self, action: Action) -> Packet:
        packet = super()._packet(action)
        if not packet.void and self._is_cancelled(action.clip):
            packet.tensors, packet.void = {}, True
        return packet

    def _lost(self, clip: int, error: SvdppError) -> None:
        if self._rank == 0:
            super()._lost(clip, error)
        else:
            self._reporter.draft_lost(clip, error)

    def _leap(self, action: Action) -> None:
        packet = self._packet(action)
        tensors: dict[str, torch.Tensor] = {}
        if not packet.void:
            landed = self._walks[action.clip].leap(action.start, action.end)
            tensors = {**packet.tensors, LATENTS: landed}
        self._send_word(action, packet, tensors)

    def _tell(self, action: Action) -> None:
        packet = self._packet(action)
        is_result = action.start == self._wave.num_steps
        tensors: dict[str, torch.Tensor] = {}
        if not packet.void:
            tensors = self._result(packet) if is_result else self._found(action)
        self._send_word(action, packet, tensors)
        if is_result:
            self._forget(action.clip)

    def _found(self, action: Action) -> dict[str, torch.Tensor]:
        last = self._walks[action.clip].last
        assert last.step == action.start, f"{action}, but step {last.step} was done last"
        return {LATENTS: last.latent, _DERIVATIVE: last.derivative}

    def _result(self, packet: Packet) -> dict[str, torch.Tensor]:
        latent, frames = packet.tensors[LATENTS], self._frames.pop(packet.clip, None)
        if frames is None:
            return {LATENTS: latent}
        return {LATENTS: latent, _FRAMES: torch.from_numpy(frames).to(latent.device)}

    def _send_word(self, action: Action, packet: Packet, tensors: dict[str, torch.Tensor]) -> None:
        word = Packet(action.clip, action.end, packet.begun_at, tensors, void=not tensors)
        with self._waiting(action):
            self._transport.send(word, action.peer)

    def _hear(self, action: Action) -> None:
        spec = self._model.packet_spec()[LATENTS]
        expected = {LATENTS: spec}
        if action.start < self._wave.num_steps:
            expected[_DERIVATIVE] = TensorSpec(spec.shape, "fp32")
        elif self._wave.decodes:
            expected[_FRAMES] = TensorSpec(self._model.frames_shape, "uint8")
        arrival = self._transport.post_receive(action.clip, action.start, action.peer, expected)
        self._words[action.clip, action.start, action.peer] = arrival

    def _word(self, action: Action) -> Packet:
        """What was heard, waiting for it."""
        with self._waiting(action):
            return self._words.pop((action.clip, action.start, action.peer)).take()

    def _correct(self, action: Action) -> None:
        word, packet = self._word(action), self._packet(action)
        if word.void or packet.void:
            packet.tensors, packet.void = {}, True
            return
        told = Evaluation(action.start, word.tensors[LATENTS], word.tensors[_DERIVATIVE])
        walk, latent = self._walks[action.clip], packet.tensors[LATENTS]
        packet.tensors[LATENTS] = walk.corrected(latent, told, action.end)

    def _deliver(self, action: Action) -> None:
        """Begins the review of the clip, with this rank's own result where it has one."""
        packet = self._packet(action)
        self._reviews[action.clip] = Review(
            self._jobs[action.clip],
            packet.begun_at,
            self._wave,
            self._draft,
            self._delivery,
            self._kept_results,
        )
        if not packet.void:
            self._add_result(action, self._rank, packet, self._frames.pop(action.clip, None))

    def _review(self, action: Action) -> None:
        word = self._word(action)
        if not word.void:
            frames = word.tensors.get(_FRAMES)
            seen = None if frames is None else frames.cpu().numpy()
            self._add_result(action, action.peer, word, seen)
        if action.peer == 0:
            self._forget(action.clip)
            del self._reviews[action.clip]

    def _add_result(self, action: Action, rank: int, packet: Packet, frames: Frames | None) -> None:
        seconds = time.time() - packet.begun_at
        latent = packet.tensors[LATENTS]
        result = Result(rank=rank, latent=latent, frames=frames, seconds=seconds)
        with self._waiting(action):
            self._reviews[action.clip].add(result)

    def _forget(self, clip: int) -> None:
        super()._forget(clip)
        self._walks.pop(clip, None)
        self._frames.pop(clip, None)
