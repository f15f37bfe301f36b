"""Who follows a job: clients that look at it again when something may have changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator

from loguru import logger

from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue

_LOOK_SECONDS = 0.25
#: Of all followers together, so that a thousand do not keep requests from the processor.
_LOOKS_PER_SECOND = 200


class Followers:
    """The clients that follow jobs, in one event loop; any thread may wake them.

    Nothing is kept for them: each looks at its job itself, so none delays another or misses a
    state that lasts.
    """

    def __init__(self) -> None:
        self._flags: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.number = 0
        """How many follow a job."""
        self.is_closed = False
        """Whether the server ends: what they see then is the last."""

    def wake(self, job_id: str) -> None:
        """Says that a job has reached another state, or is removed."""
        self._call(lambda: self._wake(job_id))

    def close(self) -> None:
        """Ends what waits for news."""
        self.is_closed = True
        self._call(lambda: self._wake(*self._flags))

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(function)

    def _wake(self, *job_ids: str) -> None:
        for flag in [flag for id in job_ids for flag in self._flags.get(id, ())]:
            flag.set()

    @contextlib.contextmanager
    def follow(self, job_id: str) -> Iterator[Callable[[], Awaitable[None]]]:
        """A function that returns once it is time for another look at the job."""
        self._loop, flag = asyncio.get_running_loop(), asyncio.Event()
        self._flags[job_id].add(flag)
        self.number += 1

        async def news() -> None:
            with contextlib.suppress(TimeoutError):
                seconds = max(_LOOK_SECONDS, self.number / _LOOKS_PER_SECOND)
                await asyncio.wait_for(flag.wait(), seconds)
            flag.clear()  # before the look, so that no change is missed

        try:
            yield news
        finally:
            self.number -= 1
            self._flags[job_id].discard(flag)
            if not self._flags[job_id]:
                del self._flags[job_id]


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
