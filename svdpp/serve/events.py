"""The clients that follow a job by looking at it from time to time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

_LOOK_SECONDS = 0.25
#: Of all followers together, so that a thousand do not keep requests from the processor.
_LOOKS_PER_SECOND = 200
#: After so long all notice that the server ends.
_CLOSE_SECONDS = 1.0


class Followers:
    """The clients that follow jobs: each looks at its job itself, so none delays another."""

    def __init__(self) -> None:
        self.number = 0
        """How many follow a job."""
        self.is_closed = False
        """Whether the server ends: what they see then is the last."""

    def close(self) -> None:
        """Ends what waits for another look."""
        self.is_closed = True

    @contextlib.contextmanager
    def follow(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """A function that returns once it is time for another look at the job."""
        self.number += 1
        try:
            yield self._pause
        finally:
            self.number -= 1

    async def _pause(self) -> None:
        end = time.monotonic() + max(_LOOK_SECONDS, self.number / _LOOKS_PER_SECOND)
        while not self.is_closed and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _CLOSE_SECONDS))
