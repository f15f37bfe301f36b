"""Submitted clips: handles for the caller, progress, results, and the tracker of all clips."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest
from svdpp.driver.file_thread import FileThread
from svdpp.errors import RequestError, SvdppError, error_from_dict, reraisable
from svdpp.media import output_files, video
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import (
    Cancel,
    ClipDone,
    ClipDropped,
    ClipFailed,
    Event,
    Heartbeat,
    StepDone,
    StoredTensor,
)
from svdpp.worker.tensor_files import TensorStore, remove_checkpoints


@dataclass(frozen=True)
class ClipResult:
    """Result of a finished clip."""

    clip: int
    request: ClipRequest
    metadata: dict[str, Any]
    owner: object = field(default=None, repr=False, compare=False)
    """Owner of the temporary folder with the clip's file. The folder is removed when no result
    refers to the owner any more. None: the folder is not temporary."""

    @property
    def path(self) -> Path | None:
        """Path of the clip's file, or of the folder of frames; None: the request has no output."""
        return None if self.request.output is None else Path(self.request.output.path)

    @property
    def frames(self) -> video.Frames:
        """Frames of the clip's file, uint8 of shape (F, H, W, 3). Each access reads the file again.

        The format `frames` has the exact pixels; the other formats compress the pixels.

        Raises:
            RequestError: The clip has no file.
            InputError: The file is missing or damaged.
        """
        output = self.request.output
        if output is None:
            raise RequestError("the clip has no file", "give the clip's request an `output`")
        return video.read_frames(Path(output.path), output.format)


@dataclass(frozen=True)
class ClipFailure:
    """Clip that failed, for example because of a damaged image. The run continues."""

    clip: int
    request: ClipRequest
    error: SvdppError


@dataclass(frozen=True)
class ClipProgress:
    """Progress of a clip: number of finished steps, number of steps, and rank that reported last.

    The rank is None until a rank has begun the clip.
    """

    steps_done: int
    num_steps: int
    rank: int | None = None


class ClipHandle(Future[ClipResult]):
    """Handle of one submitted clip: a `concurrent.futures.Future` of its `ClipResult`.

    `asyncio.wrap_future(handle)` makes it awaitable.
    """

    def __init__(self, clip: int, request: ClipRequest, num_steps: int, owner: ClipTracker) -> None:
        super().__init__()
        self.clip = clip
        self.request = request
        self.progress = ClipProgress(request.done_steps, num_steps)
        """Progress of the clip, which changes while the clip is made."""
        self._owner = owner
        self._progress_callbacks: list[Callable[[ClipHandle], object]] = []

    def running(self) -> bool:
        """Whether a rank has begun the clip, and the clip is neither finished nor failed."""
        return self.progress.rank is not None and not self.done()

    def add_progress_callback(self, callback: Callable[[ClipHandle], object]) -> None:
        """Register a callback, which gets this handle each time `progress` changes.

        Args:
            callback: Function that must be quick and raise no exception. The pipeline's thread
                calls it. If a rank has already begun the clip, this method also calls it at once.
        """
        self._progress_callbacks.append(callback)
        if self.progress.rank is not None:
            callback(self)

    def _update_progress(self, steps_done: int, rank: int) -> None:
        progress = replace(self.progress, steps_done=steps_done, rank=rank)
        # The events of two ranks can arrive out of order. A late event with fewer finished steps is
        # ignored, so that progress never goes back.
        if progress != self.progress and steps_done >= self.progress.steps_done:
            self.progress = progress
            for callback in self._progress_callbacks:
                callback(self)

    def cancel(self) -> bool:
        """Ask the ranks to skip the clip from the next step on.

        A clip that no rank has begun is cancelled immediately. Otherwise the clip is cancelled when
        all ranks have dropped it; a clip that finishes before that stays finished. `result` and
        `exception` wait for the outcome, and raise `concurrent.futures.CancelledError` for a
        cancelled clip.

        Returns:
            True if the clip is cancelled or the ranks were asked to drop it; False if it is
            finished or has failed.
        """
        return self._owner.cancel(self)

    def result(self, timeout: float | None = None) -> ClipResult:
        """Wait for the clip and return its result, which `Pipeline.results` then does not yield.

        Args:
            timeout: Seconds to wait; None: no limit.

        Raises:
            SvdppError: The clip failed, or the run has ended before the clip was finished.
            TimeoutError: The clip is not finished in time.
            CancelledError: The clip was cancelled.
            RuntimeError: The calling thread is the pipeline's own thread.
        """
        self._owner.check_may_wait(self)
        result = super().result(timeout)
        self._owner.forget_result(self)
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the clip and return the error that `result` would raise, or None.

        Args:
            timeout: Seconds to wait; None: no limit.

        Raises:
            TimeoutError: The clip is not finished in time.
            CancelledError: The clip was cancelled.
            RuntimeError: The calling thread is the pipeline's own thread.
        """
        self._owner.check_may_wait(self)
        return super().exception(timeout)


# Number of recently ended clips whose latent checkpoints are removed once more at the end of the
# run. A rank writes checkpoints in the background, so a checkpoint may appear after its clip has
# ended. A rank queues at most three checkpoints, so such a late checkpoint never belongs to an
# older clip.
_NUM_RECENT = 1000
_CLEAN_UP_SECONDS = 20.0


class ClipTracker:
    """Tracker of clips, which keeps the handle of a clip until a caller takes the result.

    The pipeline's thread calls the tracker with each event of a rank. In this call, the handles of
    ended clips get their results. Any thread may add clips and wait for clips.

    Args:
        send_to_all: Function that sends a message to every rank. The tracker uses this function to
            cancel clips.
        latents_folder: Folder of latent checkpoints. When a clip is finished, the tracker removes
            the clip's checkpoints. None: there are no checkpoints.
        tensor_folder: Folder for tensors from ranks on other hosts, for verification; None: ranks
            send no tensors.
        max_failures: Number of the latest failed clips that `failures` keeps; None: all failed
            clips.
    """

    def __init__(
        self,
        send_to_all: Callable[[bytes], None],
        *,
        latents_folder: str | None = None,
        tensor_folder: str | None = None,
        max_failures: int | None = None,
    ) -> None:
        self._send_to_all = send_to_all
        self._latents_folder = None if latents_folder is None else Path(latents_folder)
        # Recently ended clips, each as (request, whether an error ended the clip). A rank may have
        # left incomplete files of these clips, or may have written a checkpoint after the clip
        # ended. `clean_up` removes these files.
        self._recent: deque[tuple[ClipRequest, bool]] = deque(maxlen=_NUM_RECENT)
        self._tensor_folder = tensor_folder
        self._changed = threading.Condition()
        self.num_added = 0
        """Number of added clips, which is the index of the next clip."""
        self.finisher: threading.Thread | None = None
        """Pipeline's thread, which sets the results of clips. If this thread itself tries to wait
        for a clip, a `RuntimeError` is raised."""
        self._open: dict[int, ClipHandle] = {}
        # Clips that `results` still has to yield: indices of unfinished clips, and handles of
        # finished clips.
        self._awaited: set[int] = set()
        self._finished: dict[int, ClipHandle] = {}
        # Requests of cancelled clips that the ranks have not dropped yet, by clip index.
        self._cancelled: dict[int, ClipRequest] = {}
        # A separate thread lists and removes files, because a network folder may block it.
        self._files = FileThread("checkpoints")
        self._end: BaseException | None = None
        self._unfinished: list[ClipHandle] = []
        self._failures: deque[ClipFailure] = deque(maxlen=max_failures)

    @property
    def is_idle(self) -> bool:
        """Whether every clip is finished, failed or cancelled."""
        return not self._open

    @property
    def failures(self) -> list[ClipFailure]:
        """Failed clips, in the order of their failures."""
        with self._changed:
            return list(self._failures)

    def check_may_wait(self, handle: ClipHandle | None = None) -> None:
        """Raise a `RuntimeError` if the pipeline's own thread is about to wait for a clip.

        Only this thread sets the results of clips, so it would wait for itself forever.

        Args:
            handle: Handle of the clip to wait for. No error is raised if this clip is done already.
                None: the caller waits for any clip.

        Raises:
            RuntimeError: The calling thread is the pipeline's own thread.
        """
        if threading.current_thread() is self.finisher and not (handle and handle.done()):
            raise RuntimeError(
                "observers and callbacks must not wait for the pipeline: they run in the thread "
                "that finishes clips"
            )

    def add(
        self, requests: Sequence[ClipRequest], num_steps: Sequence[int], *, for_results: bool
    ) -> list[ClipHandle]:
        """Register submitted clips under the next indices, and return their handles.

        Args:
            requests: Requests of the clips.
            num_steps: Number of steps of each clip.
            for_results: Whether `results` yields these clips.

        Raises:
            SvdppError: The run has ended with this error.
        """
        with self._changed:
            if self._end is not None:
                raise reraisable(self._end)
            pairs = enumerate(zip(requests, num_steps, strict=True), self.num_added)
            handles = [ClipHandle(clip, request, steps, self) for clip, (request, steps) in pairs]
            self.num_added += len(handles)
            self._open.update((handle.clip, handle) for handle in handles)
            if for_results:
                self._awaited.update(handle.clip for handle in handles)
        return handles

    def __call__(self, rank: int, event: Event) -> None:
        """Update the handles of clips from an event of a rank, such as a finished step or clip."""
        match event:
            case StoredTensor():
                assert self._tensor_folder is not None
                TensorStore(Path(self._tensor_folder)).put(event.name, event.data)
            case Heartbeat(action=Action(kind=Kind.ENCODE | Kind.LOAD_CHECKPOINT, clip=clip)):
                if (handle := self._open.get(clip)) is not None:
                    handle._update_progress(handle.progress.steps_done, rank)
            case StepDone():
                if (handle := self._open.get(event.clip)) is not None:
                    handle._update_progress(event.step + 1, rank)
            case ClipDone():
                self._record_result(event.clip, event.metadata)
            case ClipDropped() if event.clip in self._cancelled:
                self._record_result(event.clip, None)
            case ClipFailed() if event.clip in self._open:
                self._record_result(event.clip, error_from_dict(event.error))
            case _:
                pass

    def cancel(self, handle: ClipHandle) -> bool:
        """Cancel a clip, and return whether it is or will be cancelled; see `ClipHandle.cancel`."""
        with self._changed:
            if handle.clip not in self._open:
                return handle.cancelled()
            has_begun = handle.progress.rank is not None
            self._cancelled[handle.clip] = handle.request
        self._send_to_all(Cancel(clip=handle.clip).to_bytes())
        if not has_begun:
            self._complete(handle, None)
        return True

    def end(self, error: BaseException) -> None:
        """Make the handles of all unfinished clips raise an error, and accept no more clips.

        Only the first call has an effect.

        Args:
            error: Reason for the end of the run.
        """
        with self._changed:
            if self._end is not None:
                return
            self._end = error
            self._unfinished = list(self._open.values())
            self._open.clear()
            self._cancelled.clear()
            self._changed.notify_all()
        for handle in self._unfinished:
            handle.set_exception(reraisable(error))

    def forget_result(self, handle: ClipHandle) -> None:
        """Forget a result that the clip's handle has returned, so that `results` skips it."""
        with self._changed:
            self._finished.pop(handle.clip, None)

    def results(self) -> Iterator[ClipResult]:
        """Yield the result of each clip as the clip finishes, until no clip is left.

        Results that a caller has already got from a handle are not yielded.

        Raises:
            SvdppError: The run has ended before all clips were finished.
        """
        while (handle := self._take_next()) is not None:
            yield handle.result()

    def _take_next(self) -> ClipHandle | None:
        self.check_may_wait()
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished or not self._awaited or self._end is not None
            )
            if self._finished:
                return self._finished.pop(next(iter(self._finished)))
            if self._awaited and self._end is not None:
                raise reraisable(self._end)
            return None

    def _record_result(self, clip: int, outcome: dict[str, Any] | SvdppError | None) -> None:
        """Set the outcome in a clip's handle; remove checkpoints unless the clip has failed.

        Call this when the ranks no longer work on the clip.

        The checkpoints of a finished or cancelled clip are removed. The checkpoints of a failed
        clip stay, so that a later run can resume the clip.

        Args:
            clip: Index of the clip.
            outcome: Metadata of a finished clip, error of a failed clip, or None for a cancelled
                clip.
        """
        handle = self._open.get(clip)
        request = self._cancelled.get(clip) if handle is None else handle.request
        if request is None:  # the clip had already ended
            return
        is_lost = isinstance(outcome, SvdppError)
        if request.output is not None or request.latents_key is not None:
            self._recent.append((request, is_lost))
        if not is_lost:
            self._prune(request)
        if handle is not None:
            self._complete(handle, outcome)
        # Until the handle has its outcome, a call of `cancel` in another thread may add the request
        # to `_cancelled`. So the request is removed only now.
        self._cancelled.pop(clip, None)

    def _complete(self, handle: ClipHandle, outcome: dict[str, Any] | SvdppError | None) -> None:
        """Set the outcome in a clip's handle: metadata, an error, or None for a cancelled clip."""
        with self._changed:
            if self._open.pop(handle.clip, None) is None:
                return
            if isinstance(outcome, SvdppError):
                self._failures.append(ClipFailure(handle.clip, handle.request, outcome))
            elif outcome is not None and handle.clip in self._awaited:
                self._finished[handle.clip] = handle
            self._awaited.discard(handle.clip)
            self._changed.notify_all()
        if outcome is None:
            Future.cancel(handle)
            handle.set_running_or_notify_cancel()  # this wakes the threads that wait for the clip
        elif isinstance(outcome, SvdppError):
            handle.set_exception(outcome)
        else:
            handle.set_result(ClipResult(handle.clip, handle.request, outcome))

    def _prune(self, request: ClipRequest) -> None:
        folder, key = self._latents_folder, request.latents_key
        if folder is not None and key is not None:
            self._files.submit(lambda: remove_checkpoints(folder, key))

    def clean_up(self) -> None:
        """Remove incomplete clip files, and latent checkpoints that were written after clips ended.

        Call this after all ranks have ended. If a folder does not respond in time, its files are
        not removed.
        """
        for request, is_lost in self._recent:
            if not is_lost:
                self._prune(request)
        with contextlib.suppress(TimeoutError):
            self._files.submit(self._remove_abandoned).result(_CLEAN_UP_SECONDS)

    def _remove_abandoned(self) -> None:
        unfinished = [handle.request for handle in self._unfinished]
        requests = [*(request for request, _ in self._recent), *unfinished]
        folders = {Path(request.output.path).parent for request in requests if request.output}
        if self._latents_folder is not None:
            folders.add(self._latents_folder)
        for folder in folders:
            # a folder that cannot be read is skipped
            with contextlib.suppress(OSError, ValueError):
                output_files.remove_abandoned(folder)
