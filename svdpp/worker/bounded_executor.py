"""Owns work that a thread does beside the denoising: in order, and no more of it than may wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

# A slow disk holds back the rank instead of filling its memory.
_MAX_WAITING = 2


class BoundedExecutor(Generic[_P, _T]):
    """Calls of one function, made in a thread.

    Args:
        work: the function; what it raises is raised again by whoever waits for that call.
        name: of the thread.
    """

    def __init__(self, work: Callable[_P, _T], name: str) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: list[Future[_T]] = []

    def put(self, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Takes one call; blocks while two others wait. Its result, as soon as that is known."""
        while len(self._waiting) >= _MAX_WAITING:
            self._finish_first()
        self._waiting.append(self._pool.submit(self._work, *args, **kwargs))
        return self._waiting[-1]

    def finish(self) -> None:
        """Waits until all calls are done."""
        while self._waiting:
            self._finish_first()

    def is_busy(self) -> bool:
        """Whether a call is not done yet; for any thread to ask."""
        return any(not future.done() for future in list(self._waiting))

    def _finish_first(self) -> None:
        self._waiting[0].result()  # it counts as waiting until it is done
        self._waiting.pop(0)
