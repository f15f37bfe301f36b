"""What the databases of the queue have in common: tables, versions, and the data folder.

The statements of the queue are the same for both. `?` is a value, and `clock()` the time, which is
the database's own: the servers of a fleet need not agree on it.
"""

from __future__ import annotations

import os
from pathlib import Path

from svdpp.errors import OutputError, RequestError
from svdpp.serve.job import JobState

#: The folder for files that no job has; a disk of its own may have one before there is a queue.
LOST = "lost+found"
#: The name of the file that holds the reserve.
RESERVE = ".svdpp-reserve"
#: The name of the file that the server of a data folder locks.
LOCK = "lock"

_LOW_BYTES = 256 * 2**20
# Of a disk that is smaller than eight times the above.
_LOW_PART = 8

VERSION = 7

# `seq` is the order of the requests. `due` orders the jobs of one owner. `turn` of a job is what
# its owner had before the job was taken. `lease_until` is NULL if no other server shares the queue.
# `lost` counts the claims that ended because nobody renewed them.
_SCHEMA = f"""
CREATE TABLE jobs (
    seq {{serial}},
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    seed BIGINT NOT NULL,
    sampling TEXT NOT NULL,
    photo TEXT NOT NULL,
    photo_name TEXT NOT NULL,
    photo_sha256 TEXT NOT NULL,
    prompt TEXT,
    negative_prompt TEXT,
    created_at DOUBLE PRECISION NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(str(state)) for state in JobState)})),
    started_at DOUBLE PRECISION,
    finished_at DOUBLE PRECISION,
    attempts INTEGER NOT NULL,
    cancel_asked BOOLEAN NOT NULL,
    promised_seconds DOUBLE PRECISION,
    error TEXT,
    metadata TEXT NOT NULL,
    proof TEXT NOT NULL,
    due DOUBLE PRECISION NOT NULL,
    turn BIGINT NOT NULL DEFAULT 0,
    model TEXT NOT NULL DEFAULT '',
    weights TEXT NOT NULL DEFAULT '',
    held TEXT,
    proof_reason TEXT,
    photo_pixels BIGINT NOT NULL DEFAULT 0
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, turn BIGINT NOT NULL);
CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX jobs_owner_state ON jobs (owner, state);
CREATE INDEX jobs_waiting ON jobs (owner, due) WHERE state = 'queued';
"""
# What each version adds to the one before it. Additions only, with defaults: a server of the
# version before goes on while its neighbours are upgraded.
_ADDED = {
    6: """
ALTER TABLE jobs ADD COLUMN videos TEXT NOT NULL DEFAULT '{}';
ALTER TABLE jobs ADD COLUMN server TEXT;
ALTER TABLE jobs ADD COLUMN token BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN lease_until DOUBLE PRECISION;
ALTER TABLE jobs ADD COLUMN step INTEGER NOT NULL DEFAULT 0;
CREATE INDEX jobs_of_kind ON jobs (coalesce(nullif(weights, ''), model), owner, due, seq)
    WHERE state = 'queued';
INSERT INTO owners SELECT DISTINCT owner, 0 FROM jobs WHERE true ON CONFLICT (owner) DO NOTHING;
ALTER TABLE jobs ADD COLUMN callback_url TEXT;
ALTER TABLE jobs ADD COLUMN callback_due DOUBLE PRECISION DEFAULT 0;
ALTER TABLE jobs ADD COLUMN callback_attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN callback_error TEXT;
CREATE INDEX jobs_callbacks ON jobs (callback_due) WHERE callback_url IS NOT NULL;
CREATE TABLE servers (id TEXT PRIMARY KEY, about TEXT NOT NULL, seen_at DOUBLE PRECISION NOT NULL);
""",
    7: """
ALTER TABLE jobs ADD COLUMN lost INTEGER NOT NULL DEFAULT 0;
""",
}


class AwayError(OutputError):
    """The queue or the store is gone, or does not answer; whether a change was made is not known.

    It is logged once where that is noticed: who tries again, or is answered, need not.
    """


def schema(version: int, serial: str) -> str:
    """The statements that make the newest tables of those of a version; 0: there are none.

    `serial` is the type of a primary key that counts up.
    """
    added = [text for number, text in sorted(_ADDED.items()) if number > version]
    return "".join([*([] if version else [_SCHEMA.format(serial=serial)]), *added])


def check_version(version: int, where: str) -> None:
    """Refuses tables that this program does not know."""
    if version not in (0, *(number - 1 for number in _ADDED), VERSION):
        raise RequestError(
            f"the queue has version {version}, and this svdpp reads version {VERSION}",
            f"use the svdpp that wrote it, or name another {where}",
        )


def check_own(folder: Path, own: set[str], restore: str) -> None:
    """Refuses a folder that has other files than its `own`."""
    names = set(os.listdir(folder)) - {LOCK, LOST, RESERVE, *own} if folder.exists() else set()
    if names:
        raise RequestError(
            f"the data folder {str(folder)!r} has no queue, but other files, such as "
            f"{min(names)!r}",
            f"{restore}, name another folder with --data, or add --adopt to use this one: files "
            "of a lost queue go to its lost+found, all others are left alone",
        )


def free_and_low(folder: Path) -> tuple[int, int]:
    """Free bytes of the disk, and the mark below which they are low."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    return disk.f_bavail * disk.f_frsize, min(_LOW_BYTES, size // _LOW_PART)
