"""Owns the tables of the queue in SQLite: the schema, and rows from and to `Job`."""

from __future__ import annotations

import functools
import json
import math
import sqlite3
from dataclasses import asdict, fields
from typing import Any

from svdpp.config import SamplingConfig, sampling_from
from svdpp.errors import RequestError
from svdpp.serve.job import Job, JobState

#: The schema's version, in SQLite's `user_version`. 1 had no prompts; 1 and 2 no models.
VERSION = 3

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
    wants_draft INTEGER NOT NULL,
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

_FIELDS = tuple(each.name for each in fields(Job))
#: The columns of a job, for `job_of`.
COLUMNS = ", ".join(_FIELDS)
_INSERT = f"INSERT INTO jobs ({COLUMNS}, due) VALUES ({', '.join('?' * (len(_FIELDS) + 1))})"


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables of a new file, or bring older ones up to date; one transaction.

    Raises:
        RequestError: the file has another version.
        sqlite3.Error: it cannot be read or written.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if not version and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with --data",
        )
    changes = {0: _SCHEMA, 1: _FROM_VERSION_1 + _FROM_VERSION_2, 2: _FROM_VERSION_2}
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
    for flag in ("cancel_asked", "wants_draft"):
        values[flag] = bool(values[flag])
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
