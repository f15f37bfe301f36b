"""The execution of one rank's actions; only here do the model and the transport meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache, partial

import torch

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.transport import Channel, PendingPacket
from svdpp.config import ClipRequest, SamplingConfig
from svdpp.errors import InputError, NotFiniteError
from svdpp.models.base import LATENTS, Audio, Prepared, Source, VideoModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.device import out_of_memory_named
from svdpp.worker.messages import (
    ActionDone,
    ClipDropped,
    ClipJob,
    ImageReady,
    PromptCut,
    WaitCause,
    Work,
)
from svdpp.worker.reporter import ClipProfiler
from svdpp.worker.side_threads import (
    ClipWriter,
    LatentCheckpointWriter,
    PhotoReader,
)
from svdpp.worker.steps import Denoising, NotWantedError, RankTools

_FRAMES = "frames"
# One model object for each sampling configuration in use; they share the loaded components.
_MODELS_KEPT = 8


class PipelineStage:
    """One rank's share of every clip.

    It performs its actions in order and assumes nothing else: neither that its steps are one
    range, nor that a step of a clip belongs to one rank.

    `model` has the parts that the actions need; `sampling` is of the clips whose requests have
    none.
    """

    def __init__(
        self,
        tools: RankTools,
        model: VideoModel,
        clip_writer: ClipWriter,
        sampling: SamplingConfig,
        *,
        checkpoint_writer: LatentCheckpointWriter | None = None,
        profiler: ClipProfiler | None = None,
    ) -> None:
        self._tools = tools
        self._transport, self._reporter = tools.transport, tools.reporter
        self._device = tools.device
        self._clip_writer = clip_writer
        self._model = model
        self._sampling = sampling
        with_sampling: Callable[[SamplingConfig], VideoModel] = model.with_sampling
        self._model_with = lru_cache(_MODELS_KEPT)(with_sampling)
        # The clips that this rank will help to decode.
        self._helps: set[int] = set()
        self._photos = PhotoReader(self._prepare, model.device)
        self._checkpoint_writer = checkpoint_writer
        self._profiler = profiler
        self._jobs: dict[int, ClipJob] = {}
        self._packets: dict[int, Packet] = {}
        self._frames: dict[int, torch.Tensor] = {}
        self._audio: dict[int, Audio] = {}
        self._pending: dict[int, PendingPacket] = {}
        self._waits: dict[WaitCause, float] = {}

    def expect(self, work: Work) -> None:
        """Prepares for the actions of `work`, which `perform` gets later."""
        jobs = {job.clip: self._with_sampling(job) for job in work.jobs}
        if not work.actions:
            for job in jobs.values():
                self._photos.prepare_early(job.request, partial(self._image_ready, job.request))
            return
        self._jobs.update(jobs)
        self._helps.update(action.clip for action in work.actions if action.kind is Kind.RETURN)
        encoded = [action.clip for action in work.actions if action.kind is Kind.ENCODE]
        self._photos.expect((clip, jobs[clip].request) for clip in encoded)
        if self._profiler is not None:
            self._profiler.expect(work.actions)

    def perform(self, action: Action) -> None:
        """Performs one action.

        An error that concerns one clip is reported, and a tombstone packet takes the clip's place;
        other clips are not affected.

        Raises:
            SvdppError: an error that concerns the rank, which cannot go on afterwards.
        """
        self._reporter.at(action)
        profiled = nullcontext() if self._profiler is None else self._profiler.over(action)
        chunk = self._sampling_of(action).decode_chunk_size
        with out_of_memory_named(action, chunk), profiled:
            self._performers[action.kind](action)

    def rest(self) -> None:
        """Notes that no action is left for now; the time until the next one is not a wait."""
        self._waits = {}
        self._reporter.at(None)

    def finish(self) -> None:
        """Waits until every packet has left and every clip is written."""
        with self._waiting(None):
            self._transport.drain()
            self._clip_writer.finish()
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.finish()
        self._photos.close()
        self._transport.close()

    @cached_property
    def _performers(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            Kind.ENCODE: self._encode,
            Kind.LOAD: self._load,
            Kind.RECV: self._recv,
            Kind.DENOISE: self._denoise,
            Kind.SHARE: self._share,
            Kind.SEND: self._send,
            Kind.RETURN: self._return,
            Kind.GATHER: self._gather,
            Kind.DROP: lambda action: self._forget(self._packet(action).clip),
            Kind.DECODE: self._decode,
            Kind.FINISH: self._finish_clip,
        }

    def _encode(self, action: Action) -> None:
        request = self._jobs[action.clip].request
        packet = self._packets[action.clip] = Packet(action.clip, 0, time.time(), {})
        with self._isolated(packet):
            with self._waiting(action, "image"):
                prepared = self._photos.take(action.clip)
            self._tools.check_wanted(action.clip)
            packet.begun_at = time.time()
            with self._timed(action):
                model = self._model_of(self._sampling_of(action))
                packet.tensors = model.encode(prepared, request)
                streams.wait_for_queue(self._device)
            if request.prompt is not None and (cut := model.removed_text(request.prompt)):
                self._reporter.send(PromptCut(clip=action.clip, text=cut))

    def _load(self, action: Action) -> None:
        assert self._checkpoint_writer is not None, f"{action} without latent checkpoints"
        self._packets[action.clip] = Packet(action.clip, action.start, time.time(), {})
        with self._isolated(self._packets[action.clip]):
            self._tools.check_wanted(action.clip)
            key = self._jobs[action.clip].request.latents_key
            assert key is not None, f"{action} without a key"
            self._packets[action.clip] = self._checkpoint_writer.folder.load(
                key, action.clip, action.start, self._device
            )

    def _recv(self, action: Action) -> None:
        self._pending[action.clip] = self._transport.post_receive(
            action.clip, action.start, action.peer, _channel_of(action)
        )

    def _denoise(self, action: Action) -> None:
        packet = self._packet(action)
        denoising = Denoising(self._tools, action, packet)
        if not packet.tombstone:
            with self._isolated(packet), self._timed(action):
                denoising.run(self._model_of(self._sampling_of(action)))
        if packet.tombstone:
            denoising.drop()
        packet.next_step = action.end

    def _share(self, action: Action) -> None:
        # A copy, as this rank goes on and may drop the clip while the packet leaves.
        self._send_packet(action, replace(self._packet(action)))

    def _send(self, action: Action) -> None:
        packet = self._packet(action)
        writer, key = self._checkpoint_writer, self._jobs[action.clip].request.latents_key
        if writer is not None and key is not None and not packet.tombstone:
            with self._waiting(action, "send"):
                writer.put(key, packet)
        self._send_packet(action, packet)
        self._forget(action.clip)

    def _send_packet(self, action: Action, packet: Packet) -> None:
        with self._waiting(action, "send"):
            self._transport.send(packet, action.peer, _channel_of(action))

    def _decode(self, action: Action) -> None:
        packet = self._packet(action)
        if packet.tombstone:
            return
        if action.helps:
            packet.compute_seconds = 0.0  # the other rank counts what was before
        with self._isolated(packet), self._timed(action):
            model = self._model_of(self._sampling_of(action))
            self._frames[action.clip] = model.decode(packet.tensors, action.frames)
            if model.audio is not None:
                self._audio[action.clip] = model.audio
            streams.wait_for_queue(self._device)
            packet.memory_pressure |= self._tools.memory_pressure.rose()

    def _return(self, action: Action) -> None:
        packet = self._packet(action)
        packet.tensors = {} if packet.tombstone else {_FRAMES: self._frames[action.clip]}
        self._send_packet(action, packet)
        self._helps.remove(action.clip)
        self._forget(action.clip)

    def _gather(self, action: Action) -> None:
        packet = self._packet(action)
        pending = self._transport.post_receive(
            action.clip, action.start, action.peer, _channel_of(action)
        )
        with self._waiting(action):
            part = pending.wait()
        packet.memory_pressure |= part.memory_pressure
        packet.compute_seconds += part.compute_seconds
        if part.tombstone:
            packet.make_tombstone()
        if packet.tombstone:
            return
        with self._timed(action):
            both = [self._frames[action.clip], part.tensors[_FRAMES]]
            self._frames[action.clip] = torch.cat(both)

    def _finish_clip(self, action: Action) -> None:
        packet = self._packet(action)
        if not packet.tombstone:
            packet.tensors = {LATENTS: packet.tensors[LATENTS]}  # the writer needs no other
            with self._waiting(action, "writer"):
                job, frames = self._jobs[action.clip], self._frames.get(action.clip)
                self._clip_writer.put(job, packet, frames, self._audio.get(action.clip))
        else:
            self._reporter.send(ClipDropped(clip=action.clip))
        self._forget(action.clip)

    def _packet(self, action: Action) -> Packet:
        """The clip's packet; waits for it if it has not arrived."""
        pending = self._pending.pop(action.clip, None)
        if pending is not None:
            with self._waiting(action):
                self._packets[action.clip] = pending.wait()
        packet = self._packets[action.clip]
        if not packet.tombstone and self._tools.is_cancelled(action.clip):
            packet.make_tombstone()
        return packet

    def _with_sampling(self, job: ClipJob) -> ClipJob:
        request = replace(job.request, sampling=job.request.sampling or self._sampling)
        return job.model_copy(update={"request": request})

    def _sampling_of(self, action: Action) -> SamplingConfig:
        sampling = self._jobs[action.clip].request.sampling
        assert sampling is not None
        return sampling

    def _prepare(self, source: Source, sampling: SamplingConfig) -> Prepared:
        """Prepares an image or a video; runs in the reader's thread."""
        return self._model_of(sampling).prepare(source)

    def _model_of(self, sampling: SamplingConfig) -> VideoModel:
        return self._model if sampling == self._sampling else self._model_with(sampling)

    def _image_ready(self, request: ClipRequest, seconds: float) -> None:
        self._reporter.send(ImageReady(image=request.image, seconds=seconds))

    def _forget(self, clip: int) -> None:
        del self._packets[clip]
        for values in (self._frames, self._audio):
            values.pop(clip, None)
        if clip not in self._helps:
            del self._jobs[clip]

    @contextmanager
    def _isolated(self, packet: Packet) -> Iterator[None]:
        try:
            yield
        except NotWantedError:
            packet.make_tombstone()
        except (InputError, NotFiniteError) as error:
            self._reporter.clip_failed(packet.clip, error)
            packet.make_tombstone()

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        """Reports the time of a compute action and the wait before it; adds it to the clip's."""
        start, cpu_start = time.monotonic(), time.process_time()
        yield
        end, cpu_end = time.monotonic(), time.process_time()
        self._packets[action.clip].compute_seconds += end - start
        self._reporter.send(
            ActionDone(
                action=action,
                start=start,
                end=end,
                waited=sum(self._waits.values()),
                waits=self._waits,
                cpu_seconds=cpu_end - cpu_start,
            )
        )
        self._waits = {}

    @contextmanager
    def _waiting(self, action: Action | None, cause: WaitCause = "packet") -> Iterator[None]:
        start = time.monotonic()
        self._reporter.at(action, waiting=True)
        yield
        self._reporter.at(action)
        self._waits[cause] = self._waits.get(cause, 0.0) + time.monotonic() - start


def _channel_of(action: Action) -> Channel:
    return "clips" if action.frames is None else "decode"
