"""Owns a caller's view of one clip: its handle, its result or its failure."""

from __future__ import annotations

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


class HandleOwner(Protocol):
    """The object that finishes the clips of handles."""

    def check_may_wait(self) -> None:
        """Raises RuntimeError in the thread that finishes clips, which would wait for itself."""

    def take(self, handle: ClipHandle) -> None:
        """Notes that a caller has taken the result of `handle`."""


class ClipHandle(Future[ClipResult]):
    """One submitted clip: a `concurrent.futures.Future` of its `ClipResult`.

    `asyncio.wrap_future(handle)` makes it awaitable. A submitted clip cannot be cancelled:
    `cancel()` returns False and changes nothing.

    Args:
        clip: index, in the order of submission.
        request: the clip's request.
        owner: finishes the clip.
    """

    def __init__(self, clip: int, request: ClipRequest, owner: HandleOwner) -> None:
        super().__init__()
        self.clip = clip
        self.request = request
        self._owner = owner
        self.set_running_or_notify_cancel()  # from here on `cancel` returns False

    def result(self, timeout: float | None = None) -> ClipResult:
        """Waits for the clip. `Pipeline.results` does not yield it again.

        Args:
            timeout: seconds to wait; None waits until the clip or the run ends.

        Raises:
            SvdppError: why the clip was lost, or what ended the run.
            ClosedError: the pipeline was closed before the clip was finished.
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
            TimeoutError: the clip was not finished in time.
            RuntimeError: called by an observer or a callback while the clip is unfinished.
        """
        self._check_may_wait()
        return super().exception(timeout)

    def _check_may_wait(self) -> None:
        if not self.done():
            self._owner.check_may_wait()
