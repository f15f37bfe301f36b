"""Owns finishing a clip: hashes, file and JSON, in a thread beside the denoising."""

from __future__ import annotations

import contextlib
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
from svdpp.models.base import Frames
from svdpp.worker.bounded_executor import BoundedExecutor
from svdpp.worker.clip_metadata import read_draft
from svdpp.worker.messages import ClipDone, ClipJob, DraftDone
from svdpp.worker.tensor_store import TensorStore, tensor_sha256


@dataclass(frozen=True, kw_only=True)
class FinishedClip:
    """The result of one clip, on the device or the host.

    Args:
        job: the clip; its output says where files go.
        latent: final.
        frames: (F, H, W, 3) uint8; None if there are none to write.
        ready: behind which both are complete.
        begun_at: unix time in seconds at which the clip's encode began.
        memory_pressure: see `Packet`.
        is_draft: the exact clip follows.
        replaces: the draft that is removed when this clip is in place.
        compute_seconds: that ranks have computed for it, in encode, steps and decode.
        is_draft: whether the exact clip may still follow.
        replaces: the draft that is removed once this clip is in its place.
    """

    job: ClipJob
    latent: torch.Tensor
    frames: torch.Tensor | None
    ready: Mark
    begun_at: float
    memory_pressure: bool = False
    compute_seconds: float = 0.0
    is_draft: bool = False
    replaces: OutputConfig | None = None


@dataclass(frozen=True, kw_only=True)
class WriterEvents:
    """What the writer's thread calls.

    Args:
        done: with a clip that is whole and in place.
        lost: with a clip that could not be written, and why.
        draft_lost: with a draft that could not be written; its clip may still come.
        failed: with any other error.
    """

    done: Callable[[ClipDone | DraftDone], None]
    lost: Callable[[int, BaseException], None]
    draft_lost: Callable[[int, BaseException], None]
    failed: Callable[[BaseException], None]


class ClipWriter:
    """Writes clips in the order in which they are given, one at a time.

    Args:
        events: called from the thread.
        conditions: what the bits depend on beside the request, for each clip's metadata.
        device: of the rank.
        tensor_store: where frames are kept for verification; None keeps none.
        fps: of the files, in frames a second.
        host: this host's name in a run on several, for each clip's JSON.
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
        self._drafts: set[str] = set()

    def put(self, finished: FinishedClip) -> Future[bool]:
        """Takes a finished clip; blocks while two others wait.

        Returns:
            Whether it is in place, as soon as that is known.
        """
        return self._executor.put(finished)

    def finish(self) -> None:
        """Waits until every clip given is in place, or lost."""
        self._executor.finish()

    def is_busy(self) -> bool:
        """Whether a clip given is neither in place nor lost; for any thread."""
        return self._executor.is_busy()

    def _work(self, finished: FinishedClip) -> bool:
        try:
            self._write(finished)
        except OutputError as error:
            is_exact = finished.job.metadata.get("exact", True)
            lost = self._events.lost if is_exact else self._events.draft_lost
            lost(finished.job.clip, error)
            return False
        except BaseException as error:
            self._events.failed(error)
            raise
        return True

    def _write(self, finished: FinishedClip) -> None:
        job, frames = finished.job, self._frames_on_host(finished)
        if self._tensor_store is not None and frames is not None:
            self._tensor_store.keep_frames(job.clip, frames)
        latent = self._stream.to_host(finished.latent.contiguous(), finished.ready)
        metadata = {
            **job.metadata,
            "conditions": self._conditions,
            "latents_sha256": tensor_sha256(latent),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            "seconds": round(time.time() - finished.begun_at, 3),
            **({"memory_pressure": True} if finished.memory_pressure else {}),
            "compute_seconds": round(finished.compute_seconds, 3),
            "wall_seconds": round(time.time() - finished.begun_at, 3),
            "resumed_from_step": job.request.done_steps,
            **({"host": self._host} if self._host else {}),
        }
        output = self._on_this_host(job.request.output)
        if output is not None and frames is not None:
            # The JSON says that the clip is whole, so it comes second. It alone holds the file's
            # own hash, which the file cannot.
            sha256 = video.write_clip(frames, output, fps=self._fps, metadata=metadata)
            metadata = {**metadata, "file_sha256": sha256}
            if finished.is_draft:
                self._drafts.add(output.path)
            output_files.write_json(Path(output.json_path), metadata)
            self._remove_draft(self._on_this_host(finished.replaces))
        done = DraftDone if finished.is_draft else ClipDone
        self._events.done(done(clip=job.clip, metadata=metadata))

    def _frames_on_host(self, finished: FinishedClip) -> Frames | None:
        if finished.frames is None:
            return None
        frames: Frames = self._stream.to_host(finished.frames, finished.ready).numpy()
        return frames

    def _remove_draft(self, draft: OutputConfig | None) -> None:
        """Removes a draft of this run or an earlier one, and no other file of that name."""
        if draft is None or not (draft.path in self._drafts or read_draft(draft)):
            return
        self._drafts.discard(draft.path)
        with contextlib.suppress(OutputError):  # a folder that holds somebody else's files
            video.check_output(draft)
            output_files.remove(Path(draft.path))
            output_files.remove(Path(draft.json_path))

    def _on_this_host(self, output: OutputConfig | None) -> OutputConfig | None:
        """`output` in this host's own folder, if it has one."""
        if output is None or self._folder is None:
            return output
        return replace(output, path=str(self._folder / Path(output.path).name))
