"""Writing a finished clip: hashes, file and JSON, in a thread beside the denoising."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svdpp.comm.streams import Mark, SideStream
from svdpp.errors import OutputError
from svdpp.media import output_files, video
from svdpp.models.base import Audio, Frames
from svdpp.worker.bounded_executor import BoundedExecutor
from svdpp.worker.messages import ClipDone, ClipJob
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import TensorStore, audio_hashes, tensor_sha256


@dataclass(frozen=True, kw_only=True)
class FinishedClip:
    """The result of one clip, on the device or the host.

    The clip's output says where files go. Latent, frames (F, H, W, 3, uint8; None: write none)
    and audio are complete behind `ready` in the device's queue. `begun_at` is the unix time at
    which the encode began; `compute_seconds` counts encode, steps and decode.
    """

    job: ClipJob
    latent: torch.Tensor
    frames: torch.Tensor | None
    ready: Mark
    begun_at: float
    memory_pressure: bool = False
    compute_seconds: float = 0.0
    audio: Audio | None = None


class ClipWriter(BoundedExecutor):
    """Writes clips one at a time, in the order of `put`.

    The rank's `reporter` is told from the thread. `fps` is for clips whose requests have no
    sampling parameters, `host` for each clip's JSON if a launcher has started the ranks.
    """

    def __init__(
        self,
        reporter: Reporter,
        conditions: Mapping[str, Any],
        device: torch.device,
        tensor_store: TensorStore | None = None,
        *,
        fps: int,
        host: str = "",
    ) -> None:
        super().__init__("clip-writer", device)
        self._reporter = reporter
        self._conditions = conditions
        self._tensor_store = tensor_store
        self._fps = fps
        self._host = host
        self._stream = SideStream(device)

    def put(self, finished: FinishedClip) -> Future[bool]:
        """Queues a clip, whose future says whether it was written; blocks while two are queued."""
        return self.submit(self._work, finished)

    def _work(self, finished: FinishedClip) -> bool:
        try:
            self._write(finished)
        except OutputError as error:
            self._reporter.clip_failed(finished.job.clip, error)
            return False
        except BaseException as error:
            self._reporter.failed(error)
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
        output = job.request.output
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
        self._reporter.send(ClipDone(clip=job.clip, metadata=metadata, write_seconds=seconds))

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
