"""Owns what the engine says about jobs: their events and their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loguru import logger

from svdpp.serve.events import Events
from svdpp.serve.job import Job
from svdpp.serve.job_estimates import JobEstimates
from svdpp.serve.store import JobStore

_PLACES_SECONDS = 0.5
# The pause after places are published, in multiples of the time that it takes: with hundreds of
# waiting jobs that are watched, it must not keep requests from the processor.
_PLACES_PAUSE = 20.0


class Announcer:
    """Publishes an event for each change of a job's state, step or place.

    The callbacks must not stop the engine: what they raise goes to the log.

    Args:
        store: the queue.
        events: of the jobs.
        estimates: of the open jobs.
        describe: the data of a job's event.
        on_ended: called with each job that has reached a final state.
    """

    def __init__(
        self,
        store: JobStore,
        events: Events,
        estimates: JobEstimates,
        *,
        describe: Callable[[Job], Mapping[str, Any]],
        on_ended: Callable[[Job], None],
    ) -> None:
        self._store = store
        self._events = events
        self._estimates = estimates
        self._describe = describe
        self._on_ended = on_ended
        self._places: dict[str, int | None] = {}
        self._places_changed = False
        self._places_next = 0.0

    def changed(self, job_id: str) -> Job | None:
        """Publishes the job as it is now; returns it, None if it does not exist any more."""
        self._places_changed = True
        job = self._store.get(job_id)
        if job is None:
            self._events.forget(job_id)
            return None
        if job.state.is_final:
            logger.info("{} is {}", job_id, job.state)
            self._quietly(lambda: self._on_ended(job))
        self._publish(job)
        return job

    def stepped(self, job_ids: Iterable[str]) -> None:
        """Publishes jobs whose progress has changed, if somebody watches them."""
        for job_id in self._events.watched().intersection(job_ids):
            job = self._store.get(job_id)
            if job is not None and not job.state.is_final:
                self._publish(job)

    def places(self) -> None:
        """Publishes waiting jobs whose place has changed, if somebody watches them."""
        begun = time.monotonic()
        if not self._places_changed or begun < self._places_next:
            return
        self._places_changed = False
        self._publish_places()
        pause = max(_PLACES_SECONDS, _PLACES_PAUSE * (time.monotonic() - begun))
        self._places_next = begun + pause

    def _publish_places(self) -> None:
        watched = self._events.watched()
        if not watched:
            self._places = {}
            return
        estimates = self._estimates.all(max_age=0.0)
        places = {job_id: estimates[job_id].place for job_id in watched if job_id in estimates}
        moved = [job_id for job_id, place in places.items() if self._places.get(job_id) != place]
        self._places = places
        self.stepped(moved)

    def _publish(self, job: Job) -> None:
        self._quietly(
            lambda: self._events.publish(job.id, self._describe(job), is_final=job.state.is_final)
        )

    @staticmethod
    def _quietly(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            logger.exception("a callback about a job failed")
