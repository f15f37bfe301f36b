"""Owns the threads for calls that may wait for long: for a decoder, or for the ranks.

Each has its own, so that other requests never wait for one of the pool's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread

_WAITERS = 256

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _Waiters:
    def __init__(self) -> None:
        self._limiter: CapacityLimiter | None = None

    async def __call__(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Calls `function` in a thread."""
        if self._limiter is None:  # needs the event loop
            self._limiter = CapacityLimiter(_WAITERS)
        return await to_thread.run_sync(
            lambda: function(*arguments), limiter=self._limiter, abandon_on_cancel=False
        )


in_thread = _Waiters()
