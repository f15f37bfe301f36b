"""Files that a pipeline's clips leave behind: latent checkpoints, and partly written outputs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from svdpp.config import ClipRequest
from svdpp.media import output_files
from svdpp.worker.latent_checkpoints import prune

# At most three checkpoints of a rank are queued, so older clips get no more of them.
_NUM_RECENT = 1000


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
        folders = {Path(request.output.path).parent for request in requests if request.output}
        if self._latents_folder is not None:
            folders.add(self._latents_folder)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # a folder that cannot be used has none
                output_files.remove_abandoned(folder)

    def _prune(self, request: ClipRequest) -> None:
        if self._latents_folder is not None and request.latents_key is not None:
            prune(self._latents_folder, request.latents_key)
