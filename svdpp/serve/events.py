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
_PLACES_SECONDS = 0.5
# The pause after places are published, in multiples of the time that it takes: with hundreds of
# waiting jobs that are watched, it must not keep requests from the processor.
_PLACES_PAUSE = 20.0


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
        self._places: dict[str, int | None] = {}
        self._places_changed = False
        self._places_next = 0.0

    def changed(self, job_id: str) -> Job | None:
        """Publishes the job as it is now; returns it, None if it does not exist any more."""
        self._places_changed = True
        job = self._queue.get(job_id)
        if job is None:
            self._events.forget(job_id)
            return None
        if job.state.is_final:
            logger.info("{} is {}", job_id, job.state)
            _quietly(lambda: self._on_ended(job))
        self._publish(job)
        return job

    def stepped(self, job_ids: Iterable[str]) -> None:
        """Publishes jobs whose progress has changed, if somebody watches them."""
        for job_id in self._events.watched().intersection(job_ids):
            job = self._queue.get(job_id)
            if job is not None and not job.state.is_final:
                self._publish(job)

    def moved(self, places: Callable[[], Mapping[str, int | None]]) -> None:
        """Publishes waiting jobs whose place has changed, if somebody watches them."""
        begun = time.monotonic()
        if not self._places_changed or begun < self._places_next:
            return
        self._places_changed = False
        watched = self._events.watched()
        now = {id: place for id, place in places().items() if id in watched} if watched else {}
        before, self._places = self._places, now
        self.stepped(id for id, place in now.items() if before.get(id) != place)
        pause = max(_PLACES_SECONDS, _PLACES_PAUSE * (time.monotonic() - begun))
        self._places_next = begun + pause

    def _publish(self, job: Job) -> None:
        _quietly(
            lambda: self._events.publish(job.id, self._describe(job), is_final=job.state.is_final)
        )


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        logger.exception("a callback about a job failed")
