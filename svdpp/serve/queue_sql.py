"""SQL of the queue: conditions and statements on the rows of jobs, owners and servers.

SQLite and PostgreSQL both run these statements. In the statements, `clock()` is the unix time, read
from the clock that all servers of the queue use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from svdpp.config.limits import LARGE_MEGAPIXELS
from svdpp.serve.job import COLUMNS as COLUMN_NAMES
from svdpp.serve.job import Job, JobState, job_to_row

if TYPE_CHECKING:
    import sqlite3

    from svdpp.serve.postgres import PostgresConnection

    DatabaseConnection = sqlite3.Connection | PostgresConnection

#: Seconds of waiting that count as much as one step of priority, so that no job waits forever. For
#: example, a job of priority 0 goes before a job of priority 2 that the same owner requested 1201 s
#: later.
AGEING_SECONDS = 600.0

#: Number of expired claims after which a job fails.
MAX_EXPIRED_LEASES = 5


def state_in(states: Iterable[JobState]) -> str:
    """Return an SQL condition for jobs that have one of the states."""
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"


def placeholders(values: Iterable[Any]) -> str:
    """Return a question mark for each value, such as `?, ?`, for a list in an SQL statement."""
    return ", ".join("?" for _ in values)


#: All columns of a job, for `job_from_row`.
COLUMNS = ", ".join(COLUMN_NAMES)
# A job's start is never recorded before its request, and its end never before its start, even if
# the clock was set back, so that no duration is negative.
START_TIME = "CASE WHEN clock() < created_at THEN created_at ELSE clock() END"
BEGIN_TIME = "coalesce(started_at, created_at)"
END_TIME = f"CASE WHEN clock() < {BEGIN_TIME} THEN {BEGIN_TIME} ELSE clock() END"
SAMPLING_INDEX = COLUMN_NAMES.index("sampling")
IS_FINAL = state_in(state for state in JobState if state.is_final)
IS_LARGE = f"photo_pixels > {LARGE_MEGAPIXELS * 10**6}"
MODEL_KEY = "coalesce(nullif(weights, ''), model)"

# --- statements that claim, requeue and renew jobs, and order them by owner -----------------------

# This query finds the first job of each owner by an index, so that its time does not grow with the
# length of the queue. The state is compared again after PostgreSQL has locked the row, because the
# job may have been cancelled meanwhile.
NEXT_JOB = """
    WITH firsts AS MATERIALIZED (SELECT owner AS whose, (
        SELECT seq FROM jobs WHERE jobs.owner = owners.owner
            AND state = 'queued' AND {} ORDER BY due, seq LIMIT 1) AS first FROM owners)
    SELECT id FROM firsts JOIN owners ON owners.owner = whose JOIN jobs ON seq = first
    WHERE state = 'queued' ORDER BY owners.turn, due, seq LIMIT 1
"""
CLAIM = f"""
UPDATE jobs SET state = 'in_progress', started_at = {START_TIME}, server = ?, token = token + ?,
    lease_until = clock() + ?, step = 0,
    turn = coalesce((SELECT turn FROM owners WHERE owners.owner = jobs.owner), 0)
WHERE id = ({{}}) RETURNING {COLUMNS}
"""
NEW_OWNER = "INSERT INTO owners VALUES (?, 0) ON CONFLICT (owner) DO NOTHING"
ADVANCE_TURN = """
INSERT INTO owners SELECT ?, coalesce(max(turn), 0) + 1 FROM owners WHERE true
ON CONFLICT (owner) DO UPDATE SET turn = excluded.turn
"""
IS_EXPIRED = "coalesce(lease_until, 0) <= clock()"
# SQL condition for a job that fails because `MAX_EXPIRED_LEASES` of its claims have expired.
# `{lost}` is 1 if the claim that ends now has expired, else 0.
IS_LAST = f"lost + {{lost}} >= {MAX_EXPIRED_LEASES}"
REQUEUE = f"""
UPDATE jobs SET
    state = CASE WHEN cancel_asked THEN 'cancelled' WHEN {IS_LAST} THEN 'failed' ELSE 'queued' END,
    error = CASE WHEN {IS_LAST} AND NOT cancel_asked THEN ? ELSE error END,
    finished_at = CASE WHEN cancel_asked OR {IS_LAST} THEN {END_TIME} END,
    started_at = CASE WHEN cancel_asked OR {IS_LAST} THEN started_at END,
    attempts = attempts + CASE WHEN cancel_asked THEN 0 ELSE ? END,
    lost = lost + {{lost}},
    server = NULL
WHERE id = ? AND state = 'in_progress' AND token = ? AND {{and_}}
RETURNING state, turn, owner
"""
# One statement renews all claims of a server, to limit the load of the database: every server
# renews its claims every few seconds.
RENEW = """
UPDATE jobs SET lease_until = clock() + ?, step = claims.step
FROM unnest(?::text[], ?::bigint[], ?::int[]) AS claims (id, token, step)
WHERE jobs.id = claims.id AND jobs.token = claims.token AND state = 'in_progress'
RETURNING jobs.id, jobs.token, cancel_asked
"""
REGISTER = """
WITH forgotten AS (DELETE FROM servers WHERE seen_at < clock() - ?)
INSERT INTO servers VALUES (?, ?, clock())
ON CONFLICT (id) DO UPDATE SET about = excluded.about, seen_at = excluded.seen_at RETURNING id
"""
RESTORE_TURN = "UPDATE owners SET turn = ? WHERE owner = ? AND turn > ?"
# This query lists the first job of each owner, in the order of the owners' turns, then the second
# job of each owner, and so on.
ROUND_ROBIN = """
SELECT id, sampling FROM (
    SELECT id, sampling, coalesce(owners.turn, 0) AS turn, row_number() OVER own AS place,
        first_value(due) OVER own AS first_due, first_value(seq) OVER own AS first_seq
    FROM jobs LEFT JOIN owners ON owners.owner = jobs.owner
    WHERE state = 'queued' AND {} WINDOW own AS (PARTITION BY jobs.owner ORDER BY due, seq)
) AS waiting ORDER BY place, turn, first_due, first_seq
"""
# The webhook is set to be due again later, in case the server is killed before `set_callback`.
CLAIM_CALLBACK = f"""
UPDATE jobs SET callback_due = clock() + ?, callback_attempts = callback_attempts + 1
WHERE callback_due <= clock() AND id = (
    SELECT id FROM jobs WHERE callback_url IS NOT NULL AND callback_due <= clock()
        AND state IN ('completed', 'failed') AND {{others}} ORDER BY callback_due LIMIT 1
) RETURNING {COLUMNS}
"""
SET_CALLBACK = """
UPDATE jobs SET callback_due = clock() + ?, callback_error = ?
WHERE id = ? AND callback_attempts = ? RETURNING id
"""


def insert_job(connection: DatabaseConnection, job: Job) -> None:
    """Insert the row of a new job within an open transaction."""
    values = {**job_to_row(job), "due": job.created_at - job.priority * AGEING_SECONDS}
    query = f"INSERT INTO jobs ({', '.join(values)}) VALUES ({placeholders(values)})"
    connection.execute(query, tuple(values.values()))
    connection.execute(NEW_OWNER, (job.owner,))
