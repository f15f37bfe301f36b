"""The queue of jobs: each change of a job's state, which is durable at once, and each question.

Every change names the states that it may start from, so a late one changes nothing. The tables are
in `queue_file`. Owners take turns: the owner whose last job was taken longest ago is next. An
owner's `turn` is 0 before the first job, and becomes the largest of all each time that one of its
jobs is taken.
"""

from __future__ import annotations

import functools
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from svdpp.config import SamplingConfig, sampling_from
from svdpp.config.limits import LARGE_MEGAPIXELS
from svdpp.errors import RequestError, SvdppError, error_to_dict
from svdpp.serve.job import Job, JobState, Proof
from svdpp.serve.queue_file import QueueFile

#: Seconds that one step of priority is worth. A waiting job passes every job that was requested
#: this much later for each step of priority between them, so none waits for ever.
AGEING_SECONDS = 600.0


def _any_of(states: Iterable[JobState]) -> str:
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"


_NAMES = tuple(column.name for column in fields(Job))
_COLUMNS = ", ".join(_NAMES)
_FINAL = _any_of(state for state in JobState if state.is_final)
_WAITING = "state = 'queued' AND held IS NULL"
_OPEN = f"(state = 'in_progress' OR {_WAITING})"

# --- the transitions that depend on more than the state -------------------------------------------

_LARGE = f"photo_pixels > {LARGE_MEGAPIXELS * 10**6}"
_NEXT = f"""
    SELECT id FROM jobs LEFT JOIN owners ON owners.owner = jobs.owner
    WHERE {_WAITING} AND {{}} ORDER BY coalesce(owners.turn, 0), due, seq LIMIT 1
"""
_TAKE = f"""
UPDATE jobs SET state = 'in_progress', started_at = ?,
    turn = coalesce((SELECT turn FROM owners WHERE owners.owner = jobs.owner), 0)
WHERE id = ({_NEXT.format(f"(id = ? OR NOT {_LARGE})")}) RETURNING {_COLUMNS}
"""
_SPEND_TURN = """
INSERT INTO owners SELECT ?, coalesce(max(turn), 0) + 1 FROM owners WHERE true
ON CONFLICT (owner) DO UPDATE SET turn = excluded.turn
"""
_PUT_BACK = """
UPDATE jobs SET
    state = CASE WHEN cancel_asked THEN 'cancelled' ELSE 'queued' END,
    finished_at = CASE WHEN cancel_asked THEN ? END,
    started_at = CASE WHEN cancel_asked THEN started_at END,
    attempts = attempts + CASE WHEN cancel_asked THEN 0 ELSE ? END
WHERE id = ? AND state = 'in_progress' RETURNING cancel_asked, turn, owner
"""
_RETURN_TURN = "UPDATE owners SET turn = ? WHERE owner = ? AND turn > ?"
# The first jobs of all owners in the order of their turns, then the second jobs, and so on.
_IN_TURN = f"""
SELECT id, sampling FROM (
    SELECT id, sampling, coalesce(owners.turn, 0) AS turn, row_number() OVER own AS place,
        first_value(due) OVER own AS first_due, first_value(seq) OVER own AS first_seq
    FROM jobs LEFT JOIN owners ON owners.owner = jobs.owner
    WHERE {_WAITING} WINDOW own AS (PARTITION BY jobs.owner ORDER BY due, seq)
) AS waiting ORDER BY place, turn, first_due, first_seq
"""


class QueueFullError(SvdppError):
    """The queue, or one owner's share of it, has as many open jobs as it may have.

    Its details are `open` and `limit`, and `owner` if the limit is the owner's.
    """


class JobQueue(QueueFile):
    """The jobs of a server. Any thread may call any method; each is durable before it returns.

    The jobs of one owner are in the order of `created_at - priority * AGEING_SECONDS`.
    """

    # --- changes ----------------------------------------------------------------------------------

    def add(self, job: Job, *, max_open: int | None, max_open_of_owner: int | None = None) -> Job:
        """Store a new job, or find the one that the same request has created before.

        That one, of the same idempotency key and parameters, has another id: the caller then
        removes the new photograph. QueueFullError: a limit is reached.
        """
        known = f"SELECT {_COLUMNS} FROM jobs WHERE owner = ? AND idempotency_key = ?"
        with self.change() as database:
            for row in database.execute(known, (job.owner, job.idempotency_key)):
                return _same_request(_job_of(row), job)
            _check_limits(database, job.owner, max_open, max_open_of_owner)
            _insert(database, job)
        return job

    def take_next(self, prepared: str | None = None) -> Job | None:
        """QUEUED to IN_PROGRESS for the next job that is not held; None if there is none.

        Jobs with large images are passed over, but for the one whose image is `prepared`.
        """
        with self.change() as database:
            for row in database.execute(_TAKE, (time.time(), prepared)).fetchall():
                job = _job_of(row)
                database.execute(_SPEND_TURN, (job.owner,))
                return job
        return None

    def put_back(self, id: str, *, counts: bool) -> bool:
        """IN_PROGRESS to QUEUED, at the place that the job had; CANCELLED if that was asked for.

        It `counts` as an attempt if ranks died during it.
        """
        with self.change() as database:
            rows = database.execute(_PUT_BACK, (time.time(), counts, id)).fetchall()
            for is_cancelled, turn, owner in rows:
                if not is_cancelled:
                    database.execute(_RETURN_TURN, (turn, owner, turn))
            return bool(rows)

    def complete(self, id: str, metadata: dict[str, Any]) -> bool:
        """IN_PROGRESS to COMPLETED, with the clip's JSON."""
        return self._end(id, JobState.COMPLETED, metadata=_json(metadata), error=None)

    def fail(self, id: str, error: dict[str, Any] | BaseException) -> bool:
        """IN_PROGRESS to FAILED, with an exception or what `errors.error_to_dict` makes of it."""
        error = error_to_dict(error) if isinstance(error, BaseException) else error
        return self._end(id, JobState.FAILED, error=_json(error))

    def cancel_waiting(self, id: str) -> bool:
        """QUEUED to CANCELLED."""
        return self._end(id, JobState.CANCELLED, begin=JobState.QUEUED)

    def ask_to_cancel(self, id: str) -> bool:
        """Mark a job in progress, also for the next start of the server; the state stays."""
        return self._change(id, [JobState.IN_PROGRESS], cancel_asked=1)

    def cancelled(self, id: str) -> bool:
        """IN_PROGRESS to CANCELLED, once the ranks have let go of the job."""
        return self._end(id, JobState.CANCELLED)

    def set_proof(self, id: str, proof: Proof, reason: str | None = None) -> bool:
        """Set the proof of a completed job, and its reason."""
        return self._change(id, [JobState.COMPLETED], proof=proof, proof_reason=reason)

    def set_promise(self, id: str, seconds: float) -> bool:
        """Set the ETA that the client was given."""
        return self._change(id, JobState, promised_seconds=seconds)

    def remove(self, id: str) -> bool:
        """Remove the row of a job in a final state; `retention.remove_job` also removes files."""
        with self.change() as database:
            query = f"DELETE FROM jobs WHERE id = ? AND {_FINAL}"
            return database.execute(query, (id,)).rowcount == 1

    def hold(self, why_not: Callable[[Job], str | None]) -> list[str]:
        """At the start of a server: hold the queued jobs that it cannot make, and no others.

        `why_not` says why it cannot; returns what it said.
        """
        jobs = self._jobs("WHERE state = 'queued' ORDER BY seq")
        held = [(job.id, why_not(job)) for job in jobs]
        with self.change() as database:
            for id, reason in held:
                _change(database, id, [JobState.QUEUED], held=reason)
        return [reason for _, reason in held if reason is not None]

    def recover(self) -> list[Job]:
        """At the start of a server: put back and return every job in progress, as it is now."""
        ids = [job.id for job in self.running()]
        for id in ids:
            self.put_back(id, counts=False)
        return [job for id in ids if (job := self.get(id)) is not None]

    def _end(
        self, id: str, state: JobState, *, begin: JobState = JobState.IN_PROGRESS, **values: Any
    ) -> bool:
        return self._change(id, [begin], state=state, finished_at=time.time(), **values)

    def _change(self, id: str, states: Iterable[JobState], **values: Any) -> bool:
        with self.change() as database:
            return _change(database, id, states, **values)

    # --- reads ------------------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        """The job of that id, in any state."""
        return next(iter(self._jobs("WHERE id = ?", id)), None)

    def page(
        self,
        *,
        owner: str | None,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        states: Sequence[JobState] = (),
    ) -> list[Job]:
        """Jobs by the time of request: of one owner, in some states, after the job of an id."""
        conditions, values = ["true", _any_of(states)] if states else ["true"], []
        seq = f"seq {'>' if order == 'asc' else '<'} (SELECT seq FROM jobs WHERE id = ?)"
        for condition, value in (("owner = ?", owner), (seq, after)):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        tail = f"WHERE {' AND '.join(conditions)} ORDER BY seq {order} LIMIT ?"
        return self._jobs(tail, *values, limit)

    def waiting(self) -> list[tuple[str, SamplingConfig]]:
        """Id and parameters of the queued jobs that are not held, in the order of `take_next`."""
        return [(id, _sampling_of(text)) for id, text in self.rows(_IN_TURN)]

    def next_large(self) -> Job | None:
        """The next of the queued jobs with large images."""
        return next(iter(self._jobs(f"WHERE id = ({_NEXT.format(_LARGE)})")), None)

    def running(self) -> list[Job]:
        """The jobs in progress, in the order in which they were taken."""
        return self._jobs("WHERE state = 'in_progress' ORDER BY started_at, turn, seq")

    def counts(self, *, with_held: bool = False) -> dict[JobState, int]:
        """The number of jobs in each state; without queued ones that this server cannot make."""
        where = "" if with_held else "WHERE state != 'queued' OR held IS NULL"
        numbers = dict(self.rows(f"SELECT state, count(*) FROM jobs {where} GROUP BY state"))
        return {state: numbers.get(str(state), 0) for state in JobState}

    def num_open(self) -> int:
        """The number of jobs that are queued, and not held, or in progress."""
        return int(self.rows(f"SELECT count(*) FROM jobs WHERE {_OPEN}")[0][0])

    def oldest_waiting(self) -> float | None:
        """The time of the oldest request that is queued and not held; None if there is none."""
        ((oldest,),) = self.rows(f"SELECT min(created_at) FROM jobs WHERE {_WAITING}")
        return None if oldest is None else float(oldest)

    def to_prove(self) -> list[str]:
        """The ids of the jobs whose proof is `running`, or was when a server ended."""
        return self._ids("proof = 'running' ORDER BY seq")

    def unproved(self) -> list[str]:
        """The ids of the completed clips with files that are not verified, the newest first."""
        return self._ids(
            "state = 'completed' AND proof = 'none'"
            " AND json_extract(metadata, '$.file_sha256') IS NOT NULL ORDER BY seq DESC"
        )

    def finished(self) -> dict[str, float]:
        """When the jobs in final states ended that are not being proved, the first one first."""
        where = f"{_FINAL} AND proof != 'running' ORDER BY finished_at, seq"
        return dict(self.rows(f"SELECT id, finished_at FROM jobs WHERE {where}"))

    def uploads(self) -> dict[str, list[str]]:
        """The names of the uploaded files of every job, by id."""
        rows = self.rows("SELECT id, photo, videos FROM jobs")
        return {
            id: [*filter(None, [photo]), *(f"{id}.{name}" for name in json.loads(videos))]
            for id, photo, videos in rows
        }

    def _ids(self, where: str) -> list[str]:
        return [id for (id,) in self.rows(f"SELECT id FROM jobs WHERE {where}")]

    def _jobs(self, tail: str, *values: Any) -> list[Job]:
        return [_job_of(row) for row in self.rows(f"SELECT {_COLUMNS} FROM jobs {tail}", *values)]


def _insert(database: sqlite3.Connection, job: Job) -> None:
    values = {name: getattr(job, name) for name in _NAMES}
    values |= {"sampling": json.dumps(asdict(job.sampling)), "state": str(job.state)}
    values |= {"error": _json(job.error), "metadata": _json(job.metadata)}
    values |= {"videos": json.dumps(job.videos)}
    values["due"] = job.created_at - job.priority * AGEING_SECONDS
    marks = ", ".join("?" * len(values))
    query = f"INSERT INTO jobs ({', '.join(values)}) VALUES ({marks})"
    database.execute(query, tuple(values.values()))


def _change(
    database: sqlite3.Connection, id: str, states: Iterable[JobState], **values: Any
) -> bool:
    """Sets columns of a row if its state is one of `states`; whether it was."""
    columns = ", ".join(f"{name} = ?" for name in values)
    query = f"UPDATE jobs SET {columns} WHERE id = ? AND {_any_of(states)}"
    return database.execute(query, (*values.values(), id)).rowcount == 1


def _job_of(row: tuple[Any, ...]) -> Job:
    values = dict(zip(_NAMES, row, strict=True))
    parsed = {
        "sampling": _sampling_of(values["sampling"]),
        "state": JobState(values["state"]),
        "cancel_asked": bool(values["cancel_asked"]),
        "error": json.loads(values["error"] or "null"),
        "metadata": json.loads(values["metadata"]),
        "videos": json.loads(values["videos"]),
    }
    return Job(**values | parsed)


def _json(value: dict[str, Any] | None) -> str | None:
    """`value` as JSON for a column; numbers that are not finite become null."""
    return None if value is None else json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.lru_cache(maxsize=256)  # most jobs of a queue have the same parameters
def _sampling_of(text: str) -> SamplingConfig:
    return sampling_from(json.loads(text))


def _check_limits(
    database: sqlite3.Connection, owner: str, limit: int | None, limit_of_owner: int | None
) -> None:
    query = f"SELECT owner, count(*) FROM jobs WHERE {_OPEN} GROUP BY owner"
    open_jobs = dict(database.execute(query))
    total, own = sum(open_jobs.values()), open_jobs.get(owner, 0)
    if limit is not None and total >= limit:
        raise QueueFullError("the queue is full", details={"open": total, "limit": limit})
    if limit_of_owner is not None and own >= limit_of_owner:
        details = {"open": own, "limit": limit_of_owner, "owner": owner}
        raise QueueFullError(f"the queue of the key {owner!r} is full", details=details)


def _same_request(known: Job, job: Job) -> Job:
    """`known`, if `job` asks for the same clip."""
    values = ("photo_sha256", "videos", "prompt", "negative_prompt", "seed", "sampling", "priority")
    for name in values:
        if getattr(known, name) != getattr(job, name):
            raise RequestError(
                f"the idempotency key {str(job.idempotency_key)[:60]!r} was used for a request "
                f"with another {name.removesuffix('_sha256').rstrip('s').replace('_', ' ')}",
                "use a new key for a new request",
                details={"id": known.id, "field": name},
            )
    return known
