"""The bounded executor: one thread beside the denoising, with a queue of limited length."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import torch

from svdpp.comm import streams

_P = ParamSpec("_P")
_T = TypeVar("_T")

# A slow disk holds the rank back instead of filling its memory.
_MAX_WAITING = 2


class BoundedExecutor:
    """Makes calls in one thread, in order; waiting for a call raises what the call raised.

    The thread makes the rank's device its current one.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._thread = streams.one_thread(name, device)
        self._waiting: list[Future[Any]] = []

    def submit(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queues one call and returns its future; blocks while two others are queued."""
        while len(self._waiting) >= _MAX_WAITING:
            self._finish_first()
        future = self._thread.submit(work, *args, **kwargs)
        self._waiting.append(future)
        return future

    def finish(self) -> None:
        """Waits for all calls."""
        while self._waiting:
            self._finish_first()

    def is_busy(self) -> bool:
        """Whether a call is queued or running; any thread may ask."""
        return any(not future.done() for future in list(self._waiting))

    def _finish_first(self) -> None:
        self._waiting[0].result()  # a running call counts as queued
        self._waiting.pop(0)
