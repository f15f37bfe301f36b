"""Owns the removal of files that clips leave behind: latent checkpoints, half-written outputs."""

from __future__ import annotations

import contextlib
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
        # Of the latest clips: what was asked for, and whether the clip was finished.
        self._recent: deque[tuple[ClipRequest, bool]] = deque(maxlen=_NUM_RECENT)

    def settled(self, request: ClipRequest, *, is_finished: bool) -> None:
        """Removes the checkpoints of a finished clip; those of a lost one stay, to resume it."""
        if request.output is not None or request.latents_key is not None:
            self._recent.append((request, is_finished))
        if is_finished:
            self._prune(request)

    def remove(self, unfinished: Iterable[ClipRequest]) -> None:
        """Removes what the ranks, which have ended, left half written or wrote too late.

        Args:
            unfinished: requests of the clips that were neither finished nor lost.
        """
        for request, is_finished in self._recent:
            if is_finished:
                self._prune(request)
        requests = [*(request for request, _ in self._recent), *unfinished]
        folders = {Path(each.output.path).parent for each in requests if each.output}
        if self._latents_folder is not None:
            folders.add(self._latents_folder)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # nothing was written where none can be
                output_files.remove_abandoned(folder)

    def _prune(self, request: ClipRequest) -> None:
        if self._latents_folder is not None and request.latents_key is not None:
            prune(self._latents_folder, request.latents_key)
