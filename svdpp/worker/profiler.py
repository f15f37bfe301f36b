"""The profile of one clip on one rank by torch.profiler, down to its kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind

#: The only rank that is on the parent's machine even under torchrun.
PROFILED_RANK = 0


class ClipProfiler:
    """Profiles this rank's compute actions of one clip, and writes the trace.

    It takes the second clip that the rank denoises, because the first meets cold caches; the first
    if there is only one. The profiler slows this clip down.
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
        """Chooses the clip among the coming actions; only the first choice counts."""
        clips = list(dict.fromkeys(a.clip for a in actions if a.kind is Kind.DENOISE))
        if self._first is None and clips:
            chosen = clips[min(1, len(clips) - 1)]
            compute = [action for action in actions if action.clip == chosen and action.is_compute]
            self._first, self._last = compute[0], compute[-1]

    @contextlib.contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Profiles from the start of the clip's first action to the end of its last."""
        if action == self._first:
            self._profile.start()
        yield
        if action == self._last:
            self._profile.stop()
            with output_files.atomic_output(str(self._path), ".json") as temporary:
                self._profile.export_chrome_trace(str(temporary))
