"""Who follows a job: clients that look at it from time to time, and callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

from loguru import logger

from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue

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


class Notifier:
    """Says that jobs have changed; what the callbacks raise goes to the log."""

    def __init__(self, queue: JobQueue, on_changed: Callable[[Job], None]) -> None:
        self._queue = queue
        self._on_changed = on_changed

    def changed(self, job_id: str) -> Job | None:
        """Tells of the job as it is now; returns it, None if it does not exist any more."""
        job = self._queue.get(job_id)
        if job is not None:
            if job.state.is_final:
                logger.info("{} is {}", job_id, job.state)
            try:
                self._on_changed(job)
            except Exception:
                logger.exception("a callback about a job failed")
        return job
