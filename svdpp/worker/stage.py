"""`PipelineStage`: execution of a rank's actions, such as encode, denoise, decode and send."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path

import torch

from svdpp.comm import streams
from svdpp.comm.packet import Packet, Specs, TensorSpec, check_tensors, mismatch
from svdpp.comm.transport import Channel, PendingPacket
from svdpp.config import ClipRequest, SamplingConfig
from svdpp.errors import (
    InputError,
    MismatchError,
    NotFiniteError,
    SvdppError,
    first_line,
    is_out_of_memory,
)
from svdpp.models.base import (
    DTYPES,
    LATENTS,
    STRUCTURE,
    Audio,
    ModelInput,
    PreparedInput,
    Tensors,
)
from svdpp.models.video_model import VideoModel
from svdpp.plan.actions import SENDS, Action, Kind
from svdpp.worker.background import ImageReader
from svdpp.worker.denoising import Denoising
from svdpp.worker.device import out_of_memory_named
from svdpp.worker.messages import (
    ActionDone,
    ClipDropped,
    ClipJob,
    ImageReady,
    PromptTruncated,
    WaitCause,
)
from svdpp.worker.rank_context import ClipCancelledError, RankContext

# Maximum number of model objects that are kept, one for each set of sampling parameters. All model
# objects share the loaded components.
_MODELS_KEPT = 8
# Maximum number of kinds of packets for which `PipelineStage._first_specs` keeps tensor shapes and
# dtypes. When the limit is reached, all kinds are forgotten.
_KINDS_KEPT = 256
# Name prefixes of tensors whose sizes may depend on the prompt or the image: results of the encode
# that later ranks need (`record.`), and the state of a modular pipeline and of its running block.
_ENCODED = ("record.", "state.", "block.")


class PipelineStage:
    """Stage of the pipeline on one rank, which executes the rank's actions.

    Args:
        context: Context of the rank.
        model: Model with the parts that the actions need.
        sampling: Sampling parameters for clips whose requests have no sampling parameters.
    """

    def __init__(self, context: RankContext, model: VideoModel, sampling: SamplingConfig) -> None:
        self._context, self._model, self._sampling = context, model, sampling
        self._transport, self._reporter = context.transport, context.reporter
        with_sampling: Callable[[SamplingConfig], VideoModel] = model.with_sampling
        self._model_with = lru_cache(_MODELS_KEPT)(with_sampling)
        # (clip, step) of each packet that this rank must send before it is idle again, by peer and
        # channel. `idle` compares them with the packets that were sent (`Transport.sent`).
        self._sends: dict[tuple[int, Channel], list[tuple[int, int]]] = defaultdict(list)
        # Tensor shapes and dtypes of the first packet of each kind, with which later packets of the
        # kind are compared. Two packets are of the same kind if their clips agree in the sampling
        # parameters, in the number of finished steps, in whether there is a prompt, and in whether
        # there is a negative prompt.
        self._first_specs: dict[tuple[object, ...], Specs] = {}
        # Clips of which this rank decodes a part for another rank.
        self._helps: set[int] = set()
        self._images = ImageReader(self._prepare, model.device)
        self._jobs: dict[int, ClipJob] = {}
        self._packets: dict[int, Packet] = {}
        self._frames: dict[int, torch.Tensor] = {}
        # Decoded parts, in order, of clips that several ranks decode.
        self._parts: dict[int, list[Tensors]] = {}
        self._audio: dict[int, Audio] = {}
        self._pending: dict[int, PendingPacket] = {}
        self._waits: dict[WaitCause, float] = {}
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.ENCODE: self._encode,
            Kind.LOAD_CHECKPOINT: self._load_checkpoint,
            Kind.RECV: self._recv,
            Kind.DENOISE: self._denoise,
            Kind.SHARE: self._share,
            Kind.SEND: self._send,
            Kind.SEND_FRAMES: self._send_frames,
            Kind.RECV_FRAMES: self._recv_frames,
            Kind.FREE: lambda action: self._free(self._wait_for_packet(action).clip),
            Kind.DECODE: self._decode,
            Kind.FINISH: self._finish_clip,
        }

    def enqueue(self, actions: Sequence[Action], jobs: Iterable[ClipJob]) -> None:
        """Prepare this rank for the actions of further clips: store jobs, begin to read images.

        Args:
            actions: Actions of this rank for further clips.
            jobs: Jobs of the actions' clips. Jobs of other clips are ignored.
        """
        own = {action.clip for action in actions}
        taken = {job.clip: self._with_sampling(job) for job in jobs if job.clip in own}
        self._jobs.update(taken)
        self._helps.update(action.clip for action in actions if action.kind is Kind.SEND_FRAMES)
        for action in actions:
            if action.kind in SENDS:
                ends = action.peer, _channel_of(action)
                self._sends[ends].append((action.clip, action.start))
        encoded = [action.clip for action in actions if action.kind is Kind.ENCODE]
        self._images.enqueue((clip, taken[clip].request) for clip in encoded)
        if self._context.profiler is not None:
            self._context.profiler.select_clip(actions)

    def prepare_image(self, request: ClipRequest) -> None:
        """Begin to prepare the images of a clip that `enqueue` will get later.

        Args:
            request: Request for the clip. If it has no sampling parameters, those of the run are
                used.
        """
        whole = replace(request, sampling=request.sampling or self._sampling)
        self._images.prepare_early(whole, partial(self._image_ready, whole))

    def run(self, action: Action) -> None:
        """Execute one action of the rank, such as a DENOISE or a SEND.

        An error that concerns only one clip is reported to the parent. The clip's packet becomes a
        tombstone, which tells later ranks to drop the clip.

        Args:
            action: Action of this rank. `enqueue` must have been called before with the action's
                clip.

        Raises:
            MismatchError: A packet is not the expected packet.
            TransportError: A packet could not be sent or received.
            OutOfMemoryError: The device or the host has too little memory.
            DeviceError: The GPU failed.
            ModelError: The model evaluates guidance in a way that a pair of ranks cannot share.
        """
        self._reporter.set_position(action)
        profiler = self._context.profiler
        profiled = nullcontext() if profiler is None else profiler.over(action)
        with out_of_memory_named(action, self._context.device, self._context.rank), profiled:
            self._handlers[action.kind](action)

    def idle(self) -> None:
        """Check that all packets of finished actions were sent, and report this rank as idle.

        Raises:
            MismatchError: This rank has sent other packets than its actions require. The sender
                checks this, because a receiver cannot tell a missing packet from a late one.
        """
        self._check_sends()
        self._waits = {}
        self._reporter.set_position(None)

    def finish(self) -> None:
        """Wait until the rank has sent all packets and written all clips.

        Raises:
            TransportError: A packet could not be sent.
        """
        with self._waiting(None):
            self._transport.drain()
            self._context.clip_writer.finish()
            if self._context.checkpoint_writer is not None:
                self._context.checkpoint_writer.finish()
        self._images.close()
        self._transport.close()

    def _encode(self, action: Action) -> None:
        request = self._jobs[action.clip].request
        packet = self._packets[action.clip] = Packet(action.clip, 0, time.monotonic(), {})
        with self._isolate_failure(packet):
            with self._waiting(action, "image"):
                prepared = self._images.take(action.clip)
            self._context.check_not_cancelled(action.clip)
            packet.begun_at = time.monotonic()
            with self._timed(action):
                model = self._model_of(self._sampling_of(action))
                with _failures_of_clip(action):
                    packet.tensors = model.encode(prepared, request)
                streams.synchronize(self._context.device)
            packet.memory_pressure |= self._context.memory_pressure.has_occurred()
            if request.prompt is not None and (cut := model.truncated_text(request.prompt)):
                self._reporter.send(PromptTruncated(clip=action.clip, text=cut))

    def _load_checkpoint(self, action: Action) -> None:
        writer = self._context.checkpoint_writer
        assert writer is not None, f"{action} without latent checkpoints"
        self._packets[action.clip] = Packet(action.clip, action.start, time.monotonic(), {})
        with self._isolate_failure(self._packets[action.clip]):
            self._context.check_not_cancelled(action.clip)
            request = self._jobs[action.clip].request
            assert request.latents_key is not None, f"{action} without a key"
            name = f"clip {action.clip}"
            if request.output is not None:
                name = repr(Path(request.output.path).name)
            key = request.latents_key
            packet = self._packets[action.clip] = writer.folder.load(
                key, action.clip, action.start, self._context.device, name
            )
            sent = {name: TensorSpec.of(each) for name, each in packet.tensors.items()}
            try:
                check_tensors(sent, self._expected_specs(action, packet.tensors))
            except MismatchError as error:
                why = f"has other tensors than the model needs: {error}".replace("sent", "found")
                raise writer.folder.unfit_error(
                    key, action.clip, action.start, name, why, **error.details
                ) from error

    def _recv(self, action: Action) -> None:
        ends = action.clip, action.start, action.peer, _channel_of(action)
        expected = {LATENTS: self._expected_latent(action)} if action.kind is Kind.RECV else None
        self._pending[action.clip] = self._transport.post_receive(*ends, expected)

    def _expected_latent(self, action: Action) -> TensorSpec:
        """Return the shape and dtype that a clip's latent must have before the given action."""
        spec = self._model_of(self._sampling_of(action)).latent_spec(action.start)
        return TensorSpec(spec.shape, DTYPES[spec.dtype])

    def _expected_specs(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> Specs:
        """Return shape and dtype of the tensors that an action's packet must have, by name.

        The model determines the spec of the latent. The packet's tensor `structure` lists all other
        tensors, such as results of the encode. A packet must also have the same tensors as the
        first packet of its kind; see `_first_specs`.
        """
        request, sampling = self._jobs[action.clip].request, self._sampling_of(action)
        try:
            named = self._model_of(sampling).tensor_specs(dict(tensors))
        except ValueError as error:
            raise MismatchError(str(error)) from error
        specs = {name: TensorSpec(*spec) for name, spec in named.items()}
        specs[LATENTS] = self._expected_latent(action)
        prompts = request.prompt is None, request.negative_prompt is None
        if len(self._first_specs) >= _KINDS_KEPT:
            self._first_specs.clear()
        first = self._first_specs.setdefault((sampling, *prompts, action.start), specs)
        return {name: expected_like(name, specs.get(name), spec) for name, spec in first.items()}

    def _check_sends(self) -> None:
        rank, nothing = self._context.rank, (None, None)
        for peer, channel in self._sends.keys() | self._transport.sent.keys():
            pairs = self._transport.sent[peer, channel], self._sends[peer, channel]
            for sent, planned in zip_longest(*pairs, fillvalue=nothing):
                if sent == planned:
                    continue
                clip, step = sent if planned == nothing else planned
                if sent[0] != planned[0]:
                    error = mismatch("clip", "clip", sent[0], planned[0])
                else:
                    name = f"next step of clip {clip}"
                    error = mismatch(name, "next_step", sent[1], planned[1], clip=clip)
                raise MismatchError(
                    f"packets from rank {rank} to rank {peer}: {error.message}",
                    details={
                        **{"clip": clip, "step": step, "from_rank": rank, "to_rank": peer},
                        **error.details,
                    },
                )
        self._sends.clear()
        self._transport.sent.clear()

    def _denoise(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        denoising = Denoising(self._context, action, packet)
        if not packet.tombstone:
            with self._isolate_failure(packet), self._timed(action):
                model = self._model_of(self._sampling_of(action))
                model.use_loras(self._jobs[action.clip].request.loras)
                denoising.run(model)
        if packet.tombstone:
            denoising.drop()
        packet.next_step = action.end

    def _share(self, action: Action) -> None:
        # A copy is sent, because this rank may drop the clip while the packet is being sent.
        self._send_packet(action, replace(self._wait_for_packet(action)))

    def _send(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        writer, key = self._context.checkpoint_writer, self._jobs[action.clip].request.latents_key
        if writer is not None and key is not None and not packet.tombstone:
            with self._waiting(action, "writer"):
                writer.put(key, packet)
        self._send_packet(action, packet)
        self._free(action.clip)

    def _send_packet(self, action: Action, packet: Packet) -> None:
        with self._waiting(action, "send"):
            self._transport.send(packet, action.peer, _channel_of(action))

    def _decode(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        if packet.tombstone:
            return
        if action.helps:
            # The sender keeps a copy of the packet, and counts the seconds so far. This rank, the
            # receiver, counts only the seconds of its own decode.
            packet.compute_seconds = 0.0
        with self._isolate_failure(packet), self._timed(action):
            model = self._model_of(self._sampling_of(action))
            if action.part is None:
                self._keep_frames(action.clip, model, model.decode(packet.tensors))
            else:
                self._parts[action.clip] = [model.decode_part(packet.tensors, action.part)]
            streams.synchronize(self._context.device)
            packet.memory_pressure |= self._context.memory_pressure.has_occurred()

    def _keep_frames(self, clip: int, model: VideoModel, frames: torch.Tensor) -> None:
        self._frames[clip] = frames
        if model.audio is not None:
            self._audio[clip] = model.audio

    def _send_frames(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        packet.tensors = {} if packet.tombstone else self._parts[action.clip][0]
        self._send_packet(action, packet)
        self._helps.remove(action.clip)
        self._free(action.clip)

    def _recv_frames(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        self._recv(action)
        with self._waiting(action):
            # The expected shape of the received part is derived from the part that this rank has
            # decoded. If that decode has failed, the part is received without a check.
            is_decoded = action.clip in self._parts
            whole = (lambda _: self._expected_part(action)) if is_decoded else None
            part = self._pending.pop(action.clip).wait(whole)
        packet.memory_pressure |= part.memory_pressure
        packet.compute_seconds += part.compute_seconds
        if part.tombstone:
            packet.make_tombstone()
        if packet.tombstone:
            return
        parts = self._parts[action.clip]
        parts.append(part.tensors)
        with self._isolate_failure(packet), self._timed(action):
            assert action.part is not None
            if action.part.end == action.part.total:
                model = self._model_of(self._sampling_of(action))
                self._keep_frames(action.clip, model, model.join_parts(packet.tensors, parts))
                streams.synchronize(self._context.device)
                packet.memory_pressure |= self._context.memory_pressure.has_occurred()

    def _expected_part(self, action: Action) -> Specs:
        """Return shape and dtype of the frames or tiles that a RECV_FRAMES receives."""
        assert action.part is not None
        model = self._model_of(self._sampling_of(action))
        specs = model.part_specs(self._parts[action.clip][0], action.part)
        return {name: TensorSpec(*spec) for name, spec in specs.items()}

    def _finish_clip(self, action: Action) -> None:
        packet = self._wait_for_packet(action)
        if not packet.tombstone:
            # the writer thread needs only the latent
            packet.tensors = {LATENTS: packet.tensors[LATENTS]}
            with self._waiting(action, "writer"):
                job, frames = self._jobs[action.clip], self._frames.get(action.clip)
                self._context.clip_writer.put(job, packet, frames, self._audio.get(action.clip))
        else:
            self._reporter.send(ClipDropped(clip=action.clip))
        self._free(action.clip)

    def _wait_for_packet(self, action: Action) -> Packet:
        """Wait for the packet of an action's clip, and return it.

        If the clip is cancelled, the packet is turned into a tombstone: a packet without tensors.
        """
        pending = self._pending.pop(action.clip, None)
        if pending is not None:
            with self._waiting(action):
                self._packets[action.clip] = pending.wait(partial(self._expected_specs, action))
        packet = self._packets[action.clip]
        if not packet.tombstone and self._context.is_cancelled(action.clip):
            packet.make_tombstone()
        return packet

    def _with_sampling(self, job: ClipJob) -> ClipJob:
        request = replace(job.request, sampling=job.request.sampling or self._sampling)
        return job.model_copy(update={"request": request})

    def _sampling_of(self, action: Action) -> SamplingConfig:
        sampling = self._jobs[action.clip].request.sampling
        assert sampling is not None
        return sampling

    def _prepare(self, source: ModelInput, sampling: SamplingConfig) -> PreparedInput:
        # A thread of the `ImageReader` calls this method while the main thread runs actions.
        return self._model_of(sampling).prepare(source)

    def _model_of(self, sampling: SamplingConfig) -> VideoModel:
        return self._model if sampling == self._sampling else self._model_with(sampling)

    def _image_ready(self, request: ClipRequest, seconds: float | None) -> None:
        self._reporter.send(ImageReady(image=request.image, seconds=seconds))

    def _free(self, clip: int) -> None:
        del self._packets[clip]
        self._frames.pop(clip, None)
        self._parts.pop(clip, None)
        self._audio.pop(clip, None)
        if clip not in self._helps:
            del self._jobs[clip]

    @contextmanager
    def _isolate_failure(self, packet: Packet) -> Iterator[None]:
        try:
            yield
        except ClipCancelledError:
            packet.make_tombstone()
        except (InputError, NotFiniteError) as error:
            self._reporter.report_clip_failure(packet.clip, error)
            packet.make_tombstone()

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        """Report to the parent how long the `with` block took, and how long the rank waited before.

        Args:
            action: ENCODE, DENOISE, DECODE or RECV_FRAMES that the block runs.
        """
        start = time.monotonic()
        yield
        end, waited = time.monotonic(), sum(self._waits.values())
        self._packets[action.clip].compute_seconds += end - start
        self._reporter.send(
            ActionDone(action=action, start=start, end=end, waited=waited, waits=self._waits)
        )
        self._waits = {}

    @contextmanager
    def _waiting(self, action: Action | None, cause: WaitCause = "packet") -> Iterator[None]:
        start = time.monotonic()
        self._reporter.set_position(action, waiting=True)
        yield
        self._reporter.set_position(action)
        self._waits[cause] = self._waits.get(cause, 0.0) + time.monotonic() - start


@contextmanager
def _failures_of_clip(action: Action) -> Iterator[None]:
    """Turn an exception of an encode, run in the `with` block, into an `InputError` for the clip.

    diffusers and transformers raise exceptions of any type for an image or prompt that they cannot
    process. Then only the clip fails, and the rank continues. CUDA errors and out-of-memory errors
    are not changed, and end the rank.
    """
    try:
        yield
    except SvdppError:
        raise
    except Exception as error:
        is_device = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
        if is_device or is_out_of_memory(error):
            raise
        kind = type(error).__name__
        raise InputError(
            f"clip {action.clip} cannot be encoded: {kind}: {first_line(error)}",
            "check the clip's image and prompt",
            details={"clip": action.clip, "exception": kind, "cause": first_line(error)},
        ) from error


def expected_like(name: str, spec: TensorSpec | None, first: TensorSpec) -> TensorSpec:
    """Return the spec that a packet's tensor must have, given the first packet of the same kind.

    Packets are of the same kind if their clips agree in the sampling parameters, in the number of
    finished steps, and in which of prompt and negative prompt they have.

    Results of the encode, and tensors in the state of a modular pipeline, depend on prompt and
    image. Their sizes may differ from the first packet, but not their dtype and number of
    dimensions. The size of the tensor `structure` may differ, too: it contains JSON text. All other
    tensors must have the spec of the first packet.

    Args:
        name: Name of the tensor.
        spec: Spec of the tensor according to the structure of the received packet; None: the
            structure lacks the tensor.
        first: Spec of the tensor in the first packet of the same kind.
    """
    if spec is None or not (name == STRUCTURE or name.startswith(_ENCODED)):
        return first
    is_alike = (spec.dtype, len(spec.shape)) == (first.dtype, len(first.shape))
    return spec if is_alike else first


def _channel_of(action: Action) -> Channel:
    return "clips" if action.part is None else "decode"
