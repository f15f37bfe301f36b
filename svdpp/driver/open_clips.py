"""Owns the clips that are submitted and not finished, and the results that nobody has taken yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from svdpp.config import ClipRequest
from svdpp.driver.clip_handle import ClipFailure, ClipHandle, ClipResult
from svdpp.errors import SvdppError, reraisable


class OpenClips:
    """Handles of clips, from `add` until somebody has their result; for any number of threads.

    One thread finishes the clips; any thread may add clips and wait for them.

    Args:
        max_failures: how many of the latest lost clips `failures` keeps; None: all.
    """

    def __init__(self, max_failures: int | None = None) -> None:
        self._changed = threading.Condition()
        self._num_added = 0
        self._open: dict[int, ClipHandle] = {}
        # Of clips that `results` yields: those to come, and those that can be taken.
        self._awaited: set[int] = set()
        self._finished: dict[int, ClipHandle] = {}
        self._end: BaseException | None = None
        self._unfinished: list[ClipHandle] = []
        self._finisher: threading.Thread | None = None
        self._failures: deque[ClipFailure] = deque(maxlen=max_failures)

    @property
    def num_added(self) -> int:
        """How many clips were added so far: the index of the next one."""
        return self._num_added

    @property
    def is_idle(self) -> bool:
        """Whether every clip is finished or lost."""
        return not self._open

    @property
    def failures(self) -> list[ClipFailure]:
        """Clips that were lost while the run went on, in the order of their failures."""
        with self._changed:
            return list(self._failures)

    @property
    def unfinished(self) -> list[ClipRequest]:
        """What was asked for of the clips that `end` found unfinished."""
        return [handle.request for handle in self._unfinished]

    def request(self, clip: int) -> ClipRequest | None:
        """What was asked for, while `clip` is not finished."""
        handle = self._open.get(clip)
        return None if handle is None else handle.request

    def finished_by(self, thread: threading.Thread) -> None:
        """Says which thread finishes clips; a wait for a clip in that thread is refused."""
        self._finisher = thread

    def check_may_wait(self) -> None:
        """See `HandleOwner`."""
        if threading.current_thread() is self._finisher:
            raise RuntimeError(
                "observers and callbacks must not wait for the pipeline: they run in its own thread"
            )

    def add(self, requests: Sequence[ClipRequest], *, for_results: bool) -> list[ClipHandle]:
        """New clips, with the next indices.

        Args:
            requests: one for each clip.
            for_results: whether `results` yields them.

        Raises:
            SvdppError: what ended the run.
        """
        with self._changed:
            if self._end is not None:
                raise reraisable(self._end)
            handles = [
                ClipHandle(self._num_added + index, request, self)
                for index, request in enumerate(requests)
            ]
            self._num_added += len(handles)
            self._open.update((handle.clip, handle) for handle in handles)
            if for_results:
                self._awaited.update(handle.clip for handle in handles)
        return handles

    def finish(self, clip: int, metadata: dict[str, Any]) -> None:
        """Gives `clip` its result, unless it was finished or lost before."""
        handle = self._settle(clip)
        if handle is not None:
            handle.set_result(ClipResult(clip, handle.request, metadata))

    def lose(self, clip: int, error: SvdppError) -> None:
        """Gives `clip` the reason why it is lost, unless it was finished or lost before."""
        handle = self._settle(clip, error)
        if handle is not None:
            handle.set_exception(error)

    def end(self, error: BaseException) -> None:
        """Gives every clip that is not finished `error`, and takes no more; the first call counts.

        Args:
            error: what ended the run.
        """
        with self._changed:
            if self._end is not None:
                return
            self._end = error
            self._unfinished = list(self._open.values())
            self._open.clear()
            self._changed.notify_all()
        for handle in self._unfinished:
            handle.set_exception(reraisable(error))

    def take(self, handle: ClipHandle) -> None:
        """See `HandleOwner`."""
        with self._changed:
            self._finished.pop(handle.clip, None)

    def results(self) -> Iterator[ClipResult]:
        """Yields each result that nobody has taken, as clips finish, until none is left.

        Raises:
            SvdppError: what ended the run, where it left clips unfinished; after all results.
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

    def _settle(self, clip: int, error: SvdppError | None = None) -> ClipHandle | None:
        """Moves `clip` out of the open ones; its handle is set afterwards, without the lock."""
        with self._changed:
            handle = self._open.pop(clip, None)
            if handle is None:
                return None
            if error is not None:
                self._failures.append(ClipFailure(clip, handle.request, error))
            elif clip in self._awaited:
                self._finished[clip] = handle
            self._awaited.discard(clip)
            self._changed.notify_all()
        return handle
