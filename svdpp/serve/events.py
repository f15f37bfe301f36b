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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self
from weakref import WeakSet

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


class Events:
    """The newest event of each job, and its subscribers.

    Any thread may publish. Subscribers live in event loops. Of more than `max_jobs` jobs, the one
    with the oldest event goes first.
    """

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._lock = threading.RLock()
        self._newest: OrderedDict[str, JobEvent] = OrderedDict()
        # Weak, so that a subscription that nobody closes goes with its last user.
        self._subscriptions: dict[str, WeakSet[Subscription]] = {}
        self._last_id = 0
        self.is_closed = False

    def publish(self, job_id: str, data: Mapping[str, Any], *, is_final: bool = False) -> JobEvent:
        """Replaces the job's newest event and wakes its subscribers; `data` must not change."""
        with self._lock:
            event = JobEvent(self.new_id(), data, is_final)
            self._newest[job_id] = event
            self._newest.move_to_end(job_id)
            while len(self._newest) > self._max_jobs:
                self._newest.popitem(last=False)
            for subscription in self._subscriptions.get(job_id, ()):
                subscription.wake()
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
            for subscription in self._subscriptions.pop(job_id, ()):
                subscription.end()

    def watched(self) -> set[str]:
        """The jobs that have subscribers."""
        with self._lock:
            # Those whose subscribers have vanished leave no entry.
            self._subscriptions = {id: own for id, own in self._subscriptions.items() if len(own)}
            return set(self._subscriptions)

    @property
    def num_subscribers(self) -> int:
        """How many subscriptions are open."""
        with self._lock:
            return sum(map(len, self._subscriptions.values()))

    def subscribe(
        self, job_id: str, last_id: int | None = None, *, silence: float = 15.0
    ) -> Subscription:
        """A subscription to `job_id`; call it in a coroutine.

        The newest event comes at once, unless its id is `last_id`, which the client has. After each
        `silence` in seconds it yields None, for a comment that keeps the connection open.
        """
        subscription = Subscription(self, job_id, last_id, silence)
        with self._lock:
            if self.is_closed:
                subscription.end()
            else:
                self._subscriptions.setdefault(job_id, WeakSet()).add(subscription)
        return subscription

    def close(self) -> None:
        """Ends all subscriptions; later ones end at once."""
        with self._lock:
            self.is_closed = True
            for subscription in itertools.chain(*self._subscriptions.values()):
                subscription.end()
            self._subscriptions.clear()

    def unsubscribe(self, subscription: Subscription) -> None:
        """Removes a subscription; does nothing if it is already removed."""
        with self._lock:
            own = self._subscriptions.get(subscription.job_id, WeakSet())
            own.discard(subscription)
            if not own:
                self._subscriptions.pop(subscription.job_id, None)


class Subscription:
    """The events of one job for one client: an async iterator, and an async context manager.

    It yields the newest event that the client does not have, None after each period of silence, and
    ends after a final event. A slow client skips events.

    Example:
        >>> async def follow(events: Events, job_id: str) -> None:
        ...     async with events.subscribe(job_id) as subscription:
        ...         async for event in subscription:
        ...             print(event)
    """

    def __init__(self, events: Events, job_id: str, last_id: int | None, silence: float) -> None:
        self.job_id = job_id
        self._events = events
        self._last_id = last_id
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._flag = asyncio.Event()
        self._is_awake = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent | None:
        while not self._is_over:
            self._flag.clear()
            self._is_awake = False  # before the look at the newest event, so that none is missed
            event = self._events.newest(self.job_id)
            if event is not None and event.id != self._last_id:
                self._last_id = event.id
                if event.is_final:
                    self.close()
                return event
            try:
                await asyncio.wait_for(self._flag.wait(), self._silence)
            except TimeoutError:
                return None
            except asyncio.CancelledError:  # the client has gone
                self.close()
                raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends the subscription."""
        self._is_over = True
        self._events.unsubscribe(self)

    def wake(self) -> None:
        """Lets the subscriber look at the newest event; from any thread, never waits."""
        if self._is_awake:
            return
        self._is_awake = True
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self._loop.call_soon_threadsafe(self._flag.set)

    def end(self) -> None:
        """Ends the subscription from any thread."""
        self._is_over, self._is_awake = True, False
        self.wake()


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
