"""The clips that are in the pipeline: their jobs, handles, progress and outcomes."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Literal

from svdpp.driver.clips import ClipHandle, ClipProgress, ClipResult
from svdpp.errors import ClosedError
from svdpp.plan.actions import Action
from svdpp.serve.clip_orders import ClipOrder
from svdpp.serve.job import Job
from svdpp.worker.messages import Event


@dataclass
class RunningClip:
    """One clip in the pipeline.

    Args:
        clip: its index in the pipeline.
        job: as it was taken from the queue.
        order: what the ranks got.
        handle: of the pipeline; None until it has the clip.
        moved_at: monotonic time of the latest change of its progress.
    """

    clip: int
    job: Job
    order: ClipOrder
    handle: ClipHandle | None = None
    moved_at: float = 0.0

    @property
    def progress(self) -> ClipProgress:
        """How far the ranks are; steps of an earlier run count."""
        if self.handle is not None:
            return self.handle.progress
        return ClipProgress(self.order.request.done_steps, self.job.sampling.num_inference_steps)

    @property
    def has_begun(self) -> bool:
        """Whether a rank works on it or has done so; until then it waits."""
        return self.progress.rank is not None


@dataclass(frozen=True)
class Outcome:
    """How a clip left the pipeline; `ended`: the pipeline ended before the clip did."""

    job_id: str
    kind: Literal["completed", "failed", "cancelled", "ended"]
    metadata: dict[str, Any]
    error: BaseException | None = None


class RunningClips:
    """The clips in the pipeline, by job and by index; `changed` is notified after each change.

    The engine's thread adds and removes clips. The pipeline's thread reports progress and outcomes.
    Any thread reads.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_job: dict[str, RunningClip] = {}
        self._by_clip: dict[int, RunningClip] = {}
        self._outcomes: deque[Outcome] = deque()
        self._stepped: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_job)

    @property
    def num_waiting(self) -> int:
        """How many of them no rank has begun."""
        return sum(not clip.has_begun for clip in self.all())

    def all(self) -> list[RunningClip]:
        """All of them, in the order in which the ranks take them."""
        with self._changed:
            return list(self._by_job.values())

    def get(self, job_id: str) -> RunningClip | None:
        """The clip of a job."""
        return self._by_job.get(job_id)

    def of_clip(self, clip: int | None) -> RunningClip | None:
        """The clip of an index."""
        return None if clip is None else self._by_clip.get(clip)

    def job_of(self, clip: int) -> str | None:
        """The id of the job of a clip's index."""
        found = self._by_clip.get(clip)
        return None if found is None else found.job.id

    def add(self, clip: RunningClip) -> None:
        """Adds a clip, before the ranks get it."""
        with self._changed:
            self._by_job[clip.job.id] = clip
            self._by_clip[clip.clip] = clip

    def remove(self, job_id: str) -> None:
        """Removes a clip once the queue knows its outcome."""
        with self._changed:
            clip = self._by_job.pop(job_id)
            del self._by_clip[clip.clip]
            self._changed.notify_all()

    def report(self, event: Event, action: Action | None) -> RunningClip | None:
        """The clip that the event is about, if any."""
        index = getattr(event, "clip", None if action is None else action.clip)
        return self.of_clip(index)

    def moved(self, job_id: str) -> None:
        """Notes that a clip's progress has changed."""
        if (clip := self.get(job_id)) is not None:
            clip.moved_at = time.monotonic()
            self._note_change(clip)

    def _note_change(self, clip: RunningClip) -> None:
        with self._changed:
            self._stepped.add(clip.job.id)
            self._changed.notify_all()

    def settle(self, job_id: str, handle: ClipHandle, *, run_has_ended: bool) -> None:
        """Notes the outcome of a handle that is done; does not wait."""
        outcome = _outcome(job_id, handle, run_has_ended=run_has_ended)
        with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def next_outcome(self) -> Outcome | None:
        """The oldest outcome that `forget_outcome` has not removed; None if there is none."""
        with self._changed:
            return self._outcomes[0] if self._outcomes else None

    def forget_outcome(self) -> None:
        """Removes the oldest outcome."""
        with self._changed:
            self._outcomes.popleft()

    @property
    def has_outcome(self) -> bool:
        """Whether there is an outcome."""
        return bool(self._outcomes)

    @property
    def has_stepped(self) -> bool:
        """Whether `take_stepped` has something to return."""
        return bool(self._stepped)

    def take_stepped(self) -> set[str]:
        """The jobs whose progress has changed since the last call."""
        with self._changed:
            stepped, self._stepped = self._stepped, set()
            return stepped


def _outcome(job_id: str, handle: ClipHandle, *, run_has_ended: bool) -> Outcome:
    try:
        if handle.cancelled():
            return Outcome(job_id, "cancelled", {})
        result: ClipResult = handle.result()  # the pipeline keeps results that nobody takes
        return Outcome(job_id, "completed", result.metadata)
    except CancelledError:
        return Outcome(job_id, "cancelled", {})
    except BaseException as error:
        has_ended = run_has_ended or isinstance(error, ClosedError)
        return Outcome(job_id, "ended" if has_ended else "failed", {}, error)
