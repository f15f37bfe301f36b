"""One rank's part in a draft: the states and results that ranks send each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch

from svdpp.comm.packet import Packet
from svdpp.comm.transport import PendingPacket, Transport
from svdpp.config import PipelineConfig
from svdpp.errors import SvdppError
from svdpp.models.base import LATENTS, AfterStep, DraftableModel, Tensors, VideoModel, run_steps
from svdpp.plan.actions import Action, Kind
from svdpp.worker.clip_writer import ClipWriter
from svdpp.worker.draft_results import DraftResults, Result
from svdpp.worker.draft_sampler import DraftSampler, Evaluation
from svdpp.worker.fault_injection import InjectedFault
from svdpp.worker.messages import ClipDropped
from svdpp.worker.profiler import ClipProfiler
from svdpp.worker.reporter import Reporter
from svdpp.worker.stage import PipelineStage
from svdpp.worker.tensor_store import TensorStore

_DERIVATIVE = "derivative"
_FRAMES = "frames"


class DraftStage(PipelineStage):
    """One rank of a draft plan: denoises every clip from its own start step.

    A rank that loses a clip sends tombstone packets for it, and so do the ranks that depend on
    that rank. Rank 0 depends on no other rank, so only a failure at rank 0 loses the exact clip.

    Args:
        rank, model, transport, clip_writer, reporter, is_cancelled, tensor_store, profiler,
            fault: see `PipelineStage`.
        config: resolved, with a draft.
        results: keeps every rank's result for verification; None keeps none.
    """

    def __init__(
        self,
        rank: int,
        model: VideoModel,
        transport: Transport,
        clip_writer: ClipWriter,
        reporter: Reporter,
        config: PipelineConfig,
        *,
        is_cancelled: Callable[[int], bool],
        tensor_store: TensorStore | None = None,
        results: TensorStore | None = None,
        profiler: ClipProfiler | None = None,
        fault: InjectedFault | None = None,
    ) -> None:
        super().__init__(
            rank,
            model,
            transport,
            clip_writer,
            reporter,
            config.sampling,
            is_cancelled=is_cancelled,
            tensor_store=tensor_store,
            profiler=profiler,
            fault=fault,
        )
        assert config.draft is not None
        self._draft_plan = config.draft_plan
        self._draft = config.draft
        self._kept_results = results
        self._samplers: dict[int, DraftSampler] = {}
        self._posted: dict[tuple[int, int, int], PendingPacket] = {}
        self._results_of_clip: dict[int, DraftResults] = {}

    @cached_property
    def _performers(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            **super()._performers,
            Kind.SEND_START: self._send_start,
            Kind.SEND_STATE: self._send_state,
            Kind.SEND_RESULT: self._send_result,
            Kind.RECV_STATE: self._post,
            Kind.RECV_RESULT: self._post,
            Kind.CORRECT: self._correct,
            Kind.COMPARE: self._compare,
        }

    def _run_steps(
        self, clip: int, tensors: Tensors, start: int, end: int, after_step: AfterStep
    ) -> Tensors:
        if clip not in self._samplers:
            model = self._model_of(clip)
            assert isinstance(model, DraftableModel), "a draft needs Euler's method"
            self._samplers[clip] = DraftSampler(model.denoiser(tensors, start), start)
        return run_steps(self._samplers[clip], tensors, start, end, after_step)

    def _lost(self, clip: int, error: SvdppError) -> None:
        if self._rank == 0:
            super()._lost(clip, error)
        else:
            self._reporter.draft_lost(clip, error)

    def _send_start(self, action: Action) -> None:
        packet = self._packet(action)
        tensors: dict[str, torch.Tensor] = {}
        if not packet.tombstone:
            reached = self._samplers[action.clip].long_step(action.start, action.end)
            tensors = {**packet.tensors, LATENTS: reached}
        self._send_tensors(action, packet, tensors)

    def _send_state(self, action: Action) -> None:
        packet = self._packet(action)
        tensors: dict[str, torch.Tensor] = {}
        if not packet.tombstone:
            last = self._samplers[action.clip].last
            assert last.step == action.start, f"{action}, but step {last.step} was done last"
            tensors = {LATENTS: last.latent, _DERIVATIVE: last.derivative}
        self._send_tensors(action, packet, tensors)

    def _send_result(self, action: Action) -> None:
        packet = self._packet(action)
        frames = self._frames.pop(packet.clip, None)
        tensors: dict[str, torch.Tensor] = {}
        if not packet.tombstone:
            tensors[LATENTS] = packet.tensors[LATENTS]
            if frames is not None:
                tensors[_FRAMES] = frames
        self._send_tensors(action, packet, tensors)
        self._forget(action.clip)

    def _send_tensors(
        self, action: Action, packet: Packet, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Sends `tensors` for the packet's clip; a tombstone packet if there are none."""
        sent = replace(packet, next_step=action.end, tensors=tensors, tombstone=not tensors)
        with self._waiting(action, "send"):
            self._transport.send(sent, action.peer)

    def _post(self, action: Action) -> None:
        pending = self._transport.post_receive(action.clip, action.start, action.peer)
        self._posted[action.clip, action.start, action.peer] = pending

    def _received(self, action: Action) -> Packet:
        """Waits for the state or result that `action` uses."""
        with self._waiting(action):
            return self._posted.pop((action.clip, action.start, action.peer)).wait()

    def _correct(self, action: Action) -> None:
        received, packet = self._received(action), self._packet(action)
        if received.tombstone or packet.tombstone:
            packet.make_tombstone()
            return
        tensors = received.tensors
        state = Evaluation(action.start, tensors[LATENTS], tensors[_DERIVATIVE])
        sampler, latent = self._samplers[action.clip], packet.tensors[LATENTS]
        packet.tensors[LATENTS] = sampler.corrected(latent, state, action.end)

    def _finish_clip(self, action: Action) -> None:
        """Starts the comparison of the clip's results, with this rank's result if it has one."""
        packet = self._packet(action)
        self._results_of_clip[action.clip] = DraftResults(
            self._jobs[action.clip],
            packet.begun_at,
            self._draft_plan,
            self._draft,
            self._clip_writer,
            self._kept_results,
        )
        if not packet.tombstone:
            self._add_result(action, self._rank, packet, self._frames.pop(action.clip, None))

    def _compare(self, action: Action) -> None:
        received = self._received(action)
        if not received.tombstone:
            self._add_result(action, action.peer, received, received.tensors.get(_FRAMES))
        if action.peer == 0:
            if received.tombstone:
                self._reporter.send(ClipDropped(clip=action.clip))
            self._forget(action.clip)
            del self._results_of_clip[action.clip]

    def _add_result(
        self, action: Action, rank: int, packet: Packet, frames: torch.Tensor | None
    ) -> None:
        seconds = time.time() - packet.begun_at
        with self._waiting(action, "writer"):
            result = Result(
                rank=rank,
                latent=self._on_host(packet.tensors[LATENTS]),
                frames=None if frames is None else self._on_host(frames),
                seconds=seconds,
                compute_seconds=packet.compute_seconds,
                memory_pressure=packet.memory_pressure,
            )
            self._results_of_clip[action.clip].add(result)

    def _forget(self, clip: int) -> None:
        super()._forget(clip)
        self._samplers.pop(clip, None)
        self._frames.pop(clip, None)
