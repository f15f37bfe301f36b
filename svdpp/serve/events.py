"""The events of jobs for subscribers: the newest one of each job, in bounded memory.

An event holds the whole state of a job, so a subscriber that misses some loses nothing by taking
only the newest. No publisher ever waits for a subscriber.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from loguru import logger

from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue

_MAX_JOBS = 1000
_REFRESH_SECONDS = 0.25
# The pause after waiting jobs are looked at, in multiples of the time that it takes: with hundreds
# that are watched, it must not keep requests from the processor.
_WAITING_PAUSE = 20.0


class JobEvent(NamedTuple):
    """One event of a job.

    Args:
        id: unix time in milliseconds, made unique; larger than the ids of all earlier events, so
            that an id that a client got before a restart never names a newer event.
        data: the state of the job.
        is_final: whether no other event follows.
    """

    id: int
    data: Mapping[str, Any]
    is_final: bool


class _Watcher:
    """One subscriber, in its event loop."""

    def __init__(self, *, is_over: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.flag = asyncio.Event()
        self.is_over = is_over

    def wake(self, *, is_over: bool = False) -> None:
        self.is_over |= is_over
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self._loop.call_soon_threadsafe(self.flag.set)


class Events:
    """The newest event of each job, and its subscribers.

    Any thread may publish. Subscribers live in event loops. Of more than `max_jobs` jobs, the one
    with the oldest event goes first.
    """

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._lock = threading.RLock()
        self._newest: OrderedDict[str, JobEvent] = OrderedDict()
        self._watchers: dict[str, set[_Watcher]] = {}
        self._last_id = 0
        self._is_closed = False

    def publish(self, job_id: str, data: Mapping[str, Any], *, is_final: bool = False) -> JobEvent:
        """Replaces the job's newest event and wakes its subscribers; `data` must not change."""
        with self._lock:
            event = JobEvent(self.new_id(), data, is_final)
            self._newest[job_id] = event
            self._newest.move_to_end(job_id)
            while len(self._newest) > self._max_jobs:
                self._newest.popitem(last=False)
            for watcher in self._watchers.get(job_id, ()):
                watcher.wake()
        return event

    def new_id(self) -> int:
        """An id for an event that is not published: smaller than those of all later events."""
        with self._lock:
            self._last_id = max(self._last_id + 1, int(time.time() * 1000))
            return self._last_id

    def newest(self, job_id: str) -> JobEvent | None:
        """The job's newest event; None if none is kept."""
        with self._lock:
            return self._newest.get(job_id)

    def forget(self, job_id: str) -> None:
        """Drops the newest event of a job that no longer exists; its subscriptions end."""
        with self._lock:
            self._newest.pop(job_id, None)
            for watcher in self._watchers.get(job_id, ()):
                watcher.wake(is_over=True)

    def close(self) -> None:
        """Ends all subscriptions; later ones end at once."""
        with self._lock:
            self._is_closed = True
            for watcher in itertools.chain(*self._watchers.values()):
                watcher.wake(is_over=True)

    def watched(self) -> set[str]:
        """The jobs that have subscribers."""
        with self._lock:
            return set(self._watchers)

    @property
    def num_subscribers(self) -> int:
        """How many subscriptions are open."""
        with self._lock:
            return sum(map(len, self._watchers.values()))

    @contextlib.asynccontextmanager
    async def subscribe(
        self, job_id: str, last_id: int | None = None, *, silence: float = 15.0
    ) -> AsyncIterator[AsyncIterator[JobEvent | None]]:
        """The events of `job_id` that the client does not have, until a final one.

        The newest comes at once, unless its id is `last_id`, which the client has. After each
        `silence` in seconds comes None, for a comment that keeps the connection open. A slow client
        skips events.
        """
        with self._lock:
            watcher = _Watcher(is_over=self._is_closed)
            self._watchers.setdefault(job_id, set()).add(watcher)
        try:
            yield self._follow(job_id, watcher, last_id, silence)
        finally:
            with self._lock:
                self._watchers[job_id].discard(watcher)
                if not self._watchers[job_id]:
                    del self._watchers[job_id]

    async def _follow(
        self, job_id: str, watcher: _Watcher, last_id: int | None, silence: float
    ) -> AsyncIterator[JobEvent | None]:
        while not watcher.is_over:
            watcher.flag.clear()  # before the look at the newest event, so that none is missed
            event = self.newest(job_id)
            if event is not None and event.id != last_id:
                last_id = event.id
                yield event
                if event.is_final:
                    return
                continue
            try:
                await asyncio.wait_for(watcher.flag.wait(), silence)
            except TimeoutError:
                yield None


class Notifier:
    """Publishes an event for each change of a job's state, step or place.

    The callbacks must not stop the engine: what they raise goes to the log. `describe` gives the
    data of a job's event; `on_ended` is called with each job that has reached a final state.
    """

    def __init__(
        self,
        queue: JobQueue,
        events: Events,
        *,
        describe: Callable[[Job], Mapping[str, Any]],
        on_ended: Callable[[Job], None],
    ) -> None:
        self._queue = queue
        self._events = events
        self._describe = describe
        self._on_ended = on_ended
        self._refresh_at = self._waiting_at = 0.0

    def changed(self, job_id: str) -> Job | None:
        """Publishes the job as it is now; returns it, None if it does not exist any more."""
        job = self._queue.get(job_id)
        if job is None:
            self._events.forget(job_id)
            return None
        if job.state.is_final:
            logger.info("{} is {}", job_id, job.state)
            _quietly(lambda: self._on_ended(job))
        _quietly(lambda: self._publish(job))
        return job

    def refresh(self, running: Iterable[str]) -> None:
        """Publishes the open jobs that somebody watches and that have changed.

        Those that are not `running` are looked at less often.
        """
        begun = time.monotonic()
        if begun < self._refresh_at:
            return
        self._refresh_at = begun + _REFRESH_SECONDS
        watched, sees_all = self._events.watched(), begun >= self._waiting_at
        for job_id in watched if sees_all else watched.intersection(running):
            job = self._queue.get(job_id)
            if job is not None and not job.state.is_final:
                _quietly(lambda job=job: self._publish(job))  # type: ignore[misc]
        if sees_all:
            self._waiting_at = begun + _WAITING_PAUSE * (time.monotonic() - begun)

    def _publish(self, job: Job) -> None:
        data, newest = self._describe(job), self._events.newest(job.id)
        if newest is None or _without_eta(newest.data) != _without_eta(data):
            self._events.publish(job.id, data, is_final=job.state.is_final)


def _without_eta(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth an event: the ETA changes all the time."""
    return {name: value for name, value in data.items() if name != "eta_seconds"}


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        logger.exception("a callback about a job failed")
