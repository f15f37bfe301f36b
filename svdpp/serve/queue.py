"""Queue of jobs: durable changes of a job's state.

Each change applies only to jobs in certain states, so a change that comes too late, such as the
cancellation of an ended job, has no effect. Owners take turns: the next job is from the owner whose
last job was claimed longest ago. An owner's `turn` is 0 before its first job. With each claimed
job, the owner's `turn` becomes the largest of all owners.

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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.errors import OutputError, RankError, RequestError, SvdppError, error_to_dict
from svdpp.serve import queue_sql as sql
from svdpp.serve.clock import check_skew, uptime
from svdpp.serve.job import (
    Job,
    JobState,
    UnreadableJobError,
    VerificationStatus,
    column_of,
    is_sampling_readable,
    job_from_row,
    to_json_column,
)
from svdpp.serve.queue_queries import JobQueries
from svdpp.serve.sqlite import SqliteBackend
from svdpp.serve.store import FileStore

if TYPE_CHECKING:
    from svdpp.serve.postgres import PostgresBackend
    from svdpp.serve.queue_sql import DatabaseConnection


# Maximum number of jobs that one call skips. `claim` skips jobs that the ranks cannot make, and
# `claim_callback` skips jobs that this svdpp cannot read.
_MAX_TRIES = 20
# Maximum number of expired claims that one call requeues. A higher number would delay this server's
# own renewals.
_MAX_REQUEUED = 100
#: Text of the notification of a new job. Any other text is the id of a job to cancel.
QUEUED = "queued"
# Seconds after a server's last report for which the server stays in the list of servers.
_SERVER_RETENTION_SECONDS = 86400


_TOO_MANY_EXPIRED = RankError(
    f"{sql.MAX_EXPIRED_LEASES} servers died, hung or lost the queue while they made this clip",
    "the servers' logs have the reasons; request the clip again if the clip was not the cause",
    details={"lost_claims": sql.MAX_EXPIRED_LEASES},
)


class QueueFullError(SvdppError):
    """Error for a job that is rejected because the queue, or an owner's share of it, is full.

    The error's details are `open` (number of jobs that are queued or in progress), `limit` (maximum
    of that number), and `owner` (name of the owner, if the limit is for one owner).
    """


class _IncompatibleJobError(Exception):
    """Error for a job that this server's ranks cannot make.

    The exception's argument is the text in the column `sampling` of the job's row. `claim` then
    skips all jobs with this text.
    """


class JobQueue(JobQueries):
    """Queue of jobs. Any thread may call any method. Changes are durable when a method returns.

    Every method except `close` raises OutputError if the queue cannot be used. If the database does
    not answer, the error is a BackendUnavailableError, a subclass; the change may then have been
    made, or not.

    The jobs of one owner are ordered by `created_at - priority * AGEING_SECONDS`.

    Args:
        folder: Data folder. It has the queue if `url` is None, and the files if `store` is None.
        adopts: Whether to start although the folder or store has files of another queue or program.
            False: such files cause a RequestError.
        url: URL of a PostgreSQL database that servers share. None: a SQLite file in the folder.
        store: Store of the files. None: the files are in the folder.
        lease_seconds: Seconds without a renewal after which a claim ends. Used only with `url`.
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
        super().__init__(self._open_backend(folder, url, adopts), is_shared=url is not None)
        self.lease_seconds = lease_seconds if self.is_shared else 0.0
        self.incompatible_reason: Callable[[Job], str | None] = lambda _: None
        """Function that returns why this server's ranks cannot make a job, or None if they can."""
        # Claims of this server, each as (job id, token), which `renew` renews. A claim is removed
        # from the set just before its job is requeued or set to a final state.
        self._claims: set[tuple[str, int]] = set()
        # Ids of clips that threads of this server have locked. This set is needed, because an
        # advisory lock of PostgreSQL does not exclude other threads with the same connection.
        self._locked_clips = set[str]()
        self._clips_lock = threading.Lock()
        if not (self.is_shared or adopts):
            self._check_rows()

    def _open_backend(
        self, folder: Path, url: str | None, adopts: bool
    ) -> SqliteBackend | PostgresBackend:
        if url is None:
            backend = SqliteBackend(folder, adopts=adopts)
            self.store.bind_to_file(lambda: backend.is_there)
            return backend
        # Imported only here, because `svdpp.serve.postgres` needs psycopg, which is installed only
        # with the extra `fleet`.
        from svdpp.serve.postgres import PostgresBackend

        return PostgresBackend(url, self.store, adopts=adopts)

    def _check_rows(self) -> None:
        """Raise a `RequestError` if the folder has clips, but the queue has no jobs.

        In this case the jobs' rows were lost, for example because SQLite's write-ahead log was not
        copied together with the database file.

        Raises:
            RequestError: The folder has clips although the queue has no jobs.
        """
        clips = [] if self.clip_tokens() else self.store.clips()
        if clips:
            self.close()
            raise RequestError(
                f"the data folder {str(self.store.folder)!r} has clips (number: {len(clips)}), "
                "but its queue has no jobs: a part of the queue is missing",
                "restore queue.sqlite3 together with its queue.sqlite3-wal, or add `adopt` to "
                "start with an empty queue: the clips go to lost+found",
                details={"clips": len(clips), "clip": min(clips)},
            )

    def close(self) -> None:
        """Close the queue's database. A second call does nothing."""
        self.backend.close()

    @property
    def unavailable_reason(self) -> str:
        """Reason why this server cannot begin or store clips now; empty if it can.

        For example, its disk is nearly full. This property does not show whether the store answers;
        see `store.unavailable_reason`.
        """
        if not self.backend.is_there:
            return "the queue was removed or replaced"
        if not self.store.is_mounted:
            return "the folder of the videos is not there"
        return "the disk is nearly full" if self.store.is_disk_low else ""

    def now(self) -> float:
        """Return the unix time of the queue's clock, from which all ages are computed.

        A shared queue uses the clock of the database, because a server's clock may be days off.
        """
        return self.backend.now()

    def check_clock(self) -> None:
        """Raise a `ClockError` unless this machine's clock agrees with the queue's.

        Raises:
            ClockError: The clocks differ. Until they agree again, ages are unknown, and nothing may
                be deleted because of its age.
        """
        check_skew(self.backend.skew(), self.backend.clock_name)

    # --- changes of jobs --------------------------------------------------------------------------

    def add(
        self,
        job: Job,
        max_open: int | None,
        max_open_of_owner: int | None = None,
        *,
        until: float = math.inf,
    ) -> Job:
        """Store and return a new job, or return the owner's job with the same idempotency key.

        Args:
            job: New job.
            max_open: Maximum number of jobs in the queue that are waiting or in progress. None: no
                limit.
            max_open_of_owner: Maximum number of open jobs of the job's owner. None: no limit.
            until: Latest time, in seconds of `clock.uptime`, at which the job may be stored. After
                this time, a search for files that no job needs may have removed the job's images.

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
                raise OutputError(
                    "the request took too long to store: its files may have been removed"
                )
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
        # Jobs that belong to batches do not count in `total`. Batches have a limit of their own, so
        # that a large batch does not fill the queue for other requests.
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
            large: Whether jobs with an input image above `LARGE_MEGAPIXELS` may be claimed, too.

        Returns:
            Job with the token of this claim; None if no such job was found.
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
            except UnreadableJobError as error:
                self._skip_unreadable(error)
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
                sampling = rows[0][sql.SAMPLING_INDEX]
                # If this svdpp cannot read the job's sampling parameters, all jobs with the same
                # parameters are skipped together, because a newer svdpp may have stored many of
                # them. If another column is unreadable, only this job is skipped.
                if is_sampling_readable(sampling):
                    raise
                self._skip_unreadable(error)
                raise _IncompatibleJobError(sampling) from error
            if self.incompatible_reason(job) is not None:
                raise _IncompatibleJobError(rows[0][sql.SAMPLING_INDEX])
            connection.execute(sql.ADVANCE_TURN, (job.owner,))
        self._claims.add((job.id, job.fencing_token))
        return job

    # Each method that ends a claim gets the claim's `token`, and changes nothing if the job has
    # another token. So a server that has lost a claim cannot end a later claim of the same job.

    def requeue(
        self, id: str, token: int = 0, *, counts: bool = False, is_expired: bool = False
    ) -> bool:
        """Put a claimed job back into the queue, at its old position: IN_PROGRESS to QUEUED.

        If a client has cancelled the job, it becomes CANCELLED instead. If `MAX_EXPIRED_LEASES`
        claims of the job have expired, it becomes FAILED.

        Args:
            id: Id of the job.
            token: Token of the claim. If the job has another token, nothing changes.
            counts: Whether to increment the job's number of failed attempts, because the ranks died
                while they made the clip.
            is_expired: Whether to requeue the job only if its claim has expired.

        Returns:
            Whether the job was changed.
        """
        condition = sql.IS_EXPIRED if is_expired else "true"
        statement = sql.REQUEUE.format(lost=int(is_expired and self.is_shared), and_=condition)
        values = to_json_column(error_to_dict(_TOO_MANY_EXPIRED)), int(counts), id, token
        self._claims.discard((id, token))
        with self.backend.transaction() as connection:
            rows = connection.execute(statement, values).fetchall()
            for state, turn, owner in rows:
                if state == JobState.QUEUED:
                    connection.execute(sql.RESTORE_TURN, (turn, owner, turn))
                    self.notify(connection, QUEUED)
        return bool(rows)

    def complete(self, id: str, metadata: dict[str, Any], token: int = 0) -> bool:
        """Set a claimed job to COMPLETED, with the clip's metadata; return whether this was done.

        Nothing changes if the claim with this token has ended.

        Args:
            id: Id of the job.
            metadata: Metadata of the clip.
            token: Fencing token of the claim; 0 for a queue that is not shared.
        """
        return self._finish(
            id, token, JobState.COMPLETED, metadata=to_json_column(metadata), error=None
        )

    def fail(self, id: str, error: BaseException, token: int = 0) -> bool:
        """Set a claimed job to FAILED with an error; return whether this was done.

        Nothing changes if the claim with this token has ended.

        Args:
            id: Id of the job.
            error: Error that ended the job.
            token: Fencing token of the claim; 0 for a queue that is not shared.
        """
        return self._finish(id, token, JobState.FAILED, error=to_json_column(error_to_dict(error)))

    def cancel_waiting(self, id: str) -> bool:
        """Cancel a queued job; return whether the job was queued."""
        return self._update(id, [JobState.QUEUED], state=JobState.CANCELLED)

    def request_cancel(self, id: str, *, removes: bool = False) -> bool:
        """Record durably that a job in progress is to be cancelled.

        The job's state becomes CANCELLED only when its server has stopped work on the clip.

        Args:
            id: Id of the job.
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

    def mark_cancelled(self, id: str, token: int = 0) -> bool:
        """Set a claimed job to CANCELLED once the ranks have dropped its clip.

        Return whether the job was changed.

        Nothing changes if the claim with this token has ended.
        """
        return self._finish(id, token, JobState.CANCELLED)

    def set_verification(
        self, id: str, status: VerificationStatus, reason: str | None = None
    ) -> bool:
        """Set a completed job's verification status and reason; return whether this was done.

        Args:
            id: Id of the job.
            status: New verification status.
            reason: Sentence that explains the status; None: the status needs no explanation.
        """
        return self._update(id, [JobState.COMPLETED], proof=status, proof_reason=reason)

    @contextlib.contextmanager
    def lock_clip(self, id: str) -> Iterator[bool]:
        """Lock a finished clip during the `with` block, if no other thread or server has the lock.

        A server locks a clip to verify it, or to remove it because of its age. If a server dies,
        the server's locks end.

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

    def set_eta(self, id: str, seconds: float) -> bool:
        """Store the ETA that the client was given for a job; return whether the job exists.

        Args:
            id: Id of the job.
            seconds: Seconds from the request until the clip should be completed.
        """
        return self._update(id, JobState, promised_seconds=seconds)

    def claim_callback(self, seconds: float) -> Job | None:
        """Claim the next webhook that is due, and return its job; None if no webhook is due.

        Jobs that only a newer svdpp can read are skipped, and their rows do not change.

        Args:
            seconds: Seconds until the webhook is due again if this server dies during the attempt.
                If it does not die, `set_callback` replaces this time after the attempt.
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
        """Store the outcome of an attempt to send a job's webhook.

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

        In a queue that is not shared, these are the jobs that an earlier server process had begun.
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
        """Set a claimed job to a final state; return whether the job still had this claim."""
        # The claim is forgotten first, so that `renew` does not report it as lost.
        self._claims.discard((id, token))
        return self._update(id, [JobState.IN_PROGRESS], token, state=state, **values)

    def _update(
        self, id: str, states: Iterable[JobState], token: int | None = None, **values: Any
    ) -> bool:
        """Set columns of a job's row if it has one of `states`; return whether the row was changed.

        Args:
            id: Id of the job.
            states: States that the job may have; a job in any other state is not changed.
            token: Token that the job must have; None: any token.
            values: New values, by the name of the column.
        """
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
            step_of: Function that returns a job's number of finished steps, given the job's id.

        Returns:
            Claims that were lost, each as (job id, token), and ids of jobs that clients have
            cancelled.
        """
        claims = list(self._claims)
        if not claims:
            return [], []
        columns = zip(*((id, token, step_of(id)) for id, token in claims), strict=True)
        rows = self.backend.fetch_all(sql.RENEW, self.lease_seconds, *map(list, columns))
        # Lost claims are forgotten only after the query. If the query fails, the next call reports
        # the lost claims.
        unrenewed = self._claims & (set(claims) - {(id, token) for id, token, _ in rows})
        self._claims -= unrenewed
        return list(unrenewed), [id for id, _, is_cancelled in rows if is_cancelled]

    def release(self) -> None:
        """Requeue all jobs that this server has claimed; remove its row from `servers`."""
        # The claims are read from the database, because `_claims` may lack one: if the connection
        # fails during a claim, the database may store the claim, but its response is lost.
        for job in self.claimed():
            self.requeue(job.id, job.fencing_token)
        self._fetch_changed("DELETE FROM servers WHERE id = ? RETURNING id", self.server)

    def register(self, description: Mapping[str, Any]) -> None:
        """Store a description of this server in the table `servers`, with the present time.

        Args:
            description: JSON values by name.
        """
        self.backend.fetch_all(
            sql.REGISTER, _SERVER_RETENTION_SECONDS, self.server, json.dumps(description)
        )

    def notify(self, connection: DatabaseConnection, payload: str) -> None:
        """Send a notification to all servers of the queue if the transaction succeeds.

        Args:
            connection: Connection with the open transaction.
            payload: Text of the notification, such as the id of a job.
        """
        if self.is_shared:
            connection.execute("SELECT pg_notify('svdpp', ?)", (payload,))


def _check_same_request(existing: Job, job: Job) -> Job:
    """Return `existing` if its request equals that of `job`, which has the same idempotency key.

    Raises:
        RequestError: The requests differ, for example in their seeds.
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
