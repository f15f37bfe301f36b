"""The JobCache: the open jobs in memory, so that a status call need not read the queue's file.

It holds no finished jobs, because their metadata is large and clients ask for them only once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from svdpp.serve.job import Job

_MAX_JOBS = 1000


class JobCache:
    """The open jobs that were read last. Any thread may call any method.

    It never has a job as it was before a committed change: a change discards the job before it is
    committed, and a job that was read while a change was committed is not kept. Of more than
    `max_jobs`, the one that was used longest ago goes first.
    """

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._changing: Counter[str] = Counter()
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """How many changes have ended; read it before the job that is given to `keep`."""
        return self._num_changes

    def get(self, id: str) -> Job | None:
        """The job of that id; None if it is not kept."""
        with self._lock:
            job = self._jobs.get(id)
            if job is not None:
                self._jobs.move_to_end(id)
            return job

    def keep(self, job: Job, num_changes: int) -> None:
        """Keeps an open job that was read since there were so many changes."""
        with self._lock:
            is_newest = num_changes == self._num_changes and not self._changing[job.id]
            if is_newest and not job.state.is_final:
                self._jobs[job.id] = job
                while len(self._jobs) > self._max_jobs:
                    self._jobs.popitem(last=False)

    def clear(self) -> None:
        """Discards all jobs."""
        with self._lock:
            self._jobs.clear()

    @contextlib.contextmanager
    def changes(self) -> Iterator[Callable[[str], None]]:
        """A block around a transaction, which names each job that it changes by the function."""
        changing: list[str] = []

        def discard(id: str) -> None:
            with self._lock:
                changing.append(id)
                self._changing[id] += 1
                self._jobs.pop(id, None)

        try:
            yield discard
        finally:
            with self._lock:
                self._changing -= Counter(changing)
                self._num_changes += 1
