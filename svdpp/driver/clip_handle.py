"""Owns a caller's view of one clip: its handle, its result or its failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from svdpp.config import ClipRequest
from svdpp.errors import SvdppError


@dataclass(frozen=True)
class ClipResult:
    """A finished clip.

    Args:
        clip: index, in the order of submission.
        request: the clip's request.
        metadata: the clip's JSON: parameters, hashes, times.
    """

    clip: int
    request: ClipRequest
    metadata: dict[str, Any]


@dataclass(frozen=True)
class ClipFailure:
    """A clip that was lost while the run went on: its image, its latent or its file was bad.

    Args:
        clip: index, in the order of submission.
        request: the clip's request.
        error: why the clip was lost.
    """

    clip: int
    request: ClipRequest
    error: SvdppError


@dataclass(frozen=True)
class ClipProgress:
    """How far a clip is.

    Args:
        steps_done: denoising steps that are done.
        num_steps: denoising steps of the clip.
        rank: the rank that worked on it last; None before the first.
    """

    steps_done: int
    num_steps: int
    rank: int | None = None


class HandleOwner(Protocol):
    """The object that finishes the clips of handles."""

    def check_may_wait(self) -> None:
        """Raises RuntimeError in the thread that finishes clips, which would wait for itself."""

    def take(self, handle: ClipHandle) -> None:
        """Notes that a caller has taken the result of `handle`."""

    def cancel(self, handle: ClipHandle) -> bool:
        """See `ClipHandle.cancel`."""


class ClipHandle(Future[ClipResult]):
    """One submitted clip: a `concurrent.futures.Future` of its `ClipResult`.

    `asyncio.wrap_future(handle)` makes it awaitable.

    Args:
        clip: index, in the order of submission.
        request: the clip's request.
        num_steps: denoising steps of the clip.
        owner: finishes the clip.
    """

    def __init__(self, clip: int, request: ClipRequest, num_steps: int, owner: HandleOwner) -> None:
        super().__init__()
        self.clip = clip
        self.request = request
        self.progress = ClipProgress(request.done_steps, num_steps)
        """How far the clip is; it changes while the clip is made."""
        self._owner = owner
        self._progress_callbacks: list[Callable[[ClipHandle], object]] = []

    def running(self) -> bool:
        """Whether a rank has begun the clip, and the clip is neither finished nor lost."""
        return self.progress.rank is not None and not self.done()

    def add_progress_callback(self, callback: Callable[[ClipHandle], object]) -> None:
        """Has `callback` called with the handle after each change of `progress`.

        It must be quick and raise nothing: the pipeline's thread calls it. If a rank has begun the
        clip, it is also called at once.
        """
        self._progress_callbacks.append(callback)
        if self.progress.rank is not None:
            callback(self)

    def set_progress(self, progress: ClipProgress) -> None:
        """Changes `progress`; only its owner calls this."""
        if progress != self.progress:
            self.progress = progress
            for callback in self._progress_callbacks:
                callback(self)

    def cancel(self) -> bool:
        """Asks the ranks to skip the clip from the next step on; does not wait.

        A clip that no rank has begun is cancelled at once. Another one is cancelled once all ranks
        have let go of it, or finished if they were faster: `exception` waits for that. Afterwards
        `cancelled()` is True, and `result` raises `concurrent.futures.CancelledError`.

        Returns:
            Whether the clip is, or may still be, cancelled; False once it is finished or lost.
        """
        return self._owner.cancel(self)

    def end_cancelled(self) -> None:
        """Ends the handle as cancelled; only its owner calls this."""
        super().cancel()
        self.set_running_or_notify_cancel()  # wakes those who wait

    def result(self, timeout: float | None = None) -> ClipResult:
        """Waits for the clip. `Pipeline.results` does not yield it again.

        Args:
            timeout: seconds to wait; None waits until the clip or the run ends.

        Raises:
            SvdppError: why the clip was lost, or what ended the run.
            ClosedError: the pipeline was closed before the clip was finished.
            CancelledError: the clip was cancelled.
            TimeoutError: the clip was not finished in time.
            RuntimeError: called by an observer or a callback while the clip is unfinished.
        """
        self._check_may_wait()
        result = super().result(timeout)
        self._owner.take(self)
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the clip and returns the error that `result` would raise, or None.

        Raises:
            CancelledError: the clip was cancelled.
            TimeoutError: the clip was not finished in time.
            RuntimeError: called by an observer or a callback while the clip is unfinished.
        """
        self._check_may_wait()
        return super().exception(timeout)

    def _check_may_wait(self) -> None:
        if not self.done():
            self._owner.check_may_wait()
