"""Queue of jobs: durable changes of a job's state, and queries.

Every change lists the states that a job may have before the change, so a late change has no effect.
Owners take turns: the next job is from the owner whose last job was claimed longest ago. An owner's
`turn` is 0 before its first job. With each claimed job, the owner's `turn` becomes the largest of
all owners.

A job in progress is claimed by one server. In a queue that servers share, a claim is a lease. If
the server does not renew the lease, the claim ends, and another server can claim the job. Each
claim increments the job's fencing token. Every change of a claimed job has to give the claim's
token. In this example with a lease of 2 s, server A claims a job, renews the claim once, and hangs:

     time  call                     row: state, token, server     effect
    0.1 s  A: claim()               in_progress  1  A             A writes ID-1.mp4
    1.1 s  A: renew()               in_progress  1  A             the lease ends at 3.1 s
    3.3 s  B: requeue_expired()     queued       1  -
    3.3 s  B: claim()               in_progress  2  B             B writes ID-2.mp4
    3.3 s  A: renew()               in_progress  2  B             reports the claim as lost
    3.4 s  A: complete(token=1)     in_progress  2  B             False: nothing changes
    3.4 s  B: complete(token=2)     completed    2  B             True
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loguru import logger

from svdpp.config import SamplingConfig
from svdpp.errors import OutputError, RankError, RequestError, SvdppError, error_to_dict
from svdpp.serve import queue_sql as sql
from svdpp.serve.clock import check_skew, uptime
from svdpp.serve.job import (
    Job,
    JobState,
    UnreadableJobError,
    VerificationStatus,
    column_of,
    job_from_row,
    sampling_of,
    to_json,
)
from svdpp.serve.sqlite import SqliteBackend
from svdpp.serve.store import FileStore

if TYPE_CHECKING:
    from svdpp.serve.postgres import PostgresBackend
    from svdpp.serve.queue_sql import DatabaseConnection


# Maximum number of incompatible jobs that one claim skips, and maximum number that a server
# remembers.
_MAX_TRIES, _MAX_INCOMPATIBLE = 20, 1000
# Maximum number of expired claims that one call requeues. A higher number would delay this server's
# own renewals.
_MAX_REQUEUED = 100
#: Text of the notification of a new job. Any other text is the id of a job to cancel.
QUEUED = "queued"
# Seconds after a server's last report for which the server stays in the list of servers.
_SERVER_RETENTION_SECONDS = 86400


_TOO_MANY_EXPIRED = RankError(
    f"{sql.MAX_EXPIRED_LEASES} servers died, hung or lost the queue while they had this clip",
    "their logs say why; request it again if the clip is not what ended them",
    details={"lost_claims": sql.MAX_EXPIRED_LEASES},
)


class QueueFullError(SvdppError):
    """Error for a job that is rejected because the queue, or an owner's share of it, is full.

    Its `details` are `open` and `limit`, and `owner` if the limit is that of an owner.
    """


class _IncompatibleJobError(Exception):
    """Error for a job that this server's ranks cannot make, with the row's `sampling`."""


class JobQueue:
    """Queue of jobs. Any thread may call any method. Each change is durable before it returns.

    Every method except `close` raises OutputError if the queue cannot be used. If the database does
    not answer, the error is a BackendUnavailableError, a subclass; it is then unknown whether the
    change was made.

    The jobs of one owner are ordered by `created_at - priority * AGEING_SECONDS`.

    Args:
        folder: Data folder, with the queue unless `url` is given, and the files unless `store` is.
        adopts: Whether to use a folder or database even if its files belong to another queue.
        url: URL of a PostgreSQL database that servers share. None: a SQLite file in the folder.
        store: Store of the files. None: the files are in the folder.
        lease_seconds: Seconds without a renewal after which a claim ends; only with `url`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        adopts: bool = False,
        url: str | None = None,
        store: FileStore | None = None,
        lease_seconds: float = 30.0,
    ) -> None:
        self.store = store or FileStore(folder)
        """Store of the jobs' files."""
        self.backend: SqliteBackend | PostgresBackend
        """Database with the rows of the jobs."""
        if url is None:
            self.backend = SqliteBackend(folder, adopts=adopts)
            self.store.bind_to_file(lambda: self.backend.is_there)
            if not adopts:
                self._check_rows()
        else:
            # psycopg, which this module imports, is installed by the extra `fleet`
            from svdpp.serve.postgres import PostgresBackend

            self.backend = PostgresBackend(url, self.store, adopts=adopts)
        self.is_shared = url is not None
        """Whether other servers may also claim jobs of this queue."""
        self.lease_seconds = lease_seconds if self.is_shared else 0.0
        self.server = secrets.token_hex(8)
        """Random id of this server."""
        self.model_key: str | None = None
        """`Job.model_key` of the jobs that this server may claim. None: it may claim all jobs."""
        self.incompatible_reason: Callable[[Job], str | None] = lambda _: None
        """Function that returns why this server's ranks cannot make a job, or None if they can.
        None in place of the function: they can make all jobs."""
        # Job ids and tokens of this server's open claims, except claims that it is ending now.
        self._claims: set[tuple[str, int]] = set()
        # Values of the column `sampling` with which this server's ranks cannot make a job.
        self._incompatible = deque[str](maxlen=_MAX_INCOMPATIBLE)
        # Ids of jobs that a newer svdpp has stored and this svdpp cannot read.
        self._unreadable = deque[str](maxlen=_MAX_INCOMPATIBLE)
        # Ids of clips that threads of this server have locked. They are needed, because an advisory
        # lock of PostgreSQL does not exclude other threads of the same session.
        self._locked_clips = set[str]()
        self._clips_lock = threading.Lock()

    def _check_rows(self) -> None:
        """Check that the folder has no clips without rows, as after the loss of SQLite's log.

        Raises:
            RequestError: The folder has clips although the queue has no jobs.
        """
        clips = [] if self.clips() else self.store.clips()
        if clips:
            self.close()
            raise RequestError(
                f"the data folder {str(self.store.folder)!r} has clips (number: {len(clips)}), "
                "and its queue has no video: a part of the queue is missing",
                "restore queue.sqlite3 together with its queue.sqlite3-wal, or add `adopt` to "
                "start with an empty queue: the clips go to lost+found",
                details={"clips": len(clips), "clip": min(clips)},
            )

    def close(self) -> None:
        """Close the database; do nothing the second time."""
        self.backend.close()

    @property
    def unavailable_reason(self) -> str:
        """Reason why clips can be neither stored nor begun; empty if they can.

        A store that does not answer is not considered here; see `store.unavailable_reason`.
        """
        if not self.backend.is_there:
            return "the queue was removed or replaced"
        if not self.store.is_mounted:
            return "the storage of the videos is not there"
        return "the disk is nearly full" if self.store.is_disk_low else ""

    def now(self) -> float:
        """Return the unix time of the queue's clock, from which all ages are computed.

        A shared queue uses the clock of the database, because a server's clock may be days off.
        """
        return self.backend.now()

    def check_clock(self) -> None:
        """Check that this machine's clock agrees with the queue's.

        Raises:
            ClockError: The clocks differ. Until they agree again, ages are unknown, and nothing may
                be deleted because of its age.
        """
        check_skew(self.backend.skew(), self.backend.clock_name)

    @property
    def num_unreadable(self) -> int:
        """Number of skipped jobs that a newer svdpp has stored and this svdpp cannot read."""
        return len(self._unreadable)

    def _skip_unreadable(self, error: UnreadableJobError) -> None:
        """Count a row that only a newer svdpp can read; log it the first time."""
        id = error.details["id"]
        if id not in self._unreadable:
            if not self._unreadable:
                logger.warning("{}; such videos are left to newer servers: {}", error, error.hint)
            self._unreadable.append(id)

    def _read(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Job]:
        """Yield the jobs of the rows that this svdpp can read."""
        for row in rows:
            try:
                yield job_from_row(row)
            except UnreadableJobError as error:
                self._skip_unreadable(error)

    @property
    def _runnable(self) -> tuple[str, list[str]]:
        """SQL condition for jobs that this server can make, and the values of its placeholders.

        Other jobs stay in the queue until a server claims them that can make them.
        """
        incompatible = set(self._incompatible.copy())
        runnable, values = "true", list[str]()
        if self.model_key is not None:
            runnable = f"{sql.MODEL_KEY} = ?"
            values = [self.model_key]
        if incompatible:
            runnable += f" AND sampling NOT IN ({sql.placeholders(incompatible)})"
        return runnable, [*values, *incompatible]

    @property
    def _open(self) -> tuple[str, list[str]]:
        """SQL condition for jobs in progress or waiting for this server; values of placeholders."""
        runnable, values = self._runnable
        return f"(state = 'in_progress' OR state = 'queued' AND {runnable})", values

    # --- changes of jobs --------------------------------------------------------------------------

    def add(
        self,
        job: Job,
        max_open: int | None,
        max_open_of_owner: int | None = None,
        *,
        until: float = math.inf,
    ) -> Job:
        """Store a new job, or return the job that an equal earlier request created.

        Args:
            job: New job.
            max_open: Maximum number of jobs in the queue that are waiting or in progress. None: no
                limit.
            max_open_of_owner: Maximum number of open jobs of the job's owner. None: no limit.
            until: Latest time, in seconds of `clock.uptime`, at which the job may be stored; later,
                other servers may have removed the job's image.

        Raises:
            QueueFullError: A limit is reached.
            RequestError: The idempotency key was used for another request.
            UnreadableJobError: A newer svdpp has stored the job with the idempotency key.
            OutputError: The time `until` has passed, or the queue cannot be used.
        """
        find_existing = f"SELECT {sql.COLUMNS} FROM jobs WHERE owner = ? AND idempotency_key = ?"
        with self.backend.transaction(advisory_lock="add") as connection:
            for row in connection.execute(
                find_existing, (job.owner, job.idempotency_key)
            ).fetchall():
                return _check_same_request(job_from_row(row), job)
            self._check_limits(connection, job.owner, max_open, max_open_of_owner)
            if uptime() > until:
                raise OutputError("the server was stopped for too long during a request")
            sql.insert_job(connection, job)
            self.notify(connection, QUEUED)
        return job

    def _check_limits(
        self,
        connection: DatabaseConnection,
        owner: str,
        limit: int | None,
        limit_of_owner: int | None,
    ) -> None:
        is_open, values = self._open
        query = f"SELECT owner, count(*), count(batch_id) FROM jobs WHERE {is_open} GROUP BY owner"
        rows = connection.execute(query, values).fetchall()
        # Lines of batches do not count towards this limit. They have a limit of their own, so that
        # a large batch does not fill the queue for other requests.
        total = sum(number - of_batches for _, number, of_batches in rows)
        owner_open = {name: number for name, number, _ in rows}.get(owner, 0)
        if limit is not None and total >= limit:
            raise QueueFullError("the queue is full", details={"open": total, "limit": limit})
        if limit_of_owner is not None and owner_open >= limit_of_owner:
            details = {"open": owner_open, "limit": limit_of_owner, "owner": owner}
            raise QueueFullError(f"the queue of the key {owner!r} is full", details=details)

    def claim(self, *, large: bool = True) -> Job | None:
        """Claim the next job that this server can make: QUEUED to IN_PROGRESS.

        Args:
            large: Whether jobs with large images may be claimed too.

        Returns:
            Job with the token of this claim; None if no such job waits.
        """
        for _ in range(_MAX_TRIES):
            runnable, values = self._runnable
            if not large:
                runnable += f" AND NOT {sql.IS_LARGE}"
            next_id = sql.NEXT_JOB.format(runnable)
            if not self.backend.fetch_all(next_id, *values):
                return None
            try:
                for lock, advisory_lock in self.backend.claim_locks:
                    if job := self._try_claim(f"{next_id} {lock}", values, advisory_lock):
                        return job
            except _IncompatibleJobError as passed_job:
                self._incompatible.append(passed_job.args[0])
        return None

    def _try_claim(self, next_id: str, values: Sequence[Any], advisory_lock: str) -> Job | None:
        claim = self.server, int(self.is_shared), self.lease_seconds
        with self.backend.transaction(advisory_lock) as connection:
            rows = connection.execute(sql.CLAIM.format(next_id), (*claim, *values)).fetchall()
            if not rows:
                return None
            try:
                job = job_from_row(rows[0])
            except UnreadableJobError as error:
                self._skip_unreadable(error)
                raise _IncompatibleJobError(rows[0][sql.SAMPLING_INDEX]) from error
            if self.incompatible_reason(job) is not None:
                raise _IncompatibleJobError(rows[0][sql.SAMPLING_INDEX])
            connection.execute(sql.ADVANCE_TURN, (job.owner,))
        self._claims.add((job.id, job.fencing_token))
        return job

    # Each method that ends a claim gets the claim's `token`. So a server that has lost a claim
    # changes nothing, even if the server has claimed the same job again since.

    def requeue(
        self, id: str, token: int = 0, *, counts: bool = False, is_expired: bool = False
    ) -> bool:
        """Put a claimed job back into the queue, at its old position: IN_PROGRESS to QUEUED.

        The job becomes CANCELLED instead if a client has cancelled it, and FAILED if this was the
        job's last allowed expired claim.

        Args:
            id: Id of the job.
            token: Token of the claim. If the job has another token, nothing changes.
            counts: Whether the claim counts as an attempt, because ranks died during the claim.
            is_expired: Whether to requeue the job only if its claim has expired.

        Returns:
            Whether the job was changed.
        """
        condition = sql.IS_EXPIRED if is_expired else "true"
        statement = sql.REQUEUE.format(lost=int(is_expired and self.is_shared), and_=condition)
        values = to_json(error_to_dict(_TOO_MANY_EXPIRED)), int(counts), id, token
        self._claims.discard((id, token))
        with self.backend.transaction() as connection:
            rows = connection.execute(statement, values).fetchall()
            for state, turn, owner in rows:
                if state == JobState.QUEUED:
                    connection.execute(sql.RESTORE_TURN, (turn, owner, turn))
                    self.notify(connection, QUEUED)
        return bool(rows)

    def complete(self, id: str, metadata: dict[str, Any], token: int = 0) -> bool:
        """Set a claimed job to COMPLETED, with its JSON; return whether the claim was valid."""
        return self._finish(id, token, JobState.COMPLETED, metadata=to_json(metadata), error=None)

    def fail(self, id: str, error: BaseException, token: int = 0) -> bool:
        """Set a claimed job to FAILED with an error; return whether the claim was still valid."""
        return self._finish(id, token, JobState.FAILED, error=to_json(error_to_dict(error)))

    def cancel_waiting(self, id: str) -> bool:
        """Cancel a queued job; return whether the job was queued."""
        return self._update(id, [JobState.QUEUED], state=JobState.CANCELLED)

    def request_cancel(self, id: str, *, removes: bool = False) -> bool:
        """Record durably that a job in progress is to be cancelled.

        Args:
            id: Id of the job. The job's state does not change yet.
            removes: Whether the job is also hidden from its owner, and removed once it has ended.

        Returns:
            Whether the job was in progress.
        """
        marks = "cancel_asked = true"
        if removes:  # after a removal, the owner may use the job's idempotency key again
            marks += ", remove_asked = true, idempotency_key = NULL"
        with self.backend.transaction() as connection:
            self.notify(connection, id)
            mark = f"UPDATE jobs SET {marks} WHERE id = ? AND state = 'in_progress'"
            return connection.execute(mark, (id,)).rowcount == 1

    def pending_removals(self) -> list[str]:
        """Return the ids of ended jobs that their owners removed while ranks worked on them."""
        return self._ids(f"remove_asked AND {sql.IS_FINAL} ORDER BY seq")

    def mark_cancelled(self, id: str, token: int = 0) -> bool:
        """Set a job that ranks have dropped to CANCELLED; return whether the claim was valid."""
        return self._finish(id, token, JobState.CANCELLED)

    def set_verification(
        self, id: str, proof: VerificationStatus, reason: str | None = None
    ) -> bool:
        """Set a completed job's verification status and reason; return whether the job exists."""
        return self._update(id, [JobState.COMPLETED], proof=proof, proof_reason=reason)

    @contextlib.contextmanager
    def lock_clip(self, id: str) -> Iterator[bool]:
        """Lock a finished clip during the `with` block, unless it is already locked elsewhere.

        A server locks a clip to verify it, or to remove it because of its age. If a server dies,
        its locks end.

        Args:
            id: Id of the job.

        Yields:
            Whether this thread has the lock.
        """
        with self._clips_lock:
            is_locked = id in self._locked_clips
            self._locked_clips.add(id)
        if is_locked:
            yield False
            return
        try:
            with self.backend.lock(id) as is_held:
                yield is_held
        finally:
            self._locked_clips.discard(id)

    def set_promise(self, id: str, seconds: float) -> bool:
        """Store the ETA in seconds that the client was given; return whether the job exists."""
        return self._update(id, JobState, promised_seconds=seconds)

    def claim_callback(self, seconds: float) -> Job | None:
        """Return the next job whose webhook is due; None if no webhook is due.

        Rows that this svdpp cannot read do not change.

        Args:
            seconds: Seconds until the webhook is due again, unless `set_callback` is called before.
        """
        for _ in range(_MAX_TRIES):
            skipped = list(self._unreadable)
            others = f"id NOT IN ({sql.placeholders(skipped)})" if skipped else "true"
            try:
                with self.backend.transaction() as connection:
                    change = sql.CLAIM_CALLBACK.format(others=others)
                    rows = connection.execute(change, (seconds, *skipped)).fetchall()
                    return job_from_row(rows[0]) if rows else None
            # The transaction was rolled back, so the webhook stays due.
            except UnreadableJobError as error:
                self._skip_unreadable(error)
        return None

    def set_callback(self, job: Job, seconds: float | None, error: str | None) -> bool:
        """Store the outcome of an attempt to send a webhook.

        Args:
            job: Job as `claim_callback` returned it.
            seconds: Seconds until the next attempt. None: there is no further attempt.
            error: Reason of the failure. None: the webhook was delivered.

        Returns:
            Whether the outcome was stored; False if a later attempt has begun.
        """
        values = seconds, error, job.id, job.callback_attempts
        return bool(self._fetch_changed(sql.SET_CALLBACK, *values))

    def remove(self, id: str) -> bool:
        """Remove the row of a job in a final state; return whether the row existed.

        The job's files stay; `retention.remove_job` removes the files and the row.
        """
        statement = f"DELETE FROM jobs WHERE id = ? AND {sql.IS_FINAL} RETURNING id"
        return bool(self._fetch_changed(statement, id))

    def requeue_expired(self) -> list[Job]:
        """Requeue the jobs in progress whose claims have expired; return these jobs.

        In a queue that is not shared, these are the jobs that an earlier server process left.
        """
        most = f"LIMIT {_MAX_REQUEUED}" if self.is_shared else ""
        ended = self.backend.fetch_all(
            f"SELECT id, token FROM jobs WHERE state = 'in_progress' AND {sql.IS_EXPIRED} "
            f"ORDER BY started_at, turn, seq {most}"
        )
        # `requeue` checks again that the claim has expired, because its server may have renewed the
        # claim since the query.
        ids = [id for id, token in ended if self.requeue(id, token, is_expired=True)]
        return [job for id in ids if (job := self.get(id)) is not None]

    def _finish(self, id: str, token: int, state: JobState, **values: Any) -> bool:
        """Set a claimed job to a final state; return whether this server's claim was valid."""
        # The claim is forgotten first, so that `renew` does not report it as lost.
        self._claims.discard((id, token))
        return self._update(id, [JobState.IN_PROGRESS], token, state=state, **values)

    def _update(
        self, id: str, states: Iterable[JobState], token: int | None = None, **values: Any
    ) -> bool:
        """Set columns of a job's row, if the job has one of the states and the token (if given)."""
        columns = ", ".join(f"{name} = ?" for name in values)
        if (state := values.get("state")) is not None and JobState(state).is_final:
            columns += f", finished_at = {sql.END_TIME}"
        has_token = "true" if token is None else f"token = {token}"
        query = f"UPDATE jobs SET {columns} WHERE id = ? AND {sql.state_in(states)} AND {has_token}"
        with self.backend.transaction() as connection:
            return connection.execute(query, (*values.values(), id)).rowcount == 1

    def _fetch_changed(self, change: str, *values: Any) -> list[Any]:
        with self.backend.transaction() as connection:
            return connection.execute(change, values).fetchall()

    # --- methods for a queue that servers share ---------------------------------------------------

    def renew(self, step_of: Callable[[str], int]) -> tuple[list[tuple[str, int]], list[str]]:
        """Renew this server's claims, and store each job's number of finished steps.

        Args:
            step_of: Function that returns the number of finished steps of the job with an id.

        Returns:
            Job ids and tokens of claims that were lost, and ids of jobs to cancel.
        """
        claims = list(self._claims)
        if not claims:
            return [], []
        columns = zip(*((id, token, step_of(id)) for id, token in claims), strict=True)
        rows = self.backend.fetch_all(sql.RENEW, self.lease_seconds, *map(list, columns))
        # Lost claims are forgotten only after the query, so that the next call finds them if the
        # query fails.
        unrenewed = self._claims & (set(claims) - {(id, token) for id, token, _ in rows})
        self._claims -= unrenewed
        return list(unrenewed), [id for id, _, is_cancelled in rows if is_cancelled]

    def release(self) -> None:
        """Requeue the jobs of all claims, and remove this server from the list of servers."""
        # The claims are read from the database, because this server does not know claims whose
        # response was lost with a connection.
        for job in self.claimed():
            self.requeue(job.id, job.fencing_token)
        self._fetch_changed("DELETE FROM servers WHERE id = ? RETURNING id", self.server)

    def register(self, description: Mapping[str, Any]) -> None:
        """Store a description of this server, as JSON values, with the time of this call."""
        self.backend.fetch_all(
            sql.REGISTER, _SERVER_RETENTION_SECONDS, self.server, json.dumps(description)
        )

    def servers(self) -> list[dict[str, Any]]:
        """Return each server's description, with its `id`, and its age as `seen_seconds`."""
        rows = self.backend.fetch_all(
            "SELECT id, about, clock() - seen_at FROM servers ORDER BY id"
        )
        return [
            {**json.loads(description), "id": id, "seen_seconds": seen}
            for id, description, seen in rows
        ]

    def notify(self, connection: DatabaseConnection, payload: str) -> None:
        """Send a notification to all servers of the queue if the transaction succeeds."""
        if self.is_shared:
            connection.execute("SELECT pg_notify('svdpp', ?)", (payload,))

    # --- queries of jobs --------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        """Return the job with an id; None: no such job exists, or a newer svdpp has stored it."""
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
        """Return jobs of an owner, ordered by the time of request. Removed jobs are left out.

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
        # Unreadable rows are replaced by further rows, because clients take a short page for the
        # last one.
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
        """Return id and sampling parameters of each job that this server may claim, in order."""
        runnable, values = self._runnable
        waiting = []
        for id, text in self.backend.fetch_all(sql.ROUND_ROBIN.format(runnable), *values):
            # Jobs that cannot be read are left out; `claim` counts and reports them.
            with contextlib.suppress(ValueError, TypeError, LookupError):
                waiting.append((id, sampling_of(text)))
        return waiting

    def running(self) -> list[Job]:
        """Return the jobs in progress, in the order of their claims."""
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
        """Return the number of jobs in progress plus queued jobs that this server can make.

        Lines of batches do not count.
        """
        is_open, values = self._open
        query = f"SELECT count(*) FROM jobs WHERE {is_open} AND batch_id IS NULL"
        return int(self.backend.fetch_all(query, *values)[0][0])

    def oldest_waiting(self) -> float | None:
        """Return the unix time of the oldest request that this server may claim; None: none."""
        runnable, values = self._runnable
        query = f"SELECT min(created_at) FROM jobs WHERE state = 'queued' AND {runnable}"
        ((oldest,),) = self.backend.fetch_all(query, *values)
        return None if oldest is None else float(oldest)

    def pending_verifications(self) -> dict[str, str]:
        """Return the owner of each job whose verification was requested or runs, by the job's id.

        The oldest job is the first.
        """
        condition, values = self._verifiable
        query = f"SELECT id, owner FROM jobs WHERE {condition} AND proof = 'running' ORDER BY seq"
        return dict(self.backend.fetch_all(query, *values))

    def unverified(self) -> list[str]:
        """Return the ids of completed jobs that have a file and no verification, newest first."""
        # The pattern matches only a key, because quotes inside a JSON string are escaped.
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

    def finished(self, before: float = math.inf) -> dict[str, float]:
        """Return the ended jobs: unix time of the end, by job id, the earliest first.

        Args:
            before: Unix time; jobs that ended later are left out.
        """
        where = f"{sql.IS_FINAL} AND finished_at < ? ORDER BY finished_at, seq"
        return dict(
            self.backend.fetch_all(f"SELECT id, finished_at FROM jobs WHERE {where}", before)
        )

    def clips(self) -> dict[str, int | None]:
        """Return for each job id the token of the claim that made the clip; None without a clip."""
        token = "CASE WHEN state IN ('in_progress', 'completed') THEN token END"
        return dict(self.backend.fetch_all(f"SELECT id, {token} FROM jobs"))

    def _ids(self, where: str, *values: Any) -> list[str]:
        return [
            id for (id,) in self.backend.fetch_all(f"SELECT id FROM jobs WHERE {where}", *values)
        ]

    def _jobs(self, tail: str, *values: Any) -> list[Job]:
        rows = self.backend.fetch_all(f"SELECT {sql.COLUMNS} FROM jobs {tail}", *values)
        return list(self._read(rows))


def _check_same_request(existing: Job, job: Job) -> Job:
    """Return an existing job with the same idempotency key, after a check that the clips are equal.

    Raises:
        RequestError: The new job requests another clip.
    """
    inputs = ("input_sha256", "further_inputs", "prompt", "negative_prompt")
    for name in (*inputs, "seed", "sampling", "loras", "priority", "callback_url"):
        if getattr(existing, name) != getattr(job, name):
            raise RequestError(
                f"the idempotency key {str(job.idempotency_key)[:60]!r} was used for a request "
                f"with another {name.removesuffix('_sha256').rstrip('s').replace('_', ' ')}",
                "use a new key for a new request",
                details={"id": existing.id, "field": column_of(name)},
            )
    return existing
