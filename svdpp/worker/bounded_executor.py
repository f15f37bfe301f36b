"""Owns work that a thread does beside the denoising: in order, and with a bounded queue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, ParamSpec, TypeVar

import torch

from svdpp.comm import streams

_P = ParamSpec("_P")
_T = TypeVar("_T")

# A slow disk holds the rank back instead of filling its memory.
_MAX_WAITING = 2


class BoundedExecutor(Generic[_P, _T]):
    """Calls of one function, made in one thread.

    Args:
        work: the function; what it raises is raised again by whoever waits for that call.
        name: of the thread.
        device: of the rank; the thread's current one.
    """

    def __init__(self, work: Callable[_P, _T], name: str, device: torch.device) -> None:
        self._work = work
        self._thread = streams.one_thread(name, device)
        self._waiting: list[Future[_T]] = []

    def put(self, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queues one call and returns its future; blocks while two others wait."""
        while len(self._waiting) >= _MAX_WAITING:
            self._finish_first()
        self._waiting.append(self._thread.submit(self._work, *args, **kwargs))
        return self._waiting[-1]

    def finish(self) -> None:
        """Waits until all calls are done."""
        while self._waiting:
            self._finish_first()

    def is_busy(self) -> bool:
        """Whether a call is not done yet; for any thread."""
        return any(not future.done() for future in list(self._waiting))

    def _finish_first(self) -> None:
        self._waiting[0].result()  # it counts as waiting until it is done
        self._waiting.pop(0)
