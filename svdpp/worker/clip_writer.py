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
    """What came out for one clip.

    Args:
        job: the clip; its output says where files go.
        latent: final.
        frames: None where there are none to write.
        begun_at: unix time in seconds at which the clip's encode began.
        compute_seconds: that ranks have computed for it, in encode, steps and decode.
        is_draft: whether the exact clip may still follow.
        replaces: the draft that is removed once this clip is in its place.
    """

    job: ClipJob
    latent: torch.Tensor
    frames: Frames | None
    begun_at: float
    compute_seconds: float = 0.0
    is_draft: bool = False
    replaces: OutputConfig | None = None


class ClipWriter:
    """Finishes clips in the order in which they are given, one at a time.

    Args:
        on_done: called from the thread when a clip is whole and in its place.
        on_lost: called from the thread with a clip that could not be written, and why.
        on_draft_lost: the same with an approximation alone, whose clip may still come.
        on_failed: called from the thread with whatever else went wrong, since nobody may come back
            to ask.
        conditions: what the bits depend on beside the request, for each clip's record.
        fps: of the files, in frames a second.
        tensor store: where results are kept for comparison as well; None to keep nothing.
        host: this host's name, where a run is on several; each clip's JSON then says it.
        folder: where this host puts its clips; None: where the requests say.
    """

    def __init__(
        self,
        on_done: Callable[[ClipDone | DraftDone], None],
        on_lost: Callable[[int, BaseException], None],
        on_draft_lost: Callable[[int, BaseException], None],
        on_failed: Callable[[BaseException], None],
        conditions: Mapping[str, Any],
        tensor_store: TensorStore | None = None,
        *,
        fps: int,
        host: str = "",
        folder: Path | None = None,
    ) -> None:
        self._fps = fps
        self._host = host
        self._folder = folder
        self._on_done = on_done
        self._on_lost = on_lost
        self._on_draft_lost = on_draft_lost
        self._on_failed = on_failed
        self._conditions = conditions
        self._tensor_store = tensor_store
        self._executor = BoundedExecutor(self._work, "delivery")
        self._drafts: set[str] = set()

    def put(self, finished: FinishedClip) -> Future[bool]:
        """Takes a finished clip; blocks while two others wait.

        Returns:
            Whether it is in its place, as soon as that is known.
        """
        return self._executor.put(finished)

    def finish(self) -> None:
        """Waits until everything given is in its place, or lost."""
        self._executor.finish()

    def is_busy(self) -> bool:
        """Whether something given is not yet in its place, or lost; for any thread to ask."""
        return self._executor.is_busy()

    def _work(self, finished: FinishedClip) -> bool:
        try:
            self._finish_clip(finished)
        except OutputError as error:
            is_exact = finished.job.record.get("exact", True)
            (self._on_lost if is_exact else self._on_draft_lost)(finished.job.clip, error)
            return False
        except BaseException as error:
            self._on_failed(error)
            raise
        return True

    def _finish_clip(self, finished: FinishedClip) -> None:
        job, frames = finished.job, finished.frames
        if self._tensor_store is not None and frames is not None:
            self._tensor_store.keep_frames(job.clip, frames)
        record = {
            **job.record,
            "conditions": self._conditions,
            "latents_sha256": tensor_sha256(finished.latent),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            "compute_seconds": round(finished.compute_seconds, 3),
            "wall_seconds": round(time.time() - finished.begun_at, 3),
            "resumed_from_step": job.request.done_steps,
            **({"host": self._host} if self._host else {}),
        }
        output = self._here(job.request.output)
        if output is not None and frames is not None:
            # The JSON says that the clip is whole, so it comes second. It alone holds the file's
            # own hash, which the file cannot.
            sha256 = video.write_clip(frames, output, fps=self._fps, metadata=record)
            record = {**record, "file_sha256": sha256}
            if finished.is_draft:
                self._drafts.add(output.path)
            output_files.write_json(Path(output.json_path), record)
            self._remove_draft(self._here(finished.replaces))
        done = DraftDone if finished.is_draft else ClipDone
        self._on_done(done(clip=job.clip, record=record))

    def _remove_draft(self, draft: OutputConfig | None) -> None:
        """Removes an approximation of this run's or an earlier one's; nothing else of that name."""
        if draft is None or not (draft.path in self._drafts or read_draft(draft)):
            return
        self._drafts.discard(draft.path)
        with contextlib.suppress(OutputError):  # a folder that holds somebody else's files
            video.check_output(draft)
            output_files.remove(Path(draft.path))
            output_files.remove(Path(draft.json_path))

    def _here(self, output: OutputConfig | None) -> OutputConfig | None:
        """`output` in this host's own folder, where it has one."""
        if output is None or self._folder is None:
            return output
        return replace(output, path=str(self._folder / Path(output.path).name))
