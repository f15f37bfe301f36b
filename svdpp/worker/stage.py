"""Owns performing one rank's actions: the only place where a model meets its neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import NoReturn

import torch

from svdpp.comm.transport import Packet, PendingPacket, Transport
from svdpp.config import SamplingConfig
from svdpp.errors import InputError, NotFiniteError, SvdppError
from svdpp.models.base import LATENTS, Frames, Sampler, VideoModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.clip_writer import ClipWriter, FinishedClip
from svdpp.worker.fault_injection import InjectedFault, one_ulp_off
from svdpp.worker.latent_checkpoints import LatentCheckpoints, LatentCheckpointWriter
from svdpp.worker.messages import ActionDone, ClipJob, StepDone
from svdpp.worker.out_of_memory import out_of_memory_named
from svdpp.worker.prefetch import PhotoReader, ReadPhoto, from_disk
from svdpp.worker.profiler import ClipProfiler
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import TensorStore


class NotWanted(Exception):
    """Nobody waits for the clip any more."""


class PipelineStage:
    """One rank's share of every clip.

    It does what its actions say, in their order, and assumes nothing beside them: neither that its
    steps are one range, nor that a step of a clip belongs to one rank.

    Args:
        rank: which one.
        model: the parts this rank's actions need.
        transport: its links, connected.
        clip writer: takes the clips that end here.
        reporter: tells the parent.
        sampling: size and fit of what images become.
        checkpoints: where packets are kept from which an interrupted clip goes on; None keeps none.
        tensor store: keeps every latent that leaves a DENOISE, for verification; None keeps
        nothing.
        profiler: looks at one clip; None at none.
        fault: planted damage.
        read_photo: where photographs come from.
    """

    def __init__(
        self,
        rank: int,
        model: VideoModel,
        transport: Transport,
        clip_writer: ClipWriter,
        reporter: Reporter,
        sampling: SamplingConfig,
        *,
        checkpoints: LatentCheckpoints | None = None,
        tensor_store: TensorStore | None = None,
        profiler: ClipProfiler | None = None,
        fault: InjectedFault | None = None,
        read_photo: ReadPhoto = from_disk,
    ) -> None:
        self._rank = rank
        self._model = model
        self._transport = transport
        self._clip_writer = clip_writer
        self._reporter = reporter
        self._sampling = sampling
        self._photos = PhotoReader(sampling, read_photo)
        self._checkpoints = checkpoints
        self._checkpoint_writer = (
            LatentCheckpointWriter(checkpoints, reporter.failed) if checkpoints else None
        )
        reporter.add_writer(clip_writer.is_busy)
        if self._checkpoint_writer is not None:
            reporter.add_writer(self._checkpoint_writer.is_busy)
        self._tensor_store = tensor_store
        self._profiler = profiler
        self._fault = fault
        self._jobs: dict[int, ClipJob] = {}
        self._keys: dict[int, str] = {}
        self._packets: dict[int, Packet] = {}
        self._frames: dict[int, Frames] = {}
        self._pending: dict[int, PendingPacket] = {}
        self._waited = 0.0

    def perform(
        self,
        actions: Iterable[Action],
        jobs: Mapping[int, ClipJob],
        latents_keys: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Does `actions` in order.

        What is wrong with one clip alone is reported, and the clip goes on as a tombstone packet;
        the other clips do not suffer from it.

        Args:
            actions: this rank's.
            jobs: by clip, of every clip that they encode or deliver.
            latents_keys: by clip, where packets are kept.

        Raises:
            SvdppError: the first thing that could not be done; the rank is of no use afterwards.
        """
        self._waited = 0.0  # what came after the last work of an earlier call is not this one's
        self._jobs.update(jobs)
        self._keys.update(latents_keys)
        actions = list(actions)
        encoded = [action.clip for action in actions if action.kind is Kind.ENCODE]
        self._photos.expect((clip, jobs[clip].request) for clip in encoded)
        if self._profiler is not None:
            self._profiler.expect(actions)
        perform = self._performers()
        for action in actions:
            self._reporter.at(action)
            if self._fault:
                self._fault.reach(self._rank, action.clip, action.kind.lower())
            looked_at = nullcontext() if self._profiler is None else self._profiler.over(action)
            with out_of_memory_named(action, self._sampling.decode_chunk_size), looked_at:
                perform[action.kind](action)
        self._reporter.at(None)

    def finish(self) -> None:
        """Waits until everything sent has arrived and everything delivered is in its place."""
        with self._waiting(None):
            self._transport.drain()
            self._clip_writer.finish()
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.finish()
        self._photos.close()
        self._transport.close()

    def _performers(self) -> dict[Kind, Callable[[Action], None]]:
        """Who does what kind of action."""
        return {
            Kind.ENCODE: self._encode,
            Kind.LOAD: self._load,
            Kind.RECV: self._recv,
            Kind.DENOISE: self._denoise,
            Kind.SEND: self._send,
            Kind.DECODE: self._decode,
            Kind.FINISH: self._finish_clip,
        }

    def _encode(self, action: Action) -> None:
        request = self._jobs[action.clip].request
        packet = self._packets[action.clip] = Packet(action.clip, 0, time.time(), {})
        with self._alone(packet):
            with self._waiting(action):
                image = self._photos.take(action.clip)
            packet.begun_at = time.time()
            with self._timed(action):
                packet.tensors = self._model.encode(image, request.seed)
                self._synchronize()

    def _load(self, action: Action) -> None:
        assert self._checkpoints is not None, f"{action} without a folder of hand-overs"
        self._packets[action.clip] = Packet(action.clip, action.start, time.time(), {})
        with self._alone(self._packets[action.clip]):
            self._packets[action.clip] = self._checkpoints.load(
                self._keys[action.clip],
                *(action.clip, action.start, self._model.packet_spec(), self._model.device),
            )

    def _recv(self, action: Action) -> None:
        spec = self._model.packet_spec()
        self._pending[action.clip] = self._transport.post_receive(
            action.clip, action.start, action.peer, spec
        )

    def _denoise(self, action: Action) -> None:
        packet = self._packet(action)
        if packet.tombstone:
            packet.next_step = action.end
            return
        with self._alone(packet), self._timed(action):
            start = self._faulty_start(action) if self._fault else action.start
            denoiser = self._denoiser(packet, start)
            latent = packet.tensors[LATENTS]
            if self._fault and self._fault.strikes("nan", self._rank, action.clip):
                latent = torch.full_like(latent, torch.nan)
            for step in range(start, action.end):
                self._reporter.at(action, step)
                if self._fault:
                    self._fault.reach(self._rank, action.clip, f"step{step}")
                latent = self._step(action.clip, denoiser, latent, step)
            if self._fault and self._fault.strikes("ulp", self._rank, action.clip):
                latent = one_ulp_off(latent)
            packet.tensors[LATENTS] = latent
            if self._tensor_store is not None:
                self._tensor_store.keep_latent(action.clip, action.end, latent)
        packet.next_step = action.end

    def _denoiser(self, packet: Packet, start: int) -> Sampler:
        """What does the steps of a clip from `start` on."""
        return self._model.denoiser(packet.tensors, start)

    def _step(self, clip: int, denoiser: Sampler, latent: torch.Tensor, step: int) -> torch.Tensor:
        begun = time.monotonic()
        latent = denoiser.forward(latent, step)
        self._check_finite(latent, step)
        seconds = time.monotonic() - begun
        self._reporter.send(StepDone(clip=clip, step=step, seconds=seconds))
        return latent

    def _send(self, action: Action) -> None:
        packet = self._packet(action)
        with self._waiting(action):
            if (
                self._checkpoint_writer is not None
                and action.clip in self._keys
                and not packet.tombstone
            ):
                self._checkpoint_writer.put(self._keys[action.clip], packet)
            self._transport.send(packet, action.peer)
        self._forget(action.clip)

    def _decode(self, action: Action) -> None:
        packet = self._packet(action)
        if packet.tombstone:
            return
        with self._alone(packet), self._timed(action):
            self._frames[action.clip] = self._model.decode(packet.tensors[LATENTS])

    def _finish_clip(self, action: Action) -> None:
        packet = self._packet(action)
        if not packet.tombstone:
            with self._waiting(action):
                self._clip_writer.put(
                    FinishedClip(
                        job=self._jobs[action.clip],
                        latent=packet.tensors[LATENTS],
                        frames=self._frames.pop(action.clip, None),
                        begun_at=packet.begun_at,
                        compute_seconds=packet.compute_seconds,
                    )
                )
        self._forget(action.clip)

    def _packet(self, action: Action) -> Packet:
        """The clip's packet, waiting for it where it is still on its way."""
        pending = self._pending.pop(action.clip, None)
        if pending is not None:
            with self._waiting(action):
                self._packets[action.clip] = pending.wait()
        return self._packets[action.clip]

    def _forget(self, clip: int) -> None:
        del self._packets[clip]
        self._jobs.pop(clip, None)
        self._keys.pop(clip, None)

    @contextmanager
    def _alone(self, packet: Packet) -> Iterator[None]:
        """Reports what is wrong with one clip, and lets nothing but a tombstone packet go on."""
        try:
            yield
        except NotWanted:
            packet.tensors, packet.tombstone = {}, True
        except (InputError, NotFiniteError) as error:
            self._lost(packet.clip, error)
            packet.tensors, packet.tombstone = {}, True

    def _lost(self, clip: int, error: SvdppError) -> None:
        """Reports a clip that is lost at this rank."""
        self._reporter.clip_failed(clip, error)

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        """Reports the time of a compute action, and the wait before it; counts it as the clip's."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self._packets[action.clip].compute_seconds += end - start
        self._reporter.send(
            ActionDone(action=str(action), start=start, end=end, waited=self._waited)
        )
        self._waited = 0.0

    @contextmanager
    def _waiting(self, action: Action | None) -> Iterator[None]:
        start = time.monotonic()
        self._reporter.at(action, waiting=True)
        yield
        self._reporter.at(action)
        self._waited += time.monotonic() - start

    def _check_finite(self, latent: torch.Tensor, step: int) -> None:
        """Waits for the device, too, so that a step's time is the kernels' and not the queue's."""
        if not bool(torch.isfinite(latent).all()):
            raise NotFiniteError(
                f"the latent is not finite after step {step}, done by rank {self._rank}",
                "damaged weights, or too narrow a dtype? --dtype bf16 and fp32 reach further",
            )

    def _synchronize(self) -> None:
        """So that an encode's time is the device's and not the launch queue's."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _faulty_start(self, action: Action) -> int:
        """Performs a fault planted before the first step; the step to begin with."""
        fault = self._fault
        assert fault is not None
        self._reporter.at(action, action.start)
        if fault.strikes("raise", self._rank, action.clip):
            raise RuntimeError("a planted fault")
        if fault.strikes("hang", self._rank, action.clip):
            _hang()
        return action.start + fault.strikes("skip", self._rank, action.clip)


def _hang() -> NoReturn:
    while True:
        time.sleep(1)
