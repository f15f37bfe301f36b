"""Writing a finished clip: hashes, file and JSON, in a thread beside the denoising."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from svdpp.comm.streams import Mark, SideStream
from svdpp.config import OutputConfig
from svdpp.errors import OutputError
from svdpp.media import output_files, video
from svdpp.models.base import Audio, Frames
from svdpp.worker.bounded_executor import BoundedExecutor
from svdpp.worker.messages import ClipDone, ClipJob
from svdpp.worker.tensor_store import TensorStore, audio_hashes, tensor_sha256


@dataclass(frozen=True, kw_only=True)
class FinishedClip:
    """The result of one clip, on the device or the host.

    Args:
        job: the clip; its output says where files go.
        latent: the final latent.
        frames: (F, H, W, 3) uint8; None if there are none to write.
        audio: None if the clip has no sound.
        ready: the point in the device's queue after which latent and frames are complete.
        begun_at: unix time in seconds at which the clip's encode began.
        memory_pressure: see `Packet`.
        compute_seconds: the ranks' computing time for this clip: encode, steps and decode.
    """

    job: ClipJob
    latent: torch.Tensor
    frames: torch.Tensor | None
    ready: Mark
    begun_at: float
    memory_pressure: bool = False
    compute_seconds: float = 0.0
    audio: Audio | None = None


@dataclass(frozen=True, kw_only=True)
class WriterEvents:
    """The callbacks of a clip writer; its thread calls them.

    Args:
        done: takes a clip that is completely written.
        lost: takes a clip that could not be written, and the error.
        failed: takes any other error.
    """

    done: Callable[[ClipDone], None]
    lost: Callable[[int, BaseException], None]
    failed: Callable[[BaseException], None]


class ClipWriter:
    """Writes clips one at a time, in the order of `put`.

    Args:
        events: called from the writer's thread.
        conditions: what the bits depend on besides the request, for each clip's metadata.
        device: of the rank.
        tensor_store: keeps frames for verification; None keeps none.
        fps: of the files whose requests have no sampling parameters, in frames per second.
        host: this host's name if the run spans several hosts, for each clip's JSON.
        folder: where this host writes its clips; None: where the requests say.
    """

    def __init__(
        self,
        events: WriterEvents,
        conditions: Mapping[str, Any],
        device: torch.device,
        tensor_store: TensorStore | None = None,
        *,
        fps: int,
        host: str = "",
        folder: Path | None = None,
    ) -> None:
        self._events = events
        self._conditions = conditions
        self._tensor_store = tensor_store
        self._fps = fps
        self._host = host
        self._folder = folder
        self._stream = SideStream(device)
        self._executor = BoundedExecutor(self._work, "clip-writer", device)

    def put(self, finished: FinishedClip) -> Future[bool]:
        """Queues a finished clip; blocks while two others are queued.

        Returns:
            A future: whether the clip was written.
        """
        return self._executor.put(finished)

    def finish(self) -> None:
        """Waits until every queued clip is written or lost."""
        self._executor.finish()

    def is_busy(self) -> bool:
        """Whether a clip is still to be written; any thread may ask."""
        return self._executor.is_busy()

    def _work(self, finished: FinishedClip) -> bool:
        try:
            self._write(finished)
        except OutputError as error:
            self._events.lost(finished.job.clip, error)
            return False
        except BaseException as error:
            self._events.failed(error)
            raise
        return True

    def _write(self, finished: FinishedClip) -> None:
        begun = time.monotonic()
        job, frames = finished.job, self._frames_on_host(finished)
        audio = self._audio_on_host(finished)
        if self._tensor_store is not None and frames is not None:
            self._tensor_store.keep_frames(job.clip, frames)
            self._tensor_store.keep_audio(job.clip, audio)
        latent = self._stream.to_host(finished.latent, finished.ready)
        metadata = {
            **job.metadata,
            "conditions": self._conditions,
            "latents_sha256": tensor_sha256(latent),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            **audio_hashes(audio),
            **({"memory_pressure": True} if finished.memory_pressure else {}),
            "compute_seconds": round(finished.compute_seconds, 3),
            "wall_seconds": round(time.time() - finished.begun_at, 3),
            "resumed_from_step": job.request.done_steps,
            **({"host": self._host} if self._host else {}),
        }
        output = self._on_this_host(job.request.output)
        if output is not None and frames is not None:
            # The JSON marks the clip as complete, so it is written last. Only the JSON can hold
            # the hash of the video file.
            sampling = job.request.sampling
            fps = self._fps if sampling is None else sampling.fps
            sound = None if audio is None else (audio.samples.numpy(), audio.rate)
            sha256 = video.write_clip(frames, output, fps=fps, metadata=metadata, sound=sound)
            metadata = {**metadata, "file_sha256": sha256}
            output_files.write_json(Path(output.json_path), metadata)
        seconds = time.monotonic() - begun
        self._events.done(ClipDone(clip=job.clip, metadata=metadata, write_seconds=seconds))

    def _frames_on_host(self, finished: FinishedClip) -> Frames | None:
        if finished.frames is None:
            return None
        frames: Frames = self._stream.to_host(finished.frames, finished.ready).numpy()
        return frames

    def _audio_on_host(self, finished: FinishedClip) -> Audio | None:
        if finished.audio is None:
            return None
        samples = self._stream.to_host(finished.audio.samples, finished.ready)
        return Audio(samples, finished.audio.rate)

    def _on_this_host(self, output: OutputConfig | None) -> OutputConfig | None:
        """`output` in this host's folder, if the host has one."""
        if output is None or self._folder is None:
            return output
        return replace(output, path=str(self._folder / Path(output.path).name))
