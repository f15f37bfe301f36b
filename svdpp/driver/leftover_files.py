"""Owns the removal of files that clips leave behind: latent checkpoints, half-written outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from svdpp.config import ClipRequest
from svdpp.media import output_files
from svdpp.worker.latent_checkpoints import prune

# A rank writes at most three checkpoints late, so none of an older clip is still to come.
_NUM_RECENT = 1000


class LeftoverFiles:
    """Follows the clips of a pipeline, in bounded memory.

    Args:
        latents_folder: of the latent checkpoints; None: there are none.
    """

    def __init__(self, latents_folder: str | None) -> None:
        self._latents_folder = None if latents_folder is None else Path(latents_folder)
        self._finished: deque[ClipRequest] = deque(maxlen=_NUM_RECENT)
        self._lost: deque[ClipRequest] = deque(maxlen=_NUM_RECENT)

    def finished(self, request: ClipRequest) -> None:
        """Removes the checkpoints of a finished clip."""
        if request.output is not None or request.latents_key is not None:
            self._finished.append(request)
        self._prune(request)

    def lost(self, request: ClipRequest) -> None:
        """Notes a lost clip; its checkpoints stay, for a run that resumes it."""
        if request.output is not None:
            self._lost.append(request)

    def remove(self, unfinished: Iterable[ClipRequest]) -> None:
        """Removes what the ranks, which have ended, left half written or wrote too late.

        Args:
            unfinished: requests of the clips that were neither finished nor lost.
        """
        for request in self._finished:
            self._prune(request)
        requests = (*self._finished, *self._lost, *unfinished)
        folders = {Path(each.output.path).parent for each in requests if each.output}
        if self._latents_folder is not None:
            folders.add(self._latents_folder)
        for folder in folders:
            output_files.remove_abandoned(folder)

    def _prune(self, request: ClipRequest) -> None:
        if self._latents_folder is not None and request.latents_key is not None:
            prune(self._latents_folder, request.latents_key)
