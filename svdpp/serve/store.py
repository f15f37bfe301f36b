"""The JobStore: the durable queue, in one SQLite file that one server uses.

Every change of a state names the states that it may start from, so a late one changes nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from svdpp.config import SamplingConfig
from svdpp.errors import RequestError, SvdppError, error_to_dict
from svdpp.serve import job_table
from svdpp.serve.job import Job, JobState, Proof
from svdpp.serve.job_cache import JobCache
from svdpp.serve.queue_file import QueueFile

_JOBS = f"SELECT {job_table.COLUMNS} FROM jobs"
_OPEN = "state IN ('queued', 'in_progress') AND held IS NULL"
_FINAL = tuple(str(state) for state in JobState if state.is_final)


class QueueFullError(SvdppError):
    """The queue, or one owner's share of it, has as many open jobs as it may have.

    Its details are `open` and `limit`, and `owner` if the limit is the owner's.
    """


class FinishedJob(NamedTuple):
    """A job in a final state, as `JobStore.finished` lists it."""

    id: str
    finished_at: float


class JobStore:
    """The jobs of a server. Any thread may call any method; each is durable before it returns.

    Owners take turns: the owner whose last job was taken longest ago is next. The jobs of one owner
    are in the order of `created_at - priority * AGEING_SECONDS`.

    The folder and the errors are those of `QueueFile`.
    """

    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self._file = QueueFile(folder, adopts=adopts)
        self._cache = JobCache()

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk has too little space for further clips; changes still fit."""
        return self._file.disk.is_low

    def check_there(self) -> None:
        """Raises OutputError if the queue's file was removed or replaced."""
        self._file.check_there()

    def close(self) -> None:
        """Close the file and release the folder; does nothing the second time."""
        self._file.close()
        self._cache.clear()

    def add(self, job: Job, *, max_open: int | None, max_open_of_owner: int | None = None) -> Job:
        """Store a new job, or find the one that the same request has created before.

        That one, of the same idempotency key and parameters, has another id: the caller then
        removes the new photograph. QueueFullError: a limit is reached.
        """
        if job.state is not JobState.QUEUED:
            raise ValueError(f"a new job must be queued, not {job.state}")
        with self._file.change() as database:
            if job.idempotency_key is not None:
                key = (job.owner, job.idempotency_key)
                query = f"{_JOBS} WHERE owner = ? AND idempotency_key = ?"
                for row in database.execute(query, key):
                    return _same_request(job_table.job_of(row), job)
            _check_limits(database, job.owner, max_open, max_open_of_owner)
            job_table.insert(database, job)
        return job

    def get(self, id: str) -> Job | None:
        """The job of that id, in any state."""
        job = self._cache.get(id)
        if job is None:
            num_changes = self._cache.num_changes
            job = next(iter(self._jobs("WHERE id = ?", id)), None)
            if job is not None:
                self._cache.keep(job, num_changes)
        return job

    def at_hand(self, id: str) -> Job | None:
        """The open job of that id if it is in memory; None says nothing."""
        return self._cache.get(id)

    def page(
        self,
        *,
        owner: str | None,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        state: JobState | None = None,
    ) -> list[Job]:
        """Jobs by the time of request: of one owner, in one state, after the job of an id."""
        conditions: dict[str, Any] = {}
        if owner is not None:
            conditions["owner = ?"] = owner
        if after is not None:
            conditions[f"seq {'>' if order == 'asc' else '<'} ?"] = self._place_of(after, owner)
        if state is not None:
            conditions["state = ?"] = str(state)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        tail = f"{where} ORDER BY seq {'ASC' if order == 'asc' else 'DESC'} LIMIT ?"
        return self._jobs(tail, *conditions.values(), limit)

    def waiting(self) -> list[Job]:
        """The queued jobs that are not held, in the order in which `take_next` takes them."""
        return [job_table.job_of(row) for row in self._waiting(job_table.COLUMNS)]

    def waiting_clips(self) -> list[tuple[str, SamplingConfig]]:
        """Id and parameters of the jobs in `waiting`; takes a fraction of its time."""
        return [(id, job_table.sampling_of(text)) for id, text in self._waiting("id, sampling")]

    def _waiting(self, columns: str) -> list[tuple[Any, ...]]:
        query = f"SELECT due, seq, owner, {columns} FROM jobs"
        where = "WHERE state = 'queued' AND held IS NULL"
        with self._file.read() as database:
            rows = database.execute(f"{query} {where} ORDER BY due, seq").fetchall()
            spent = job_table.turns_of_owners(database)
        return [row[3:] for row in job_table.in_turn(rows, spent)]

    def running(self) -> list[Job]:
        """The jobs in progress, in the order in which they were taken."""
        return self._jobs("WHERE state = 'in_progress' ORDER BY started_at, turn, seq")

    def take_next(self) -> Job | None:
        """QUEUED to IN_PROGRESS for the next job that is not held; None if there is none."""
        with self._changes() as (database, discard):
            seq = job_table.take_next(database)
            if seq is None:
                return None
            job = job_table.job_of(database.execute(f"{_JOBS} WHERE seq = ?", (seq,)).fetchone())
            discard(job.id)
            return job

    def put_back(self, id: str, *, counts: bool) -> bool:
        """IN_PROGRESS to QUEUED, at the place that the job had; CANCELLED if that was asked for.

        It `counts` as an attempt if ranks died during it.
        """
        with self._changes() as (database, discard):
            discard(id)
            return job_table.put_back(database, id, counts=counts)

    def complete(self, id: str, metadata: dict[str, Any]) -> bool:
        """IN_PROGRESS to COMPLETED, with the clip's JSON."""
        change = "state = 'completed', finished_at = ?, metadata = ?, error = NULL"
        text = job_table.json_text(metadata)
        return self._change(id, change, time.time(), text, states=[JobState.IN_PROGRESS])

    def fail(self, id: str, error: dict[str, Any] | BaseException) -> bool:
        """IN_PROGRESS to FAILED, with an exception or what `errors.error_to_dict` makes of it."""
        about = error_to_dict(error) if isinstance(error, BaseException) else error
        change = "state = 'failed', finished_at = ?, error = ?"
        text = job_table.json_text(about)
        return self._change(id, change, time.time(), text, states=[JobState.IN_PROGRESS])

    def cancel_waiting(self, id: str) -> bool:
        """QUEUED to CANCELLED."""
        return self._cancel(id, JobState.QUEUED)

    def ask_to_cancel(self, id: str) -> bool:
        """Mark a job in progress, also for the next start of the server; the state stays."""
        return self._change(id, "cancel_asked = 1", states=[JobState.IN_PROGRESS])

    def cancelled(self, id: str) -> bool:
        """IN_PROGRESS to CANCELLED, once the ranks have let go of the job."""
        return self._cancel(id, JobState.IN_PROGRESS)

    def set_proof(self, id: str, proof: Proof, reason: str | None = None) -> bool:
        """Set the proof of a completed job, and its reason."""
        change = "proof = ?, proof_reason = ?"
        return self._change(id, change, proof, reason, states=[JobState.COMPLETED])

    def set_promise(self, id: str, seconds: float) -> bool:
        """Set the ETA that the client was given."""
        return self._change(id, "promised_seconds = ?", seconds, states=list(JobState))

    def remove(self, id: str) -> bool:
        """Remove the row of a job in a final state; `retention.remove_job` also removes files."""
        with self._changes() as (database, discard):
            discard(id)
            marks = ", ".join("?" * len(_FINAL))
            query = f"DELETE FROM jobs WHERE id = ? AND state IN ({marks})"
            return database.execute(query, (id, *_FINAL)).rowcount == 1

    def counts(self, *, with_held: bool = False) -> dict[JobState, int]:
        """The number of jobs in each state; without queued ones that this server cannot make."""
        where = "" if with_held else "WHERE state != 'queued' OR held IS NULL"
        with self._file.read() as database:
            query = f"SELECT state, count(*) FROM jobs {where} GROUP BY state"
            found = dict(database.execute(query))
        return {state: found.get(str(state), 0) for state in JobState}

    def num_open(self) -> int:
        """The number of jobs that are queued, and not held, or in progress."""
        with self._file.read() as database:
            return int(database.execute(f"SELECT count(*) FROM jobs WHERE {_OPEN}").fetchone()[0])

    def oldest_waiting(self) -> float | None:
        """The time of the oldest request that is queued and not held; None if there is none."""
        query = "SELECT min(created_at) FROM jobs WHERE state = 'queued' AND held IS NULL"
        with self._file.read() as database:
            found: float | None = database.execute(query).fetchone()[0]
            return found

    def hold(self, judge: Callable[[Job], Job]) -> list[Job]:
        """At the start of a server: hold the queued jobs that it cannot make, and no others.

        Returns the held jobs. `judge` returns a job with the right `held`, `model` and `weights`.
        """
        jobs = self._jobs("WHERE state = 'queued' ORDER BY seq")
        judged = [judge(job) for job in jobs]
        change = "UPDATE jobs SET held = ?, model = ?, weights = ? WHERE id = ?"
        with self._changes() as (database, discard):
            for job in (job for job, before in zip(judged, jobs, strict=True) if job != before):
                discard(job.id)
                database.execute(change, (job.held, job.model, job.weights, job.id))
        return [job for job in judged if job.held is not None]

    def recover(self) -> list[Job]:
        """At the start of a server: put back and return every job in progress, as it is now."""
        with self._changes() as (database, discard):
            ids = database.execute("SELECT id FROM jobs WHERE state = 'in_progress' ORDER BY seq")
            found = [id for (id,) in ids.fetchall()]
            for id in found:
                discard(id)
                job_table.put_back(database, id, counts=False)
            rows = [database.execute(f"{_JOBS} WHERE id = ?", (id,)).fetchone() for id in found]
            return [job_table.job_of(row) for row in rows]

    def to_prove(self) -> list[str]:
        """The ids of the jobs whose proof is `running`, or was when a server ended."""
        with self._file.read() as database:
            query = "SELECT id FROM jobs WHERE proof = 'running' ORDER BY seq"
            return [id for (id,) in database.execute(query)]

    def finished(self) -> list[FinishedJob]:
        """The jobs in final states that are not being proved, the first to finish first."""
        marks = ", ".join("?" * len(_FINAL))
        query = (
            f"SELECT id, finished_at FROM jobs WHERE state IN ({marks}) AND proof != 'running'"
            " ORDER BY finished_at, seq"
        )
        with self._file.read() as database:
            return [FinishedJob(*row) for row in database.execute(query, _FINAL)]

    def photos(self) -> dict[str, str]:
        """The name of the photograph's file of every job, by id."""
        with self._file.read() as database:
            return dict(database.execute("SELECT id, photo FROM jobs"))

    @contextlib.contextmanager
    def _changes(self) -> Iterator[tuple[sqlite3.Connection, Callable[[str], None]]]:
        """A transaction, and the function to call with the id of each job that it changes."""
        with self._cache.changes() as discard, self._file.change() as database:
            yield database, discard

    def _jobs(self, tail: str, *values: Any) -> list[Job]:
        with self._file.read() as database:
            rows = database.execute(f"{_JOBS} {tail}", values).fetchall()
        return [job_table.job_of(row) for row in rows]

    def _place_of(self, id: str, owner: str | None) -> int:
        with self._file.read() as database:
            found = database.execute("SELECT seq, owner FROM jobs WHERE id = ?", (id,)).fetchone()
        if found is None or owner not in (None, found[1]):
            raise RequestError(f"there is no job {id[:60]!r} to list the jobs after")
        return int(found[0])

    def _cancel(self, id: str, state: JobState) -> bool:
        change = "state = 'cancelled', finished_at = ?"
        return self._change(id, change, time.time(), states=[state])

    def _change(self, id: str, change: str, *values: Any, states: list[JobState]) -> bool:
        """Change the row if its state is one of `states`; whether it was."""
        marks = ", ".join("?" * len(states))
        query = f"UPDATE jobs SET {change} WHERE id = ? AND state IN ({marks})"
        with self._changes() as (database, discard):
            discard(id)
            return database.execute(query, (*values, id, *map(str, states))).rowcount == 1


def _check_limits(
    database: sqlite3.Connection, owner: str, limit: int | None, limit_of_owner: int | None
) -> None:
    query = f"SELECT owner, count(*) FROM jobs WHERE {_OPEN} GROUP BY 1"
    open_jobs = dict(database.execute(query))
    total, own = sum(open_jobs.values()), open_jobs.get(owner, 0)
    if limit is not None and total >= limit:
        raise QueueFullError(
            f"the queue is full: {total} of {limit} jobs are open",
            "try again later",
            details={"open": total, "limit": limit},
        )
    if limit_of_owner is not None and own >= limit_of_owner:
        raise QueueFullError(
            f"the key {owner!r} has {own} open jobs, and its limit is {limit_of_owner}",
            "wait for one of them, or cancel one",
            details={"open": own, "limit": limit_of_owner, "owner": owner},
        )


def _same_request(found: Job, job: Job) -> Job:
    """`found`, if `job` asks for the same clip."""
    names = ("photo_sha256", "prompt", "negative_prompt", "seed", "sampling", "priority")
    for name in names:
        if getattr(found, name) != getattr(job, name):
            raise RequestError(
                f"the idempotency key {str(job.idempotency_key)[:60]!r} was used for a request "
                f"with another {name.removesuffix('_sha256').replace('_', ' ')}",
                "use a new key for a new request",
                details={"id": found.id, "field": name},
            )
    return found
