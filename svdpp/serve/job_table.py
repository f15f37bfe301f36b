"""The tables of the queue in SQLite: the schema, rows from and to `Job`, and whose job is next.

The owner whose last job was taken longest ago is next; within an owner, priority and age decide. An
owner's `turn` is 0 before the first job, and becomes the largest of all each time that one of its
jobs is taken.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from svdpp.config import SamplingConfig, sampling_from
from svdpp.errors import RequestError
from svdpp.serve.job import Job, JobState

#: The schema's version, in SQLite's `user_version`. 1 had no prompts; 1 and 2 no models;
#: 1 to 3 had a column that is dropped.
VERSION = 4

#: Seconds that one step of priority is worth. A waiting job passes every job that was requested
#: this much later for each step of priority between them, so none waits for ever.
AGEING_SECONDS = 600.0

# `seq` is the order of the requests. `due` orders the jobs of one owner. `turn` of an owner grows
# each time that one of its jobs is taken; `turn` of a job is what its owner had before.
_SCHEMA = f"""
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    seed INTEGER NOT NULL,
    sampling TEXT NOT NULL,
    photo TEXT NOT NULL,
    photo_name TEXT NOT NULL,
    photo_sha256 TEXT NOT NULL,
    prompt TEXT,
    negative_prompt TEXT,
    created_at REAL NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(str(state)) for state in JobState)})),
    started_at REAL,
    finished_at REAL,
    attempts INTEGER NOT NULL,
    cancel_asked INTEGER NOT NULL,
    promised_seconds REAL,
    error TEXT,
    metadata TEXT NOT NULL,
    proof TEXT NOT NULL,
    due REAL NOT NULL,
    turn INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL DEFAULT '',
    weights TEXT NOT NULL DEFAULT '',
    held TEXT,
    proof_reason TEXT
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, turn INTEGER NOT NULL);
CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX jobs_owner_state ON jobs (owner, state);
CREATE INDEX jobs_waiting ON jobs (owner, due) WHERE state = 'queued';
"""

_FROM_VERSION_1 = """
ALTER TABLE jobs ADD COLUMN prompt TEXT;
ALTER TABLE jobs ADD COLUMN negative_prompt TEXT;
"""

# The clip's JSON has the model: a hub id, or the path of a folder, of which clients know the name.
# `rtrim` without the letters of the name leaves the folder above it.
_FROM_VERSION_2 = """
ALTER TABLE jobs ADD COLUMN model TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN weights TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN held TEXT;
ALTER TABLE jobs ADD COLUMN proof_reason TEXT;
UPDATE jobs SET
    model = ifnull(json_extract(metadata, '$.model'), ''),
    weights = coalesce(
        json_extract(metadata, '$.weights_fingerprint'), json_extract(metadata, '$.revision'), '');
UPDATE jobs SET model = replace(model, rtrim(model, replace(model, '/', '')), '')
    WHERE json_extract(metadata, '$.weights_fingerprint') IS NOT NULL;
"""

_FROM_VERSION_3 = "ALTER TABLE jobs DROP COLUMN wants_draft;"

_FIELDS = tuple(each.name for each in fields(Job))
#: The columns of a job, for `job_of`.
COLUMNS = ", ".join(_FIELDS)
_INSERT = f"INSERT INTO jobs ({COLUMNS}, due) VALUES ({', '.join('?' * (len(_FIELDS) + 1))})"


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables of a new file, or bring older ones up to date; one transaction."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if not version and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with --data",
        )
    changes = {
        0: _SCHEMA,
        1: _FROM_VERSION_1 + _FROM_VERSION_2 + _FROM_VERSION_3,
        2: _FROM_VERSION_2 + _FROM_VERSION_3,
        3: _FROM_VERSION_3,
    }
    if version not in changes:
        raise RequestError(
            f"the queue has version {version}, and this svdpp reads versions 1 to {VERSION}",
            "use the svdpp that wrote it, or name another folder with --data",
        )
    change = f"{changes[version]} PRAGMA user_version = {VERSION};"
    database.executescript(f"BEGIN IMMEDIATE; {change} COMMIT;")


def insert(database: sqlite3.Connection, job: Job) -> None:
    """Insert `job` as a new row."""
    values = {name: getattr(job, name) for name in _FIELDS}
    values["sampling"] = json.dumps(asdict(job.sampling))
    values["error"] = json_text(job.error)
    values["metadata"] = json_text(job.metadata)
    values["state"] = str(job.state)
    due = job.created_at - job.priority * AGEING_SECONDS
    database.execute(_INSERT, (*values.values(), due))


def job_of(row: tuple[Any, ...]) -> Job:
    """The job of a row of `COLUMNS`."""
    values = dict(zip(_FIELDS, row, strict=True))
    values["sampling"] = sampling_of(values["sampling"])
    values["state"] = JobState(values["state"])
    values["cancel_asked"] = bool(values["cancel_asked"])
    values["error"] = None if values["error"] is None else json.loads(values["error"])
    values["metadata"] = json.loads(values["metadata"])
    return Job(**values)


def json_text(value: dict[str, Any] | None) -> str | None:
    """`value` as JSON for a column; numbers that are not finite become null."""
    return None if value is None else json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.lru_cache(maxsize=256)  # most jobs of a queue have the same parameters
def sampling_of(text: str) -> SamplingConfig:
    """The parameters in the column `sampling`."""
    return sampling_from(json.loads(text))


def turns_of_owners(database: sqlite3.Connection) -> dict[str, int]:
    """The turns of all owners of whom a job was ever taken."""
    return dict(database.execute("SELECT owner, turn FROM owners"))


def take_next(database: sqlite3.Connection) -> int | None:
    """QUEUED to IN_PROGRESS for the next job; its `seq`, or None if none is queued."""
    found = database.execute(
        """
        SELECT seq, jobs.owner, ifnull(owners.turn, 0) FROM jobs
        LEFT JOIN owners ON owners.owner = jobs.owner
        WHERE state = 'queued' AND held IS NULL ORDER BY ifnull(owners.turn, 0), due, seq LIMIT 1
        """
    ).fetchone()
    if found is None:
        return None
    seq, owner, turn = found
    database.execute(
        "INSERT INTO owners SELECT ?, ifnull(max(turn), 0) + 1 FROM owners WHERE true"
        " ON CONFLICT (owner) DO UPDATE SET turn = excluded.turn",
        (owner,),
    )
    change = "state = 'in_progress', started_at = ?, turn = ?"
    database.execute(f"UPDATE jobs SET {change} WHERE seq = ?", (time.time(), turn, seq))
    return int(seq)


def put_back(database: sqlite3.Connection, id: str, *, counts: bool) -> bool:
    """IN_PROGRESS to QUEUED, or to CANCELLED if that was asked for; see `JobStore.put_back`."""
    where = "WHERE id = ? AND state = 'in_progress'"
    found = database.execute(
        f"SELECT owner, turn, cancel_asked FROM jobs {where}", (id,)
    ).fetchone()
    if found is None:
        return False
    owner, turn, cancel_asked = found
    if cancel_asked:
        change = "state = 'cancelled', finished_at = ?"
        database.execute(f"UPDATE jobs SET {change} {where}", (time.time(), id))
        return True
    change = "state = 'queued', started_at = NULL, attempts = attempts + ?"
    database.execute(f"UPDATE jobs SET {change} {where}", (int(counts), id))
    # The owner gets back the turn that it spent on the job.
    database.execute("UPDATE owners SET turn = min(turn, ?) WHERE owner = ?", (turn, owner))
    return True


def in_turn(rows: Iterable[tuple[Any, ...]], turns: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Rows of queued jobs in the order in which `take_next` takes them.

    They have due, seq, owner and other columns, and come in the order of due and seq.
    """
    queues: defaultdict[str, deque[tuple[Any, ...]]] = defaultdict(deque)
    for row in rows:
        queues[row[2]].append(row)
    largest = max(turns.values(), default=0)
    heap = [(turns.get(owner, 0), *queue[0][:2], owner) for owner, queue in queues.items()]
    heapq.heapify(heap)
    while heap:
        owner = heap[0][3]
        queue = queues[owner]
        yield queue.popleft()
        largest += 1
        if queue:
            heapq.heapreplace(heap, (largest, *queue[0][:2], owner))
        else:
            heapq.heappop(heap)
