"""What the parent does when a rank reports on a clip, and which files it removes afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.clips import OpenClips
from svdpp.errors import InputError, error_from_dict
from svdpp.launch.connections import FILE
from svdpp.media import output_files
from svdpp.media.image import read_bytes
from svdpp.plan.actions import Action, Kind
from svdpp.worker.latent_checkpoints import prune
from svdpp.worker.messages import (
    Cancel,
    ClipDone,
    ClipDropped,
    ClipFailed,
    Event,
    Heartbeat,
    PhotoWanted,
    StepDone,
    StoredTensor,
)
from svdpp.worker.tensor_store import TensorStore

# At most three checkpoints of a rank are queued, so older clips get no more of them.
_NUM_RECENT = 1000


class ClipEvents:
    """An observer that finishes clips; one thread calls it."""

    def __init__(
        self,
        clips: OpenClips,
        files: LeftoverFiles,
        config: PipelineConfig,
        *,
        tensor_folder: str | None,
        send: Callable[[int, bytes], None],
    ) -> None:
        self._clips = clips
        self._files = files
        self._tensor_folder = tensor_folder
        self._config = config
        self._send = send

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        match event:
            case StoredTensor():
                assert self._tensor_folder is not None
                TensorStore(Path(self._tensor_folder)).put(event.name, event.data)
            case PhotoWanted():
                self._send(rank, FILE + self._image_bytes(event.clip))
            case Heartbeat(action=Action(kind=Kind.ENCODE | Kind.LOAD, clip=clip)):
                self._clips.advance(clip, rank)
            case StepDone():
                self._clips.advance(event.clip, rank, event.step + 1)
            case ClipDone():
                self._finish(event)
            case ClipDropped():
                self._drop(event.clip)
            case ClipFailed():
                request = self._clips.request(event.clip)
                if request is not None:
                    self._files.settled(request, is_finished=False)
                    self._clips.lose(event.clip, error_from_dict(event.error))
            case _:
                pass

    def cancel(self, clip: int) -> None:
        """Tells all ranks to skip what is left of `clip`; any thread may call it."""
        for rank in range(self._config.world_size):
            self._send(rank, Cancel(clip=clip).to_bytes())

    def _finish(self, done: ClipDone) -> None:
        request = self._clips.request(done.clip)
        if request is None:  # already lost, or cancelled
            self._drop(done.clip)
            return
        self._files.settled(request, is_finished=True)
        self._clips.finish(done.clip, done.metadata)

    def _drop(self, clip: int) -> None:
        request = self._clips.drop(clip)
        if request is not None:
            self._files.settled(request, is_finished=True)

    def _image_bytes(self, clip: int) -> bytes:
        """The image of `clip`, for a rank on another host; empty if it can no longer be read."""
        request = self._clips.request(clip)
        if request is None or request.image is None:
            return b""
        try:
            return read_bytes(Path(request.image))
        except InputError:
            return b""


class LeftoverFiles:
    """Removes the leftover files of a pipeline's clips; uses bounded memory."""

    def __init__(self, latents_folder: str | None) -> None:
        self._latents_folder = None if latents_folder is None else Path(latents_folder)
        # Of the latest clips: the request, and whether the clip was finished.
        self._recent: deque[tuple[ClipRequest, bool]] = deque(maxlen=_NUM_RECENT)

    def settled(self, request: ClipRequest, *, is_finished: bool) -> None:
        """Removes the checkpoints of a finished clip; keeps those of a lost one, to resume it."""
        if request.output is not None or request.latents_key is not None:
            self._recent.append((request, is_finished))
        if is_finished:
            self._prune(request)

    def remove(self, unfinished: Iterable[ClipRequest]) -> None:
        """Removes partly written and late files, after all ranks have ended."""
        for request, is_finished in self._recent:
            if is_finished:
                self._prune(request)
        requests = [*(request for request, _ in self._recent), *unfinished]
        folders = {Path(each.output.path).parent for each in requests if each.output}
        if self._latents_folder is not None:
            folders.add(self._latents_folder)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # a folder that cannot be used has none
                output_files.remove_abandoned(folder)

    def _prune(self, request: ClipRequest) -> None:
        if self._latents_folder is not None and request.latents_key is not None:
            prune(self._latents_folder, request.latents_key)
