"""Queries of the queue's jobs.

Servers that share a queue may run different versions of svdpp. Queries leave out jobs that only a
newer svdpp can read.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loguru import logger

from svdpp.config import SamplingConfig
from svdpp.serve import queue_sql as sql
from svdpp.serve.job import Job, JobState, UnreadableJobError, job_from_row, parse_sampling
from svdpp.serve.sqlite import SqliteBackend

if TYPE_CHECKING:
    from svdpp.serve.postgres import PostgresBackend

# Maximum number of entries in each of two lists: sampling parameters that this server's ranks
# cannot use, and ids of jobs that this svdpp cannot read. Longer lists lose their oldest entries.
_MAX_REMEMBERED = 1000


class JobQueries:
    """Queries of the jobs in a queue. Any thread may call any method.

    Args:
        backend: Database with the rows of the jobs.
        is_shared: Whether other servers may also claim jobs of the queue.
    """

    def __init__(self, backend: SqliteBackend | PostgresBackend, *, is_shared: bool) -> None:
        self.backend = backend
        """Database with the rows of the jobs."""
        self.is_shared = is_shared
        """Whether other servers may also claim jobs of this queue."""
        self.server = secrets.token_hex(8)
        """Random id of this server."""
        self.model_key: str | None = None
        """`Job.model_key` of the jobs that this server may claim. None: jobs of all models."""
        # Sampling parameters of jobs that this server's ranks cannot make: texts of the column
        # `sampling`. Queries for queued jobs leave out all jobs with these parameters.
        self._incompatible = deque[str](maxlen=_MAX_REMEMBERED)
        # Ids of jobs that a newer svdpp has stored and this svdpp cannot read.
        self._unreadable = deque[str](maxlen=_MAX_REMEMBERED)

    @property
    def num_unreadable(self) -> int:
        """Number of skipped jobs that a newer svdpp has stored and this svdpp cannot read."""
        return len(self._unreadable)

    def _skip_unreadable(self, error: UnreadableJobError) -> None:
        """Remember a job that only a newer svdpp can read; log only the first such job."""
        id = error.details["id"]
        if id not in self._unreadable:
            if not self._unreadable:
                logger.warning(
                    "{}; this server leaves such jobs to servers with a newer svdpp: {}",
                    error,
                    error.hint,
                )
            self._unreadable.append(id)

    def _read(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Job]:
        """Yield the jobs of database rows; skip rows that only a newer svdpp can read."""
        for row in rows:
            try:
                yield job_from_row(row)
            except UnreadableJobError as error:
                self._skip_unreadable(error)

    @property
    def _runnable(self) -> tuple[str, list[str]]:
        """SQL condition for jobs that this server can make, and the values of its placeholders.

        Other jobs stay in the queue until they are claimed by a server that can make them.
        """
        incompatible = set(self._incompatible.copy())
        runnable, values = "true", list[str]()
        if self.model_key is not None:
            runnable = f"{sql.MODEL_KEY} = ?"
            values = [self.model_key]
        if incompatible:
            runnable += f" AND sampling NOT IN ({sql.placeholders(incompatible)})"
        unreadable = self._unreadable.copy()
        if unreadable:
            runnable += f" AND id NOT IN ({sql.placeholders(unreadable)})"
        return runnable, [*values, *incompatible, *unreadable]

    @property
    def _open(self) -> tuple[str, list[str]]:
        """SQL condition for open jobs, and the values of its placeholders.

        Open jobs are the jobs in progress, and the queued jobs that this server can make.
        """
        runnable, values = self._runnable
        return f"(state = 'in_progress' OR state = 'queued' AND {runnable})", values

    def get(self, id: str) -> Job | None:
        """Return the job with an id; None: it does not exist, or only a newer svdpp can read it."""
        return next(iter(self._jobs("WHERE id = ?", id)), None)

    def is_unreadable(self, id: str, owner: str) -> bool:
        """Whether the owner has a job with this id that only a newer svdpp can read."""
        query = f"SELECT {sql.COLUMNS} FROM jobs WHERE id = ? AND owner = ?"
        rows = self.backend.fetch_all(query, id, owner)
        return bool(rows) and not list(self._read(rows))

    def page(
        self,
        *,
        owner: str,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        states: Sequence[JobState] = (),
        batch_id: str | None = None,
    ) -> list[Job]:
        """Return a page of an owner's jobs, ordered by the time of request, without removed jobs.

        Args:
            owner: Owner of the jobs.
            limit: Maximum number of jobs.
            after: Id of the job that the page follows; None: the first page.
            order: `desc`: the newest job first; `asc`: the oldest first.
            states: States of the jobs; empty: all states.
            batch_id: Id of the jobs' batch; None: jobs in and outside of batches.
        """
        states_are = sql.state_in(states) if states else "true"
        where, values = f"owner = ? AND NOT remove_asked AND {states_are}", [owner]
        if batch_id is not None:
            where += " AND batch_id = ?"
            values.append(batch_id)
        if after is not None:
            beyond = ">" if order == "asc" else "<"
            where += f" AND seq {beyond} (SELECT seq FROM jobs WHERE id = ?)"
            values.append(after)
        found: list[Job] = []
        query = f"SELECT {sql.COLUMNS} FROM jobs WHERE {where} ORDER BY seq {order}"
        query += " LIMIT ? OFFSET ?"
        offset = 0
        # Rows that cannot be read are skipped, and more rows are read instead. Clients would take a
        # page with fewer than `limit` jobs for the last page.
        while len(found) < limit:
            rows = self.backend.fetch_all(query, *values, limit, offset)
            found += self._read(rows)
            offset += len(rows)
            if len(rows) < limit:
                break
        return found[:limit]

    def completed_ids(self, owner: str, limit: int) -> list[str]:
        """Return the ids of an owner's completed jobs, at most `limit`, by the time of request."""
        query = (
            "SELECT id FROM jobs WHERE owner = ? AND state = 'completed' AND NOT remove_asked "
            "ORDER BY seq LIMIT ?"
        )
        return [id for (id,) in self.backend.fetch_all(query, owner, limit)]

    def waiting(self) -> list[tuple[str, SamplingConfig]]:
        """Return id and sampling parameters of each queued job that this server may claim.

        The job that is claimed next comes first.
        """
        runnable, values = self._runnable
        waiting = []
        for id, text in self.backend.fetch_all(sql.ROUND_ROBIN.format(runnable), *values):
            # Jobs that cannot be read are left out; `claim` counts and reports them.
            with contextlib.suppress(ValueError, TypeError, LookupError):
                waiting.append((id, parse_sampling(text)))
        return waiting

    def running(self) -> list[Job]:
        """Return the jobs in progress on all servers, in the order of their claims."""
        return self._jobs("WHERE state = 'in_progress' ORDER BY started_at, turn, seq")

    def claimed(self) -> list[Job]:
        """Return the jobs in progress that this server has claimed, in the order of the claims."""
        tail = "WHERE state = 'in_progress' AND server = ? ORDER BY started_at, turn, seq"
        return self._jobs(tail, self.server)

    def has_unfinished(self) -> bool:
        """Whether any job has not ended, including jobs that this server cannot make."""
        unfinished = sql.state_in(state for state in JobState if not state.is_final)
        return bool(self.backend.fetch_all(f"SELECT 1 FROM jobs WHERE {unfinished} LIMIT 1"))

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs by state, without queued jobs that this server cannot make."""
        runnable, values = self._runnable
        query = (
            f"SELECT state, count(*) FROM jobs WHERE state != 'queued' OR {runnable} GROUP BY state"
        )
        numbers = dict(self.backend.fetch_all(query, *values))
        return {state: numbers.get(str(state), 0) for state in JobState}

    def num_open(self) -> int:
        """Return the number of open jobs outside batches.

        Open jobs are in progress, or are queued and runnable on this server.
        """
        is_open, values = self._open
        query = f"SELECT count(*) FROM jobs WHERE {is_open} AND batch_id IS NULL"
        return int(self.backend.fetch_all(query, *values)[0][0])

    def oldest_waiting(self) -> float | None:
        """Return the unix time at which the oldest queued job was requested; None: none is queued.

        Jobs that this server cannot make do not count.
        """
        runnable, values = self._runnable
        query = f"SELECT min(created_at) FROM jobs WHERE state = 'queued' AND {runnable}"
        ((oldest,),) = self.backend.fetch_all(query, *values)
        return None if oldest is None else float(oldest)

    def pending_verifications(self) -> dict[str, str]:
        """Return the owner of each job whose verification is requested or runs, by the job's id.

        The oldest job comes first.
        """
        condition, values = self._verifiable
        query = f"SELECT id, owner FROM jobs WHERE {condition} AND proof = 'running' ORDER BY seq"
        return dict(self.backend.fetch_all(query, *values))

    def unverified(self) -> list[str]:
        """Return the ids of completed jobs that have a file and no verification, newest first."""
        # The pattern matches a key of the JSON, and never a part of a prompt, because quotes inside
        # a JSON string are escaped.
        has_file = """metadata LIKE '%"file_sha256": "%'"""
        condition, values = self._verifiable
        unverified = f"{condition} AND state = 'completed' AND proof = 'none' AND {has_file}"
        return self._ids(f"{unverified} ORDER BY seq DESC", *values)

    @property
    def _verifiable(self) -> tuple[str, list[str]]:
        """SQL condition for jobs that this server can verify, and the condition's values."""
        if not self.is_shared or self.model_key is None:
            return "true", []
        return f"{sql.MODEL_KEY} = ?", [self.model_key]

    def pending_removals(self) -> list[str]:
        """Return the ids of ended jobs that their owners removed while ranks worked on them."""
        return self._ids(f"remove_asked AND {sql.IS_FINAL} ORDER BY seq")

    def finished(self, before: float = math.inf) -> dict[str, float]:
        """Return the unix time at which each job in a final state ended, by job id, oldest first.

        Args:
            before: Unix time; jobs that ended later are left out.
        """
        where = f"{sql.IS_FINAL} AND finished_at < ? ORDER BY finished_at, seq"
        return dict(
            self.backend.fetch_all(f"SELECT id, finished_at FROM jobs WHERE {where}", before)
        )

    def clip_tokens(self) -> dict[str, int | None]:
        """Return the fencing token of the claim that makes or made each job's clip, by job id.

        The token is a part of the clip's file name. It is None if the job has no clip.
        """
        token = "CASE WHEN state IN ('in_progress', 'completed') THEN token END"
        return dict(self.backend.fetch_all(f"SELECT id, {token} FROM jobs"))

    def servers(self) -> list[dict[str, Any]]:
        """Return the description that each server last reported to the queue.

        Two values are added: the server's `id`, and `seen_seconds`, the age of the description.
        """
        rows = self.backend.fetch_all(
            "SELECT id, about, clock() - seen_at FROM servers ORDER BY id"
        )
        return [
            {**json.loads(description), "id": id, "seen_seconds": seen}
            for id, description, seen in rows
        ]

    def _ids(self, where: str, *values: Any) -> list[str]:
        return [
            id for (id,) in self.backend.fetch_all(f"SELECT id FROM jobs WHERE {where}", *values)
        ]

    def _jobs(self, tail: str, *values: Any) -> list[Job]:
        rows = self.backend.fetch_all(f"SELECT {sql.COLUMNS} FROM jobs {tail}", *values)
        return list(self._read(rows))
