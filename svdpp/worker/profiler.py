"""Owns looking at one clip's work on one rank with torch.profiler, down to its kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind

#: The rank that is looked at: the only one that under torchrun is surely on the parent's machine.
PROFILED_RANK = 0


class ClipProfiler:
    """Profiles this rank's compute actions of one clip, and writes what it saw.

    The clip is the second one that the rank denoises, since the first meets cold caches; the first
    where there is no other. It is slowed down by being looked at.

    Args:
        path: of the trace, Chrome's format as torch.profiler writes it; replaced.
        device: of the rank.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._first: Action | None = None
        self._last: Action | None = None

    def expect(self, actions: Sequence[Action]) -> None:
        """Chooses among the actions to come; once, later ones change nothing."""
        clips = list(dict.fromkeys(a.clip for a in actions if a.kind is Kind.DENOISE))
        if self._first is None and clips:
            chosen = clips[min(1, len(clips) - 1)]
            compute = [action for action in actions if action.clip == chosen and action.is_compute]
            self._first, self._last = compute[0], compute[-1]

    @contextlib.contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Looks on from the clip's first action to the end of its last.

        Raises:
            OutputError: the trace cannot be written.
        """
        if action == self._first:
            self._profile.start()
        yield
        if action == self._last:
            self._profile.stop()
            with output_files.atomic_output(str(self._path), ".json") as temporary:
                self._profile.export_chrome_trace(str(temporary))
