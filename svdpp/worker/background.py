"""Background threads of a rank, which send reports, read images ahead, and write files."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.streams import SideStream, record_event
from svdpp.comm.transport import Transfer
from svdpp.config import ClipRequest, SamplingConfig
from svdpp.errors import OutputError, error_to_dict
from svdpp.launch.start_deadline import limit_error
from svdpp.launch.worker_group import ControlChannel
from svdpp.media import output_files, video
from svdpp.media.inputs import read_input
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, Audio, ModelInput, PreparedInput
from svdpp.plan.actions import Action
from svdpp.worker.device import bytes_in_use
from svdpp.worker.messages import (
    CheckpointLost,
    ClipDone,
    ClipFailed,
    ClipJob,
    Event,
    Failed,
    Heartbeat,
    StoredTensor,
    TransferDone,
)
from svdpp.worker.stats import StatsSampler
from svdpp.worker.tensor_files import (
    LatentCheckpoints,
    TensorStore,
    audio_hashes,
    store_result,
    tensor_sha256,
)

# --- reports to the parent ------------------------------------------------------------------------

_HEARTBEAT_SECONDS = 1.0


class Reporter:
    """Sender of a rank's events to the parent. All methods are thread-safe.

    Args:
        channel: Channel to the parent.
        other_host: Name of the rank's host, which is put before the error messages of failed clips.
            Empty if the rank runs on the same host as rank 0.
    """

    def __init__(self, channel: ControlChannel, other_host: str = "") -> None:
        self.device = ""
        """Device whose memory use the heartbeats report; empty until the rank has a device."""
        self.writers: list[BoundedExecutor] = []
        """Writer threads of the rank; heartbeats report whether one of the threads is busy."""
        self.sampler: StatsSampler | None = None
        """Sender of `RankStats`; None until the rank's links are open."""
        self._channel = channel
        self._other_host = other_host
        self._now = Heartbeat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread that sends a rank's heartbeats to the parent."""
        self._thread.start()

    def stop_sampling(self) -> None:
        """Send a last `RankStats` sample of this rank for monitoring, and stop sampling."""
        if self.sampler is not None:
            self.sampler.stop()

    def stop(self) -> None:
        """Stop the thread that sends a rank's heartbeats to the parent."""
        self._stopped.set()
        self._thread.join()

    def send(self, event: Event) -> None:
        """Send one event of this rank to the parent.

        Raises:
            OSError: The parent has ended.
        """
        self._channel.send(event.to_bytes())

    def set_position(self, action: Action | None, step: int = -1, *, waiting: bool = False) -> None:
        """Set the action and step that heartbeats report; send a heartbeat if needed.

        If `action` or `waiting` changes, a heartbeat is sent at once.

        Args:
            action: Current action; None: the rank has no work.
            step: Index of the current step of a DENOISE; -1: the action has no steps.
            waiting: Whether the rank waits for a packet, a slow receiver, an image or the disk.
        """
        before, self._now = self._now, Heartbeat(action=action, step=step, waiting=waiting)
        if (action, waiting) != (before.action, before.waiting):
            self.send(self._heartbeat())

    def set_phase(self, phase: str, peer: int = -1, *, waiting: bool = False) -> None:
        """Set the phase of the rank's start for the heartbeats, and send a heartbeat at once.

        Args:
            phase: Phase in words, such as "loading the model".
            peer: Rank to which this rank is opening a link; -1: no link is being opened.
            waiting: Whether the phase ends only when all other ranks have reached it.
        """
        self._now = Heartbeat(phase=phase, peer=peer, waiting=waiting)
        self.send(self._now)

    def report_transfer(self, transfer: Transfer) -> None:
        """Report to the parent that a packet was received or sent."""
        self.send(TransferDone(**transfer._asdict()))

    def send_tensor(self, name: str, data: bytes) -> None:
        """Send a file of tensors to the parent, which keeps it for verification under `name`."""
        self.send(StoredTensor(name=name, data=base64.b64encode(data)))

    def report_clip_failure(self, clip: int, error: BaseException) -> None:
        """Report to the parent an error that makes one clip fail; the rank goes on."""
        record = error_to_dict(error)
        if self._other_host:
            record["message"] = f"on {self._other_host}: {record['message']}"
        self.send(ClipFailed(clip=clip, error=record))

    def report_failure(self, error: BaseException) -> None:
        """Report to the parent an error that ends this rank, with its current action and step."""
        self.send(
            Failed(
                error=error_to_dict(limit_error(error) or error),
                traceback="".join(traceback.format_exception(error)),
                action=self._now.action,
                step=self._now.step,
            )
        )

    def _heartbeat(self) -> Heartbeat:
        memory = None
        if self.device:
            # if the memory use cannot be read, the heartbeat is sent without it
            with contextlib.suppress(OSError, RuntimeError):
                memory = bytes_in_use(self.device)
        writing = any(writer.is_busy() for writer in self.writers)
        return self._now.model_copy(update={"writing": writing, "memory_bytes": memory})

    def _send_all(self) -> None:
        # An OSError means that the parent has ended. No error is reported then, because this
        # process ends, too.
        with contextlib.suppress(OSError):
            while True:
                self.send(self._heartbeat())
                if self._stopped.wait(_HEARTBEAT_SECONDS):
                    return


# --- threads that write files ---------------------------------------------------------------------

# Largest number of queued and running calls of a writer thread. If the disk is slow, the rank waits
# for the thread, instead of filling its memory with clips.
_MAX_WAITING = 2


class BoundedExecutor:
    """Thread that runs calls in order on the rank's device; at most two calls wait or run.

    An exception of a call is reported as the failure of the rank, and raised again by a later
    `submit` or `finish`.

    Args:
        name: Name of the thread.
        device: Device of the rank.
        reporter: Reporter that gets errors. Its heartbeats report whether a call is queued or
            running.
    """

    def __init__(self, name: str, device: torch.device, reporter: Reporter) -> None:
        self._thread = streams.single_thread_executor(name, device)
        self._waiting: list[Future[None]] = []
        self._reporter = reporter
        self._device = device
        self._stream = SideStream(device)
        reporter.writers.append(self)

    def submit(self, work: Callable[..., None], *arguments: object) -> None:
        """Queue a call for the thread; first wait while two earlier calls are queued or running.

        Args:
            work: Function to call in the thread, with `arguments`.
            arguments: Positional arguments of the call.

        Raises:
            BaseException: An earlier call has raised this exception.
        """
        while len(self._waiting) >= _MAX_WAITING:
            self._finish_first()
        self._waiting.append(self._thread.submit(self._reported, work, *arguments))

    def finish(self) -> None:
        """Wait for all queued calls; raise the exception of the first call that failed."""
        while self._waiting:
            self._finish_first()

    def is_busy(self) -> bool:
        """Whether a call of this thread is queued or running. This method is thread-safe."""
        return any(not future.done() for future in list(self._waiting))

    def _reported(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._reporter.report_failure(error)
            raise

    def _finish_first(self) -> None:
        # The call is removed only after it has ended, because `is_busy` counts running calls.
        self._waiting[0].result()
        self._waiting.pop(0)


class ClipWriter(BoundedExecutor):
    """Thread that writes the files of finished clips, one at a time, in the order of `put`.

    Args:
        reporter: Sender of a `ClipDone` for each written clip, and of an error for each clip that
            cannot be written.
        conditions: Conditions on which the clips' bits depend, such as torch's settings, for the
            clips' JSON; see `worker.device.conditions_of`.
        device: Device of the rank.
        tensor_store: Store of frames and sound for verification; None: nothing is kept.
        host: Name of the host for the clips' JSON; empty if the ranks were started without a
            launcher such as torchrun.
    """

    def __init__(
        self,
        reporter: Reporter,
        conditions: Mapping[str, Any],
        device: torch.device,
        tensor_store: TensorStore | None = None,
        *,
        host: str = "",
    ) -> None:
        super().__init__("clip-writer", device, reporter)
        self._conditions = conditions
        self._tensor_store = tensor_store
        self._host = host

    def put(
        self,
        job: ClipJob,
        packet: Packet,
        decoded: torch.Tensor | None = None,
        audio: Audio | None = None,
    ) -> None:
        """Queue a finished clip for writing to its file.

        The clip's tensors may be on the device, and may not be computed yet.

        Args:
            job: Request and metadata of the clip.
            packet: Packet of the clip after its last step.
            decoded: Frames, uint8 of shape (F, H, W, 3), RGB; None: the clip is not decoded, and
                its metadata contain only the latent's hash.
            audio: Sound of the clip; None: the model makes no sound.
        """
        self.submit(self._write_or_report, job, packet, decoded, audio, record_event(self._device))

    def _write_or_report(self, job: ClipJob, *clip: Any) -> None:
        begun = time.monotonic()
        try:
            metadata = self._write(job, *clip)
        except OutputError as error:
            self._reporter.report_clip_failure(job.clip, error)
            return
        seconds = time.monotonic() - begun
        self._reporter.send(ClipDone(clip=job.clip, metadata=metadata, write_seconds=seconds))

    def _write(
        self,
        job: ClipJob,
        packet: Packet,
        decoded: torch.Tensor | None,
        audio: Audio | None,
        ready: streams.Event,
    ) -> dict[str, Any]:
        frames: Frames | None = None
        if decoded is not None:
            frames = self._stream.to_host(decoded, ready).numpy()
        if audio is not None:
            audio = Audio(self._stream.to_host(audio.samples, ready), audio.rate)
        if self._tensor_store is not None and frames is not None:
            store_result(self._tensor_store, job.clip, frames, audio)
        latent = self._stream.to_host(packet.tensors[LATENTS], ready)
        metadata = {
            **job.metadata,
            "conditions": self._conditions,
            "latents_sha256": tensor_sha256(latent),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            **audio_hashes(audio),
            **_memory_pressure_fields(job, packet),
            "compute_seconds": round(packet.compute_seconds, 3),
            "wall_seconds": round(time.monotonic() - packet.begun_at, 3),
            "resumed_from_step": job.request.done_steps,
            **({"host": self._host} if self._host else {}),
        }
        output = job.request.output
        if output is not None and frames is not None:
            # The JSON is written last, because it marks the clip as complete, and contains the hash
            # of the video file.
            assert job.request.sampling is not None
            fps = job.request.sampling.fps
            sound = None if audio is None else (audio.samples.numpy(), audio.rate)
            sha256 = video.write_clip(frames, output, fps=fps, metadata=metadata, audio=sound)
            metadata = {**metadata, "file_sha256": sha256}
            output_files.write_json(Path(output.json_path), metadata)
        return metadata


def _memory_pressure_fields(job: ClipJob, packet: Packet) -> dict[str, Any]:
    """Return metadata that mark a clip for which GPU memory ran short; {} for other clips.

    A shortage of memory can change the bits; see `MemoryPressure`.
    """
    if not packet.memory_pressure:
        return {}
    is_exact = job.metadata.get("exact", True) is True
    return {"memory_pressure": True, **({"exact": "memory_pressure"} if is_exact else {})}


class LatentCheckpointWriter(BoundedExecutor):
    """Thread that writes latent checkpoints, from which clips can resume after an interruption.

    A failed write does not make the clip fail.

    Args:
        folder: Folder of the checkpoints.
        device: Device of the rank.
        reporter: Sender of `CheckpointLost`.
    """

    def __init__(self, folder: LatentCheckpoints, device: torch.device, reporter: Reporter) -> None:
        super().__init__("checkpoints", device, reporter)
        self.folder = folder
        self._has_failed = False

    def put(self, key: str, packet: Packet) -> None:
        """Queue a clip's packet, whose tensors must not change, for writing to a latent checkpoint.

        Args:
            key: Key of the clip, which is part of the file name.
            packet: Packet of the clip between two steps.
        """
        self.submit(self._save, key, packet, record_event(self._device))

    def _save(self, key: str, packet: Packet, ready: streams.Event) -> None:
        try:
            on_host = {
                name: self._stream.to_host(tensor, ready).contiguous()
                for name, tensor in packet.tensors.items()
            }
            stays = [name for name, tensor in packet.tensors.items() if tensor.is_cpu]
            self.folder.save(key, replace(packet, tensors=on_host), stays)
            self._has_failed = False
        except OutputError as error:
            if not self._has_failed:
                self._has_failed = True
                self._reporter.send(CheckpointLost(error=error_to_dict(error)))


# --- threads that read images ---------------------------------------------------------------------

#: Key of a prepared image: the input files and the sampling parameters on which the image depends.
_ImageKey = tuple[tuple[Any, ...], SamplingConfig | None]


class ImageReader:
    """Reader that prepares the images of coming clips, in threads.

    The reader prepares only one queued image at a time: the image that `take` will return next. It
    also prepares at most one image of a clip that has not been submitted yet.

    Args:
        prepare: Function that resizes and converts an image on the CPU, for a later encode on the
            rank's device. The reader's threads call it.
        device: Device of the rank, which becomes the current device of the threads.
    """

    def __init__(
        self, prepare: Callable[[ModelInput, SamplingConfig], PreparedInput], device: torch.device
    ) -> None:
        self._prepare = prepare
        self._upcoming: deque[tuple[int, ClipRequest, Future[PreparedInput] | None]] = deque()
        self._ahead: dict[int, Future[PreparedInput]] = {}
        self._thread = streams.single_thread_executor("images", device)
        # The reader keeps at most one image of a clip that has not been submitted yet. If that clip
        # is never submitted, the next image that is prepared early replaces it.
        self._early: dict[_ImageKey, Future[PreparedInput]] = {}
        self._early_thread = streams.single_thread_executor("early images", device)

    def enqueue(self, requests: Iterable[tuple[int, ClipRequest]]) -> None:
        """Queue clips (index, request) whose images `take` will return, in this order."""
        for clip, request in requests:
            self._upcoming.append((clip, request, self._early.pop(_image_key(request), None)))
        if not self._ahead:
            self._read_next()

    def prepare_early(self, request: ClipRequest, done: Callable[[float | None], object]) -> None:
        """Begin to prepare the image of a clip that has not been submitted yet.

        `enqueue` will get the clip later.

        Args:
            request: Request for the clip.
            done: Callback at the end of the preparation. It gets the seconds that the preparation
                took, or None if it failed; `take` then raises the error. Another thread calls it.
                If `close` cancels the preparation, it is not called.
        """

        def call_done(future: Future[PreparedInput]) -> None:
            if not future.cancelled():
                done(None if future.exception() else time.monotonic() - start)

        start = time.monotonic()
        future = self._early_thread.submit(self._read, request)
        self._early = {_image_key(request): future}
        future.add_done_callback(call_done)

    def take(self, clip: int) -> PreparedInput:
        """Return the prepared image of a clip, and begin to read the next clip's image.

        Args:
            clip: Next clip in the order of `enqueue`.

        Returns:
            Prepared image; an empty dict if the clip starts from text.

        Raises:
            InputError: The image file is missing or damaged, or has changed since the request was
                checked.
        """
        future = self._ahead.pop(clip)
        try:
            return future.result()
        finally:
            self._read_next()

    def close(self) -> None:
        """End the threads that prepare images."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._early_thread.shutdown(wait=False, cancel_futures=True)

    def _read_next(self) -> None:
        if self._upcoming:
            clip, request, early = self._upcoming.popleft()
            self._ahead[clip] = early or self._thread.submit(self._read, request)

    def _read(self, request: ClipRequest) -> PreparedInput:
        assert request.sampling is not None
        source = read_input(request, request.sampling)
        return {} if source is None else self._prepare(source, request.sampling)


def _image_key(request: ClipRequest) -> _ImageKey:
    return tuple(request.files.items()), request.sampling
