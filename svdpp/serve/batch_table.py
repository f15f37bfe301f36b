"""Database tables of batches and their input files, beside the queue's table of jobs.

A batch has a row in `batches`, and each line of the batch becomes a row of `jobs`. The row of the
batch stores only what the jobs do not show, such as the number of lines that are jobs already, and
whether the batch failed or was cancelled. Other values, such as the number of completed lines, are
computed from the jobs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from svdpp.errors import OutputError, RequestError
from svdpp.serve.clock import uptime
from svdpp.serve.job import COLUMNS, UPLOADS_FOLDER, Job, JobState, job_from_row
from svdpp.serve.queue import QUEUED, JobQueue, QueueFullError
from svdpp.serve.queue_sql import insert_job


class BatchState(StrEnum):
    """State in the row of a batch. The status in the API also depends on the batch's jobs."""

    VALIDATING = "validating"
    """State until all lines have been checked and have become jobs."""
    IN_PROGRESS = "in_progress"
    """State after all lines have become jobs, even when all of these jobs have ended."""
    FAILED = "failed"
    """State of a batch with a fault in a line. No further line becomes a job. Jobs of earlier lines
    are cancelled."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch of requests for clips. Times are unix seconds by the queue's clock.

    Args:
        model_key: Key of the model for the batch's jobs; see `Job.model_key`.
        stored_at: Time at which the last line became a job; None: some lines are not jobs yet.
        cancelled_at: Time at which the owner cancelled the batch; None: it is not cancelled.
        input_file: Id of the file with the lines. The file is removed once all lines are jobs, or
            the batch has failed or was cancelled.
        total: Number of lines.
        stored: Number of lines that are jobs. Lines become jobs in order.
        loras: SHA-256 of each LoRA in the lines, by name, recorded when the batch was accepted.
        errors: Faults that made the batch fail, as JSON objects; see `schemas.BatchFault`.
    """

    id: str
    owner: str = ""
    model_key: str
    state: BatchState = BatchState.VALIDATING
    created_at: float
    stored_at: float | None = None
    failed_at: float | None = None
    cancelled_at: float | None = None
    input_file: str
    input_sha256: str
    total: int
    stored: int = 0
    completion_window: str = "24h"
    metadata: dict[str, str] = field(default_factory=dict)
    loras: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """File with the lines of a batch, which a client has uploaded.

    Args:
        name: File name from the client. It is only shown, and never used as a path.
        bytes: Size of the file in bytes.
        created_at: Unix seconds by the queue's clock.
    """

    id: str
    owner: str = ""
    name: str
    bytes: int
    sha256: str
    created_at: float

    def path(self, folder: Path) -> Path:
        """Return the path of the uploaded file in a data folder."""
        return folder / UPLOADS_FOLDER / f"{self.id}.jsonl"


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Number of a batch's jobs by state, and the unix time at which the last job ended."""

    by_state: dict[JobState, int] = field(default_factory=dict)
    last_end: float | None = None
    """Unix time at which the last job ended; None or 0: no job has ended."""

    @property
    def open(self) -> int:
        """Number of the batch's jobs that are queued or in progress."""
        return sum(number for state, number in self.by_state.items() if not state.is_final)

    @property
    def completed(self) -> int:
        """Number of the batch's completed jobs."""
        return self.by_state.get(JobState.COMPLETED, 0)

    @property
    def failed(self) -> int:
        """Number of the batch's jobs that ended without a clip: failed and cancelled jobs."""
        ended = (JobState.FAILED, JobState.CANCELLED)
        return sum(self.by_state.get(state, 0) for state in ended)


_BATCH_JSON = ("metadata", "loras", "errors")
_BATCH_COLUMNS = tuple(field.name for field in fields(Batch))
_FILE_COLUMNS = tuple(field.name for field in fields(BatchFile))
_SELECT = f"SELECT {', '.join(_BATCH_COLUMNS)} FROM batches"
_SELECT_FILE = f"SELECT {', '.join(_FILE_COLUMNS)} FROM batch_files"
_JOB_COLUMNS = ", ".join(COLUMNS)
# `finished_at` is never before `created_at`, even if the clock was set back. LIMIT keeps the
# transaction short.
_CANCEL_WAITING = """
UPDATE jobs SET state = 'cancelled',
    finished_at = CASE WHEN clock() < created_at THEN created_at ELSE clock() END
WHERE state = 'queued' AND id IN (
    SELECT id FROM jobs WHERE batch_id = ? AND state = 'queued' ORDER BY batch_line LIMIT 500)
RETURNING id
"""
_CANCEL = """
UPDATE batches SET cancelled_at = clock() WHERE id = ? AND cancelled_at IS NULL
    AND state != 'failed' AND (state = 'validating' OR EXISTS (
        SELECT 1 FROM jobs WHERE batch_id = batches.id AND state IN ('queued', 'in_progress')))
"""
# This statement changes no row if the batch has changed since it was read: another server may have
# stored the same lines, or the owner may have cancelled the batch.
_ADD_LINES = """
UPDATE batches SET stored = stored + ?,
    state = CASE WHEN stored + ? >= total THEN 'in_progress' ELSE state END,
    stored_at = CASE WHEN stored + ? >= total THEN clock() END
WHERE id = ? AND state = 'validating' AND cancelled_at IS NULL AND stored = ? RETURNING id
"""
_FAIL = """
UPDATE batches SET state = 'failed', failed_at = clock(), errors = ?
WHERE id = ? AND state = 'validating' RETURNING id
"""
# Removes old failed batches, and batches that no longer have jobs or never had any. Jobs are
# removed at the request of their owner, or because of their age. A batch never has jobs if it was
# cancelled before a line became a job.
_REMOVE_ENDED = """
DELETE FROM batches WHERE failed_at < ?
    OR ((state = 'in_progress' OR cancelled_at < ?)
        AND NOT EXISTS (SELECT 1 FROM jobs WHERE batch_id = batches.id))
RETURNING id
"""
# Number of each owner's open lines: jobs that have not ended, and lines that are not jobs yet. `{}`
# is an SQL condition that says which jobs count, such as only the jobs that belong to batches.
_OPEN_LINES = """
SELECT owner, count(*) FROM jobs
WHERE state IN ('queued', 'in_progress') AND {} GROUP BY owner
UNION ALL SELECT owner, sum(total - stored) FROM batches
WHERE state = 'validating' AND cancelled_at IS NULL GROUP BY owner
"""


class BatchTable:
    """Tables of the batches in a queue, and of their files. Any thread may call any method.

    Each change is durable when its method returns. Every method raises OutputError if the queue
    cannot be used.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._backend = queue.backend

    # --- files with the lines of batches ----------------------------------------------------------

    def add_file(self, file: BatchFile, max_bytes: int) -> None:
        """Store the row of an uploaded file of batch lines. The content must be stored first.

        Args:
            file: File to add.
            max_bytes: Maximum bytes of all files of the file's owner.

        Raises:
            QueueFullError: The owner's files would have more than `max_bytes`.
        """
        with self._backend.transaction(advisory_lock="add") as connection:
            query = "SELECT coalesce(sum(bytes), 0) FROM batch_files WHERE owner = ?"
            ((stored,),) = connection.execute(query, (file.owner,)).fetchall()
            if stored + file.bytes > max_bytes:
                details = {"open": int(stored), "limit": max_bytes, "owner": file.owner}
                raise QueueFullError("too many files", details=details)
            values = [getattr(file, name) for name in _FILE_COLUMNS]
            marks = ", ".join("?" for _ in values)
            names = ", ".join(_FILE_COLUMNS)
            connection.execute(f"INSERT INTO batch_files ({names}) VALUES ({marks})", tuple(values))

    def file(self, id: str) -> BatchFile | None:
        """Return the uploaded file of batch lines with an id; None: no such file exists."""
        rows = self._backend.fetch_all(f"{_SELECT_FILE} WHERE id = ?", id)
        return next((_file_of(row) for row in rows), None)

    def file_ids(self) -> set[str]:
        """Return the ids of all uploaded files with lines of batches."""
        return {id for (id,) in self._backend.fetch_all("SELECT id FROM batch_files")}

    def remove_file(self, id: str) -> bool:
        """Remove the row of a batch file; return whether the row existed.

        The file's content must be removed first.
        """
        return bool(self._change("DELETE FROM batch_files WHERE id = ? RETURNING id", id))

    def files_before(self, before: float) -> list[BatchFile]:
        """Return the batch files older than `before` that no `validating` batch reads.

        Args:
            before: Unix time in seconds.
        """
        query = (
            f"{_SELECT_FILE} WHERE created_at < ? AND NOT EXISTS (SELECT 1 FROM batches "
            "WHERE input_file = batch_files.id AND state = 'validating' AND cancelled_at IS NULL)"
        )
        return [_file_of(row) for row in self._backend.fetch_all(query, before)]

    # --- changes of batches -----------------------------------------------------------------------

    def add(self, batch: Batch, max_open: int, max_open_of_owner: int | None) -> Batch:
        """Store and return a new batch, or return the owner's batch with the same idempotency key.

        A line of a batch is open until its job has ended.

        Args:
            batch: New batch.
            max_open: Maximum number of open lines of all batches together.
            max_open_of_owner: Maximum number of the owner's open lines, plus the owner's unfinished
                jobs that belong to no batch; None: no limit.

        Raises:
            QueueFullError: A limit would be exceeded.
            RequestError: The idempotency key was used for another batch.
        """
        with self._backend.transaction(advisory_lock="add") as connection:
            query = f"{_SELECT} WHERE owner = ? AND idempotency_key = ?"
            for row in connection.execute(query, (batch.owner, batch.idempotency_key)).fetchall():
                return check_same_batch(_batch_of(row), batch)
            rows = connection.execute(_OPEN_LINES.format("batch_id IS NOT NULL")).fetchall()
            total = int(sum(number for _, number in rows))
            if total + batch.total > max_open:
                details = {"open": total, "limit": max_open, "lines": batch.total}
                raise QueueFullError("the queue is full", details=details)
            if max_open_of_owner is not None:
                rows = connection.execute(_OPEN_LINES.format("true")).fetchall()
                owned = int(sum(number for name, number in rows if name == batch.owner))
                if owned + batch.total > max_open_of_owner:
                    details = {"open": owned, "limit": max_open_of_owner, "lines": batch.total}
                    raise QueueFullError(
                        "the key has too many open clips", details={**details, "owner": batch.owner}
                    )
            values = {name: getattr(batch, name) for name in _BATCH_COLUMNS}
            values |= {name: json.dumps(values[name]) for name in _BATCH_JSON}
            values["state"] = str(batch.state)
            marks = ", ".join("?" for _ in values)
            insert = f"INSERT INTO batches ({', '.join(values)}) VALUES ({marks})"
            connection.execute(insert, tuple(values.values()))
        return batch

    def add_lines(self, batch: Batch, jobs: Sequence[Job], *, until: float = math.inf) -> bool:
        """Store jobs for the next lines of a batch: all of them, or none.

        Args:
            batch: Batch as last read from the table.
            jobs: Jobs for the next lines. The first job is for the line with index `batch.stored`.
            until: Latest time, in seconds of `clock.uptime`, at which the jobs may be stored. After
                this time, another server may have removed the jobs' images as unneeded files.

        Returns:
            Whether the jobs were stored. False: the batch has changed since it was read.

        Raises:
            OutputError: The time `until` has passed, or the queue cannot be used.
        """
        number = len(jobs)
        with self._backend.transaction() as connection:
            values = number, number, number, batch.id, batch.stored
            if not connection.execute(_ADD_LINES, values).fetchall():
                return False
            if uptime() > until:
                raise OutputError(
                    "the batch took too long to store: its files may have been removed"
                )
            for job in jobs:
                insert_job(connection, job)
            self._queue.notify(connection, QUEUED)
        return True

    def fail(self, id: str, errors: Sequence[dict[str, Any]]) -> bool:
        """Set a `validating` batch to failed, with its faults; return whether the state changed.

        Args:
            id: Id of the batch.
            errors: Faults of the batch's lines, as JSON values.
        """
        return bool(self._change(_FAIL, json.dumps(errors), id))

    def request_cancel(self, id: str) -> bool:
        """Mark a batch that has not ended as cancelled, so that no further line becomes a job.

        Returns:
            Whether the batch was marked. False: it has ended, or was marked before.
        """
        return bool(self._change(f"{_CANCEL} RETURNING id", id))

    def cancel_waiting(self, id: str) -> list[str]:
        """Cancel up to 500 queued jobs of a batch; return their ids, empty if none is queued."""
        return [job for (job,) in self._change(_CANCEL_WAITING, id)]

    def running(self, id: str) -> list[str]:
        """Return the ids of the jobs of a batch that are in progress."""
        query = "SELECT id FROM jobs WHERE batch_id = ? AND state = 'in_progress'"
        return [job for (job,) in self._backend.fetch_all(query, id)]

    def half_cancelled(self) -> list[str]:
        """Return the ids of cancelled and failed batches that still have queued jobs.

        This happens if a server is killed while it cancels the jobs of a batch.
        """
        query = (
            "SELECT id FROM batches WHERE (cancelled_at IS NOT NULL OR state = 'failed') "
            "AND EXISTS (SELECT 1 FROM jobs WHERE batch_id = batches.id AND state = 'queued')"
        )
        return [id for (id,) in self._backend.fetch_all(query)]

    def remove_ended(self, before: float) -> list[str]:
        """Remove rows of old failed batches and of ended batches without jobs; return their ids.

        Args:
            before: Unix time. Batches that failed after this time stay, and so do `validating`
                batches that were cancelled after this time.
        """
        return [id for (id,) in self._change(_REMOVE_ENDED, before, before)]

    def _change(self, change: str, *values: Any) -> list[Any]:
        with self._backend.transaction() as connection:
            return connection.execute(change, values).fetchall()

    # --- queries of batches -----------------------------------------------------------------------

    def get(self, id: str) -> Batch | None:
        """Return the batch with an id; None: no such batch exists."""
        return next(iter(self._batches("WHERE id = ?", id)), None)

    def find(self, owner: str, *, idempotency_key: str) -> Batch | None:
        """Return the batch with an owner's idempotency key; None: no such batch exists."""
        where = "WHERE owner = ? AND idempotency_key = ?"
        return next(iter(self._batches(where, owner, idempotency_key)), None)

    def find_by_file(self, file_id: str) -> Batch | None:
        """Return the newest batch with an input file; None: no such batch exists.

        Args:
            file_id: Id of the file with the batch's lines.
        """
        where = "WHERE input_file = ? ORDER BY created_at DESC LIMIT 1"
        return next(iter(self._batches(where, file_id)), None)

    def page(self, owner: str, limit: int, after: str | None) -> list[Batch]:
        """Return a page of an owner's batches, the newest first.

        Args:
            owner: Owner of the batches.
            limit: Maximum number of batches.
            after: Id of the batch that the page follows; None: the first page.
        """
        where, values = "owner = ?", [owner]
        if after is not None:
            where += " AND (created_at, id) < (SELECT created_at, id FROM batches WHERE id = ?)"
            values.append(after)
        tail = f"WHERE {where} ORDER BY created_at DESC, id DESC LIMIT {limit:d}"
        return self._batches(tail, *values)

    def validating(self, model_key: str) -> list[Batch]:
        """Return the `validating` batches of a model, the oldest first.

        Args:
            model_key: Identity of the model; see `Job.model_key`.
        """
        where = "WHERE state = 'validating' AND cancelled_at IS NULL AND model_key = ?"
        return self._batches(f"{where} ORDER BY created_at, id", model_key)

    def counts(self, ids: Sequence[str]) -> dict[str, BatchCounts]:
        """Return each batch's number of jobs in each state, by batch id.

        Jobs that their owner has removed are not counted.

        Args:
            ids: Ids of the batches.
        """
        marks = ", ".join("?" for _ in ids)
        query = (
            "SELECT batch_id, state, count(*), max(finished_at) FROM jobs "
            f"WHERE batch_id IN ({marks}) AND NOT remove_asked GROUP BY batch_id, state"
        )
        found: dict[str, dict[JobState, int]] = {id: {} for id in ids}
        ends: dict[str, float] = {}
        for id, state, number, end in self._backend.fetch_all(query, *ids) if ids else ():
            found[id][JobState(state)] = number
            ends[id] = max(ends.get(id, 0.0), end or 0.0)
        return {
            id: BatchCounts(by_state=states, last_end=ends.get(id)) for id, states in found.items()
        }

    def num_open_lines(self) -> int:
        """Return the number of open lines of all batches. A line is open until its job ends."""
        rows = self._backend.fetch_all(_OPEN_LINES.format("batch_id IS NOT NULL"))
        return int(sum(number for _, number in rows))

    def jobs(self, id: str, states: Iterable[JobState], page: int = 200) -> Iterator[Job]:
        """Yield the jobs of a batch in certain states, in the order of their lines.

        Args:
            id: Id of the batch.
            states: States of the jobs to yield.
            page: Number of jobs that one query reads.
        """
        states_in = ", ".join(repr(str(state)) for state in states)
        query = (
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE batch_id = ? AND batch_line > ? "
            f"AND NOT remove_asked AND state IN ({states_in}) ORDER BY batch_line LIMIT {page:d}"
        )
        after = -1
        while rows := self._backend.fetch_all(query, id, after):
            for row in rows:
                job = job_from_row(row)
                after = job.batch_line or 0
                yield job

    def _batches(self, tail: str, *values: Any) -> list[Batch]:
        return [_batch_of(row) for row in self._backend.fetch_all(f"{_SELECT} {tail}", *values)]


def check_same_batch(existing: Batch, batch: Batch) -> Batch:
    """Check that two batches with the same idempotency key are equal; return the existing one.

    Args:
        existing: Batch that an earlier request has stored.
        batch: Batch of the new request.

    Raises:
        RequestError: The batches differ in their lines, `metadata` or `completion_window`.
    """
    for name in ("input_sha256", "metadata", "completion_window"):
        if getattr(existing, name) != getattr(batch, name):
            what = "file of lines" if name == "input_sha256" else name.replace("_", " ")
            raise RequestError(
                f"the idempotency key {str(batch.idempotency_key)[:60]!r} was used for a batch "
                f"with another {what}",
                "use a new key for a new batch",
                details={"id": existing.id},
            )
    return existing


def _batch_of(row: tuple[Any, ...]) -> Batch:
    values = dict(zip(_BATCH_COLUMNS, row, strict=True))
    values |= {name: json.loads(values[name]) for name in _BATCH_JSON}
    return Batch(**{**values, "state": BatchState(values["state"])})


def _file_of(row: tuple[Any, ...]) -> BatchFile:
    return BatchFile(**dict(zip(_FILE_COLUMNS, row, strict=True)))
